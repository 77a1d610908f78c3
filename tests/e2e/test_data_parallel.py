"""A P with two data-parallel ranks behind one API server: D must register with the rank that has the request."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from bench.servers.engines import EngineGroup, EngineServer, no_proxy
from bench.servers.interrupts import Interrupts
from bench.servers.model import write_model
from bench.servers.ports import PortAllocator
from tests.e2e.proxyrig import MODEL, SHAPE, client_of, server_spec, until
from tests.e2e.servedrig import ServeSpec, scrape
from tests.support.ports import DATA_PARALLEL_DECODE_PORTS, DATA_PARALLEL_PREFILL_PORTS

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
TO_P = {"do_remote_decode": True, "do_remote_prefill": False}
WITHIN_S = 10.0
"""Far less than P's ``unknown_request_timeout_s``, 30, and D's ``push_registration_timeout``, 480."""


@dataclass
class Pair:
    prefill: EngineServer
    decode: EngineServer

    def ask_p(self, prompt: list[int], request_id: str, rank: int) -> dict[str, Any]:
        """P's answer from the rank that the router chooses."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": TO_P}
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, "X-data-parallel-rank": str(rank)}
        asked = urllib.request.Request(f"{self.prefill.url}/v1/completions", json.dumps(body).encode(), headers)
        with no_proxy.open(asked, timeout=60) as answer:
            return dict(json.loads(answer.read()))

    def ask_d(self, prompt: list[int], request_id: str, params: dict[str, Any]) -> str:
        said = client_of(self.decode.url).completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=4,
            temperature=0,
            timeout=WITHIN_S,
            extra_headers={"X-Request-Id": request_id},
            extra_body={"kv_transfer_params": params, "ignore_eos": True},
        )
        return str(said.choices[0].finish_reason)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    scratch = tmp_path_factory.mktemp("ranks")
    model = write_model(scratch / "model", SHAPE)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        # P's second rank listens on the port after that of the first rank.
        ports = PortAllocator(DATA_PARALLEL_PREFILL_PORTS), PortAllocator(DATA_PARALLEL_DECODE_PORTS)
        groups = [stack.enter_context(EngineGroup(scratch, interrupts, each)) for each in ports]
        prefill = groups[0].start(server_spec("prefill", "prefill", model, "--data-parallel-size", "2", kind=ServeSpec))
        decode = groups[1].start(server_spec("decode", "decode", model))
        for group, engine in zip(groups, (prefill, decode), strict=True):
            group.wait_ready([engine])
        yield Pair(prefill, decode)


def tokens(seed: int) -> list[int]:
    return [5 + (seed * 7919 + index * 31) % 200 for index in range(600)]


@pytest.fixture(scope="module")
def identities(pair: Pair) -> list[dict[str, Any]]:
    """The params in each rank's answer, without those of the request."""
    answers = [pair.ask_p(tokens(rank), f"who-{rank}", rank)["kv_transfer_params"] for rank in range(2)]
    assert [answer["remote_engine_id"][-4:] for answer in answers] == ["_dp0", "_dp1"]
    assert answers[1]["remote_port"] == answers[0]["remote_port"] + 1
    kept = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size", "do_remote_prefill")
    return [{key: answer[key] for key in kept} for answer in answers]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("named", [0, 1])
def test_a_wrong_data_parallel_rank_fails_the_load_at_once(
    pair: Pair, identities: list[dict[str, Any]], rank: int, named: int
) -> None:
    prompt, request_id = tokens(10 + 2 * rank + named), f"ask-{rank}-{named}"
    params = identities[named] | {"do_remote_decode": False, "remote_request_id": f"cmpl-{request_id}-0"}
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(pair.ask_d, prompt, request_id, params)
        until(lambda: scrape(pair.decode).value("awaited_loads") > 0 or asking.done(), "D has registered")
        pair.ask_p(prompt, request_id, rank)
        if rank == named:
            assert asking.result() == "length"
        else:
            with pytest.raises(openai.InternalServerError):
                asking.result()
            log = pair.decode.log_path.read_text(errors="replace")
            assert f"the request went to data-parallel rank {rank} of the prefill engine" in log
