"""Real API servers on two clocks behind `layerpush proxy`: spans in a client's trace, and one trace of both files.

P lives in a time namespace: its `perf_counter` is an hour and more ahead of D's, as if it were on another host.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.servers.engines import EngineGroup, no_proxy
from bench.servers.interrupts import Interrupts
from bench.servers.load import make_prompt
from bench.servers.model import write_model
from bench.servers.ports import PortAllocator
from tests.e2e.collector import Collector, Span, collector
from tests.e2e.forkedservers import ForkedSpec
from tests.e2e.proxyrig import DEADLINE_S, MODEL, SHAPE, proxy, server_spec, until
from tests.support.ports import SPANS_PORTS
from tests.trace_command import HAND_OVER, arrows, end, lines, merged, parts_add_up, slices, summary, trace
from tests.unit.test_trace_perfetto import check

AHEAD_S = 5000
NOTE = re.compile(
    r"clock of P less that of D: ([\d.]+) s, measured by the handshake; "
    r"messages allow ([\d.]+) ms less to ([\d.]+) ms more"
)
ANOTHER_CLOCK = ("unshare", "--time", "--monotonic", str(AHEAD_S), "--fork")
TOKENS = 700
PARENT = "b7ad6b7169203331"


class AheadSpec(ForkedSpec):
    """A server on another clock."""

    ahead_s = AHEAD_S


@dataclass(frozen=True)
class Servers:
    url: str
    collector: Collector
    folders: list[Path]

    def complete(self, seed: int, trace_id: str | None) -> str:
        """Send a request in a client's trace, or in none. Returns the answer's id."""
        prompt = make_prompt(TOKENS, seed, SHAPE.vocabulary)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        if trace_id is not None:
            headers["traceparent"] = f"00-{trace_id}-{PARENT}-01"
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with no_proxy.open(request, timeout=DEADLINE_S) as answer:
            return str(json.load(answer)["id"])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    scratch = tmp_path_factory.mktemp("spans")
    ports = PortAllocator(SPANS_PORTS)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setenv("NO_PROXY", "127.0.0.1")
        taken = stack.enter_context(collector(ports.next_free()))
        interrupts = stack.enter_context(Interrupts())
        group = stack.enter_context(EngineGroup(scratch, interrupts, ports))
        model = write_model(scratch / "model", SHAPE)
        kind = AheadSpec if has_time_namespaces() else ForkedSpec
        options = ("--otlp-traces-endpoint", taken.url)
        folders = [scratch / "trace-P", scratch / "trace-D"]
        extra: list[dict[str, object]] = [{"trace_dir": str(folder), "granularity": "layer"} for folder in folders]
        d = group.start(server_spec("D", "decode", model, *options, extra=extra[1]))
        p = group.start(server_spec("P", "prefill", model, *options, extra=extra[0], kind=kind))
        group.wait_ready([p, d])
        url = stack.enter_context(proxy(scratch, ports.next_free(), p, [d])).url
        yield Servers(url, taken, folders)


def has_time_namespaces() -> bool:
    if shutil.which(ANOTHER_CLOCK[0]) is None:
        return False
    return subprocess.run([*ANOTHER_CLOCK, "true"], capture_output=True, check=False).returncode == 0


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


@pytest.mark.timeout(600)
def test_push_and_load_are_spans_in_the_clients_trace(servers: Servers) -> None:
    """All are below the client's own span, in the client's trace. An earlier request without a trace has no span."""
    untraced = servers.complete(2, None)
    trace_id = secrets.token_hex(16)
    request_id = servers.complete(1, trace_id)
    of_trace = servers.collector.spans
    until(lambda: len(named(of_trace(trace_id), "llm_request")) == 2, "the spans of both engines' API servers")
    until(lambda: {"layerpush.push", "layerpush.load"} <= {span.name for span in of_trace(trace_id)}, "our spans")
    spans = of_trace(trace_id)
    assert sorted(span.name for span in spans) == ["layerpush.load", "layerpush.push", "llm_request", "llm_request"]
    assert {span.parent for span in spans} == {PARENT}
    (push,), (load,) = named(spans, "layerpush.push"), named(spans, "layerpush.load")
    assert all(request_id in span.attributes["gen_ai.request.id"] for span in spans)
    assert (push.attributes["layerpush.outcome"], push.attributes["layerpush.tokens"]) == ("completed", TOKENS)
    assert (push.attributes["layerpush.engine_id"], push.attributes["layerpush.decode_engine_id"]) == ("P", "D")
    assert (load.attributes["layerpush.engine_id"], load.attributes["layerpush.outcome"]) == ("D", "completed")
    assert max(push.start, load.start) < min(push.end, load.end), "both have the same wall clock"
    around = named(spans, "llm_request")
    assert min(span.start for span in spans) >= min(span.start for span in around) - 0.1
    assert load.end <= max(span.end for span in around) + 0.1  # a busy P may end its span later
    pushed = [span.attributes["gen_ai.request.id"] for span in servers.collector.spans() if "layerpush." in span.name]
    assert not [one for one in pushed if untraced in one]


@pytest.mark.timeout(600)
def test_files_of_two_clocks_make_one_trace(servers: Servers, tmp_path: Path) -> None:
    """Without root there is one clock only."""
    request_id = f"{servers.complete(4, None)}-0"

    def recorded() -> bool:
        return all(
            any(one["request_id"].startswith(request_id) for one in lines(servers.folders, kind))
            for kind in ("push", "load", "first_token")
        )

    until(recorded, "all records")
    (load,) = [one for one in lines(servers.folders, "load") if one["request_id"].startswith(request_id)]
    found, out = summary(servers.folders), tmp_path / "one.svg"
    said = trace("plot", *servers.folders, "-r", request_id, "-o", out).stderr
    assert out.read_bytes().startswith(b"<?xml")
    if has_time_namespaces():
        assert len({one["clock"] for one in lines(servers.folders, "process")}) == 2
        assert load["clock_offset"] == pytest.approx(AHEAD_S, abs=0.5), "the handshake measures it"
        check_offset(*found["notes"])
        assert "measured by the handshake" in said
    (one,) = [one for one in found["slowest"] if one["request"] == request_id]
    assert parts_add_up(one)
    assert None not in [one[name] for name in ("queue", "prefill", "hand-over", *HAND_OVER)]
    assert one["total"] < DEADLINE_S
    events = merged(servers.folders, tmp_path / "one.json")
    check(events)
    (push_slice,) = slices(events, "push", request_id)
    (load_slice,) = slices(events, "load", request_id)
    assert max(push_slice["ts"], load_slice["ts"]) < min(end(push_slice), end(load_slice))
    assert all(leaves["ts"] <= arrives["ts"] + 0.01 for leaves, arrives in arrows(events).values())


def check_offset(note: str) -> None:
    """Check that a note of the summary has the offset of the two clocks."""
    said = NOTE.match(note)
    assert said is not None, note
    seconds, less, more = map(float, said.groups())
    assert seconds - 1e-3 * less <= AHEAD_S + 2e-6, note
    assert seconds + 1e-3 * more >= AHEAD_S - 2e-6, note
