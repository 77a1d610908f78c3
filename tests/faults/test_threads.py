"""A thread of P or D ends while requests wait. Its engine ends with the reason, and the other one goes on."""

import contextlib
import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.servers.engines import EngineFailedError, EngineGroup, EngineServer, no_proxy
from bench.servers.interrupts import Interrupts
from bench.servers.ports import PortAllocator
from layerpush.core.prefill_identity import PrefillIdentity
from tests.e2e import probes, wirefaults
from tests.e2e.enginehost import EngineHost, HostDied
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference, new_id, prompt
from tests.e2e.proxyrig import MODEL, model_with_tokenizer, server_spec
from tests.faults import engines
from tests.faults.checks import (
    ENDED,
    LogView,
    check_idle_soon,
    check_load_failed,
    check_merged,
    check_serves,
    hold_midway,
    pause_midway,
)
from tests.support.ports import WRITER_ENDS_PORTS
from tests.support.waiting import until

LENGTH = 1000
ENDS_S = 10.0
REASON = "thread nixl-push-writer has ended"


def check_ends(host: EngineHost, request_id: str) -> None:
    """The engine reports the reason to the program that steps it."""
    with pytest.raises(HostDied, match=f"{REASON}: SystemExit: a defect"):
        host.wait_output(request_id, timeout=ENDS_S)
    host.wait_ended(ENDS_S)
    assert f"{REASON}, and the engine ends" in host.log()


def test_p_ends_with_its_writer(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """As if P was killed."""
    (p,) = fleet.get(engines.P_VICTIM)
    (d,) = fleet.get(engines.D)
    handoff = pause_midway(p, d, LENGTH, seed=400)
    p.call(probes.end_writer)
    p.run()
    check_ends(p, handoff.request_id)
    check_load_failed(handoff, reference, timeout=engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, ENDED)
    check_idle_soon(d)
    check_serves(fleet.respawn(p, same_id=True), d, reference, seed=401)


def test_d_ends_with_its_writer(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """As if D was killed."""
    p, other = fleet.get(engines.P, engines.D)
    (d,) = fleet.get(engines.D_VICTIM)
    handoff = hold_midway(p, d, LENGTH, seed=402)
    d.call(probes.end_writer)
    check_ends(d, handoff.request_id)
    p.call(wirefaults.lift)
    p.wait_output(handoff.request_id)
    check_idle_soon(p, engines.PEER_TIMEOUT_S + engines.GRACE_S)
    check_merged(handoff)
    check_serves(p, other, reference, seed=403)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[EngineServer, EngineServer]]:
    """API servers of P and D, whose clients may end the writer."""
    model = model_with_tokenizer(tmp_path / "model")
    options = ("--worker-extension-cls", f"{probes.__name__}.{probes.WriterFault.__name__}")
    with Interrupts() as interrupts, EngineGroup(tmp_path, interrupts, PortAllocator(WRITER_ENDS_PORTS)) as group:
        p, d = (
            group.start(
                dataclasses.replace(
                    server_spec(name, role, model, *options, extra={"peer_timeout_s": engines.PEER_TIMEOUT_S}),
                    variables={"VLLM_SERVER_DEV_MODE": "1"},
                )
            )
            for name, role in (("P", "prefill"), ("D", "decode"))
        )
        group.wait_ready([p, d])
        yield p, d


def post(server: EngineServer, path: str, body: dict[str, object]) -> int:
    """The status of the answer; 0: none came."""
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with no_proxy.open(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def is_healthy(server: EngineServer) -> bool:
    with contextlib.suppress(EngineFailedError):
        return server.is_ready()
    return False


def test_the_health_of_a_server_whose_writer_has_ended(servers: tuple[EngineServer, EngineServer]) -> None:
    """D has a request that waits for P, and its client gets an error. P is idle: it makes no step."""
    p, d = servers
    params = PrefillIdentity("P", "127.0.0.1", p.side_channel_port, 1).to_decode(new_id())
    body = {"model": MODEL, "prompt": prompt(300, seed=404), "max_tokens": 4, "kv_transfer_params": params}
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(post, d, "/v1/completions", body)
        until(lambda: has_waiting(d), "the request waits")
        assert post(d, "/collective_rpc", {"method": "end_writer"}) == 200
        assert waits.result(ENDS_S) in (0, 500, 503)
    post(p, "/collective_rpc", {"method": "end_writer"})
    for server in (p, d):
        until(lambda: not is_healthy(server), f"{server.name} is not healthy", ENDS_S)  # noqa: B023
        assert f"{REASON}, and the engine ends" in server.log_path.read_text()


def has_waiting(server: EngineServer) -> bool:
    with no_proxy.open(f"{server.url}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return any(line.startswith("vllm:num_requests_waiting{") and float(line.split()[-1]) > 0 for line in lines)
