"""`layerpush trace` of the files of real engines: every mode, a dropped request, one with a long wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree

import pytest

from tests.e2e.enginespec import LAYERWISE, TRACE, EngineSpec, transfer
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check_tokens, new_id, prompt, send
from tests.e2e.test_tensor_parallel import P_TWO
from tests.trace_command import (
    HAND_OVER,
    Fields,
    arrows,
    end,
    lines,
    merged,
    parts_add_up,
    slices,
    summary,
    trace,
    wait_for,
)
from tests.unit.test_trace_perfetto import check

PREFILLS = [
    EngineSpec(f"P-traced-{number}", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE))
    for number in (0, 1)
]
MODES = {"layer": 0, "chunk": 0, "request": 1}
"""The number of the P that pushes in a mode."""
D = EngineSpec("D-traced", "D", transfer(LAYERWISE, trace_dir=TRACE))
LENGTH = 1500


@dataclass(frozen=True)
class Recorded:
    """``by_mode`` are successful requests. P got ``waited`` long after D, as the last one."""

    folders: list[Path]
    by_mode: dict[str, Handoff]
    crowd: list[Handoff]
    dropped: Handoff
    waited: Handoff

    @property
    def completed(self) -> list[Handoff]:
        return [*self.by_mode.values(), *self.crowd, self.waited]


@pytest.fixture(scope="module")
def recorded(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Copies of the files of engines that no earlier test has used. Later tests do not write into them."""
    fleet.end(*PREFILLS, D)
    *prefills, d = fleet.get(*PREFILLS, D)
    layer = prefills[0]
    waited = Handoff(new_id(), prompt(400, seed=500), layer, d)
    d.add(waited.to_d())
    waited.await_registration()
    crowd = []
    for number, p in enumerate(prefills):  # an engine pair's first request waits for the handshake
        crowd.append(send(p, d, prompt(300, seed=490 + number), "early"))
        d.wait_output(crowd[-1].request_id)
    by_mode = {}
    for mode, number in MODES.items():
        order: Order = "late" if mode == "request" else "early"
        by_mode[mode] = send(prefills[number], d, prompt(LENGTH, seed=501 + len(by_mode)), order, mode=mode)
        d.wait_output(by_mode[mode].request_id)
    together = [send(layer, d, prompt(700, seed=510 + number), "together") for number in range(4)]
    for handoff in together:
        d.wait_output(handoff.request_id)
    dropped = Handoff(new_id(), prompt(LENGTH, seed=520), layer, d)
    layer.hold()
    d.add(dropped.to_d())
    dropped.await_registration()
    layer.add(dropped.to_p())
    layer.step(3)
    d.abort(dropped.request_id)
    layer.run()
    layer.wait_output(dropped.request_id)
    layer.add(waited.to_p())
    d.wait_output(waited.request_id)
    found = Recorded([host.trace_dir for host in (*prefills, d)], by_mode, crowd + together, dropped, waited)
    wanted = len(found.completed) + 1
    for host in (*prefills, d):
        host.wait_idle()
    wait_for(lambda: len(lines(found.folders, "push")) == len(lines(found.folders, "load")) == wanted, "every record")
    wait_for(lambda: len(lines(found.folders, "first_token")) == len(found.completed), "every first token")
    copies = tmp_path_factory.mktemp("recorded")
    return replace(found, folders=[Path(copytree(folder, copies / folder.parent.name)) for folder in found.folders])


def test_the_summary_names_the_slowest_request(recorded: Recorded) -> None:
    data = summary(recorded.folders)
    assert data["outcomes"] == {"completed": len(recorded.completed), "cancelled": 1}
    assert data["notes"] == []
    slowest = data["slowest"][0]
    assert slowest["request"] == recorded.waited.request_id
    assert max(data["shares"], key=data["shares"].get) == "queue"
    assert slowest["queue"] > 0.5 * slowest["total"]
    text = trace("summary", *recorded.folders).stdout
    first = text.splitlines()[text.splitlines().index("") + 3]
    assert first.startswith(recorded.waited.request_id)


def test_the_parts_of_every_request_add_up(recorded: Recorded) -> None:
    """The parts add up to the time in D's own records. A completed request has no unknown part."""
    found = {one["request"]: one for one in summary(recorded.folders)["slowest"]}
    loads = {load["request_id"]: load for load in lines(recorded.folders, "load")}
    tokens = {token["request_id"]: token for token in lines(recorded.folders, "first_token")}
    assert len(found) == len(loads)
    assert len(tokens) == len(recorded.completed)
    assert all(parts_add_up(one) for one in found.values())
    for handoff in recorded.completed:
        one = found[handoff.request_id]
        (decode_id,) = [decode_id for decode_id in loads if decode_id.startswith(handoff.request_id)]
        wait = tokens[decode_id]["t_first_token"] - loads[decode_id]["t_awaited"]
        assert one["total"] == pytest.approx(wait, abs=1e-6)
        assert (one["other"], one["tokens"]) == (pytest.approx(0.0, abs=1e-6), len(handoff.token_ids))
        assert all(one[name] is not None for name in ("queue", "prefill", "hand-over", *HAND_OVER))
    for mode, handoff in recorded.by_mode.items():
        assert found[handoff.request_id]["mode"] == mode
    assert found[recorded.by_mode["request"].request_id]["prefill"] == 0.0, "prefill was over before D registered"


def test_a_viewer_accepts_the_merged_trace(recorded: Recorded, tmp_path: Path) -> None:
    events = merged(recorded.folders, tmp_path / "one.json")
    check(events)
    ends = arrows(events)
    assert [name for name, _ in ends].count("completion") == len(recorded.completed)
    assert [name for name, _ in ends].count("registration") == len(recorded.completed) + 1
    for (name, number), (leaves, arrives) in ends.items():
        assert leaves["ts"] <= arrives["ts"] + 0.01, f"{name} {number} leads back in time"


def test_both_sides_of_a_request_are_in_order(recorded: Recorded, tmp_path: Path) -> None:
    events = merged(recorded.folders, tmp_path / "one.json")
    for mode, handoff in recorded.by_mode.items():
        (push,) = slices(events, "push", handoff.request_id)
        (load,) = slices(events, "load", handoff.request_id)
        assert push["args"]["mode"] == mode
        writes = writes_of(events, handoff)
        assert writes
        assert max(push["ts"], load["ts"]) < min(end(push), end(load)), "push and load must overlap"
        assert all(load["ts"] < write["ts"] < end(load) for write in writes)
        if mode != "request":  # a whole push's completion comes with the WRITE, and D may get it before P polls
            assert max(end(write) for write in writes) <= end(load)
        assert (push["ts"] < load["ts"]) == (mode == "request"), "P must begin first only if D comes late"
        computed = max(end(one) for one in events if is_chunk_of(one, push))
        assert (min(write["ts"] for write in writes) < computed) == (mode != "request")


def writes_of(events: list[Fields], handoff: Handoff) -> list[Fields]:
    ours = [one for one in events if one["ph"] == "X" and one["cat"] == "WRITEs"]
    return [one for one in ours if one["args"]["request"] == handoff.request_id]


def is_chunk_of(one: Fields, push: Fields) -> bool:
    inside = one["ph"] == "X" and push["ts"] <= one["ts"] and end(one) <= end(push) + 0.001
    return inside and (one["pid"], one["tid"]) == (push["pid"], push["tid"]) and one["name"].startswith("chunk ")


def test_plot_draws_any_request(recorded: Recorded, tmp_path: Path) -> None:
    for number, handoff in enumerate((recorded.by_mode["layer"], recorded.dropped)):
        ending, begins = [("png", b"\x89PNG"), ("svg", b"<?xml")][number % 2]
        out = tmp_path / f"{handoff.request_id}.{ending}"
        trace("plot", *recorded.folders, "--request", handoff.request_id, "--out", out)
        assert out.read_bytes().startswith(begins)
    assert recorded.waited.request_id in trace("plot", *recorded.folders, "--out", tmp_path / "slow.png").stdout


def test_every_rank_of_p_is_in_the_trace(fleet: Fleet, reference: Reference, tmp_path: Path) -> None:
    p, d = fleet.get(P_TWO, D)
    handoff = send(p, d, prompt(700, seed=530), "early")
    check_tokens(handoff.outcome(), reference)
    folders = [p.trace_dir, d.trace_dir]

    def of(kind: str, key: str) -> list[Fields]:
        return [line for line in lines(folders, kind) if line[key].startswith(handoff.request_id)]

    wait_for(lambda: len(of("push", "request_id")) == 2 and len(of("load", "request_id")) == 1, "every record")
    events = merged(folders, tmp_path / "one.json")
    check(events)
    pushes = slices(events, "push", handoff.request_id)
    (load,) = slices(events, "load", handoff.request_id)
    assert len({push["pid"] for push in pushes}) == 2
    into_load = [
        leaves["pid"]
        for (name, _), (leaves, arrives) in arrows(events).items()
        if name == "completion" and arrives["pid"] == load["pid"] and load["ts"] <= arrives["ts"] <= end(load)
    ]
    assert sorted(into_load) == sorted(push["pid"] for push in pushes)
    (one,) = [one for one in summary(folders)["slowest"] if one["request"] == handoff.request_id]
    assert parts_add_up(one)
    assert one["outcome"] == "completed"
