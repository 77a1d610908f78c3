"""Any kv_transfer_params of a client: a bad request fails alone, and the error names the bad key."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from bench.servers.ports import PortAllocator
from tests.e2e import engines, probes
from tests.e2e.enginehost import EngineHost, HostDied, Request
from tests.e2e.fixtures import LogReader
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, new_id, prompt, send
from tests.e2e.hostile import HOSTILE_ANSWERS, side_channel
from tests.support.ports import DOOR_PORTS

PORTS = PortAllocator(DOOR_PORTS)
TOKENS, SHORT = prompt(300, seed=90), prompt(40, seed=92)
BAD_ID = "x" * 1009
DROPPED = object()

BAD_AT_D: list[tuple[str, Any]] = [
    ("tp_size", DROPPED),
    ("pp_size", 10**9),
    ("remote_port", "5600"),
    ("remote_host", "127.0.0.1:0;127.0.0.2"),
    ("remote_engine_id", ["prefill"]),
    ("remote_request_id", {"id": 1}),
    ("do_remote_prefill", "yes"),
    ("do_remote_decode", True),
    ("transfer_mode", "pull"),
    ("remote_prefill_cached_tokens", -1),
]
BAD_AT_P: list[tuple[str, Any]] = [
    ("do_remote_decode", "true"),
    ("_p_side_truncated", True),
    ("layerpush_mode", "Layer"),
]
"""One value of each key. tests/unit/test_request_params.py has all bad values."""


def changed(good: Request, key: str, value: Any) -> Request:
    assert good.kv_transfer_params is not None
    params = good.kv_transfer_params | {key: value}
    if value is DROPPED:
        del params[key]
    return Request(good.request_id, good.token_ids, params, good.max_tokens)


def bad_requests(p: EngineHost, d: EngineHost) -> Iterator[tuple[EngineHost, str, Request]]:
    """(engine, the bad key, request), each request with an id of its own."""
    for key, value in BAD_AT_D:
        yield d, key, changed(Handoff(new_id(), SHORT, p, d).to_d(), key, value)
    for key, value in BAD_AT_P:
        yield p, key, changed(Handoff(new_id(), SHORT, p, d).to_p(), key, value)
    yield p, "do_remote_prefill", Handoff(new_id(), SHORT, p, d).to_d()  # meant for D
    yield d, "do_remote_decode", Handoff(new_id(), SHORT, p, d).to_p()  # meant for P
    yield p, "the request's id is ", Handoff(BAD_ID, SHORT, p, d).to_p()
    yield d, "the request's id is ", replace(Handoff(new_id(), SHORT, p, d).to_d(), request_id=BAD_ID)
    for host in (p, d):
        yield host, "must be an object", Request(new_id(), SHORT, ["not an object"])


def check_serving(p: EngineHost, d: EngineHost, reference: Reference) -> None:
    check(send(p, d, TOKENS, "early").outcome(), reference)


def test_a_bad_request_is_refused_by_key_and_others_are_served(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    check_serving(p, d, reference)
    running = send(p, d, prompt(1500, seed=91), "together")
    for host, key, request in bad_requests(p, d):
        with pytest.raises(AssertionError) as refused:
            host.add(request)
        assert "VLLMValidationError: kv_transfer_params: " in str(refused.value)
        assert key in str(refused.value).rpartition("kv_transfer_params: ")[2]
    check(running.outcome(), reference)
    check_serving(p, d, reference)


def test_a_bad_request_past_the_front_end_is_computed_without_a_transfer(
    fleet: Fleet, reference: Reference, logs: LogReader
) -> None:
    """No client can get an error any more, so the answer is right without a transfer. No step of the engine fails."""
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    expected = reference.tokens(SHORT)
    for host in (p, d):
        host.call(probes.open_front_door)
    try:
        for host, key, request in bad_requests(p, d):
            host.call(probes.report_refused, new_id(), request.kv_transfer_params)
            if key in ("remote_prefill_cached_tokens", "must be an object"):
                continue  # these break the front end itself
            host.add(request)
            assert host.wait_output(request.request_id).token_ids == expected[: request.max_tokens]
        for host in (p, d):
            lines = [line for line in logs.new_text(host).splitlines() if "runs without a KV transfer" in line]
            assert lines
            assert all("request " in line and ": kv_transfer_params: " in line for line in lines)
    finally:
        for host in (p, d):
            host.call(probes.close_front_door)
    check_serving(p, d, reference)


def test_a_request_refused_by_the_front_end_leaves_nothing_behind(fleet: Fleet, reference: Reference) -> None:
    """Its prompt may be too long. vLLM reports this to D's connector, which holds nothing for the request."""
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    d.call(probes.report_refused, new_id(), Handoff(new_id(), TOKENS, p, d).to_d().kv_transfer_params)
    d.wait_idle()
    check_serving(p, d, reference)


def test_stock_dies_of_a_missing_key(fleet: Fleet) -> None:
    """The negative control: the reason for the door."""
    (d,) = fleet.spawn(engines.D_STOCK)
    bad = changed(Handoff(new_id(), TOKENS, d, d).to_d(), "tp_size", DROPPED)
    d.add(bad)
    with pytest.raises(HostDied, match="KeyError: 'tp_size'"):
        d.wait_output(bad.request_id)
    fleet.discard(d)


@pytest.mark.parametrize(
    ("wrong", "policy"),
    [
        ("refused port", "recompute"),
        ("no such host", "fail"),
        ("another engine's id", "recompute"),
        pytest.param("refused port", "fail", marks=pytest.mark.exhaustive),
        pytest.param("no such host", "recompute", marks=pytest.mark.exhaustive),
        pytest.param("another engine's id", "fail", marks=pytest.mark.exhaustive),
    ],
)
def test_an_engine_that_cannot_be_reached_fails_its_request_only(
    fleet: Fleet, reference: Reference, logs: LogReader, policy: str, wrong: str
) -> None:
    p, d = fleet.get(engines.P_LAYER, engines.D_RECOMPUTING if policy == "recompute" else engines.D_LAYER)
    handoff = Handoff(new_id(), TOKENS, p, d)
    place: dict[str, Any] = {
        "refused port": {"remote_engine_id": f"ghost-{new_id()}", "remote_port": PORTS.next_free()},
        "no such host": {"remote_engine_id": f"ghost-{new_id()}", "remote_host": "no-such-host.invalid"},
        "another engine's id": {"remote_engine_id": f"ghost-{new_id()}"},
    }[wrong]
    params = handoff.to_d().kv_transfer_params
    assert params is not None
    params |= place
    (internal,) = d.add(handoff.to_d(params))
    check_serving(p, d, reference)  # meanwhile
    check_failed(d, handoff, internal, policy, reference)
    d.poll_until(probes.handshakes_over)  # a heartbeat may have begun another handshake
    lines = [line for line in logs.new_text(d).splitlines() if f"KV load of {internal}" in line]
    assert len(lines) == 1, lines
    assert place["remote_engine_id"] in lines[0]
    check_serving(p, d, reference)


def check_failed(d: EngineHost, handoff: Handoff, internal: str, policy: str, reference: Reference) -> None:
    finished = d.wait_output(handoff.request_id)
    if policy == "recompute":
        assert finished.token_ids == reference.tokens(handoff.token_ids)
    else:
        assert (finished.finish_reason, finished.token_ids) == ("error", ())


def test_garbage_on_the_side_channel_changes_nothing(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    with zmq.Context() as context:
        for host in (p, d):
            with context.socket(zmq.DEALER) as asker:
                asker.setsockopt(zmq.LINGER, 0)
                asker.setsockopt(zmq.RCVTIMEO, 10_000)
                asker.connect(f"tcp://127.0.0.1:{host.port}")
                for frames in ([b"x"], [b"", b"\xc1"], [b"", b""], [b"", msgspec.msgpack.encode([1, 2, 3])], [b""] * 9):
                    asker.send_multipart(frames)
                asker.send_multipart([b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0))])
                assert len(asker.recv_multipart()) == 3
    check_serving(p, d, reference)


def test_a_hostile_side_channel_fails_its_request_only(fleet: Fleet, reference: Reference, logs: LogReader) -> None:
    """D asks any host in a request. The answers must not affect other requests."""
    p, d = fleet.get(engines.P_LAYER, engines.D_RECOMPUTING)
    asked: dict[str, Callable[[], bool]] = {}
    failing: dict[str, tuple[Handoff, str]] = {}
    with ExitStack() as stack:
        for name, answer in HOSTILE_ANSWERS.items():
            handoff = Handoff(new_id(), SHORT, p, d)
            ghost = {"remote_engine_id": f"ghost-{new_id()}", "remote_port": PORTS.next_free()}
            channel = side_channel(ghost["remote_port"], answer, p.port, ghost["remote_engine_id"])
            asked[name] = stack.enter_context(channel)
            params = handoff.to_d().kv_transfer_params
            assert params is not None
            failing[name] = (handoff, *d.add(handoff.to_d(params | ghost)))
        check_serving(p, d, reference)  # meanwhile
        for handoff, internal in failing.values():
            check_failed(d, handoff, internal, "recompute", reference)
        d.poll_until(probes.handshakes_over)
    assert [name for name in asked if not asked[name]()] == []
    said = logs.new_text(d)
    assert [name for name, (_, internal) in failing.items() if f"KV load of {internal}" not in said] == []
    check_serving(p, d, reference)
