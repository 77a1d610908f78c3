"""bench.writer: its steps, its prices, its page. Its processes run in the contract tests."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from bench.pair.reach import Reach
from bench.writer import turns as free
from bench.writer.__main__ import app
from bench.writer.page import table
from bench.writer.prices import CASES, LOCKED, UNLOCKED, Samples, descriptors, line, step_s
from layerpush.transport.base import Route, TransportError
from layerpush.transport.link import Link
from tests.unit.builders import layout_of

LAYERS, BLOCKS, ALL = 80, 161, LOCKED + UNLOCKED
WRITES = {("layer", 1): 80, ("layer", 4): 320, ("layer", 16): 1280, ("chunk", 1): 1, ("chunk", 4): 4, ("chunk", 16): 16}


@pytest.fixture
def reach() -> Reach:
    """A reach as ``turns`` uses it, without memory and without NIXL."""
    layout = layout_of([0] * LAYERS, BLOCKS)
    link = Link("D", (Route("D", 0, "ours", "theirs"),), layout.region_blocks)
    cache = SimpleNamespace(layout=layout, blocks=BLOCKS, slots=[torch.zeros(1)])
    return cast("Reach", SimpleNamespace(cache=cache, link=link, window=lambda _: None))


@pytest.mark.parametrize(("mode", "requests"), WRITES)
def test_a_step_has_one_write_per_request_or_per_request_and_layer(reach: Reach, mode: str, requests: int) -> None:
    taken = free.turns(reach, 0, mode, requests)
    assert taken["writes"] == WRITES[mode, requests]
    assert taken.keys() == {"turn_s", "poll_s", "writes"}


def test_a_failed_push_ends_the_measurement(reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TransportError("no link")

    monkeypatch.setattr(free.FreeTransport, "post_write", refuse)
    with pytest.raises(RuntimeError, match="no link"):
        free.turns(reach, 0, "layer", 4)


def result() -> dict[str, Any]:
    """Python takes 8 ms a step; a WRITE 10 us under the lock and 90 us outside; a descriptor 1 us outside."""
    steps, calls = [Samples(case) for case in CASES["turns"]], [Samples(case) for case in CASES["calls"]]
    for step in steps:
        for turn_s in (7e-3, 8e-3, 20e-3):
            step.add({"turn_s": turn_s, "poll_s": 5e-6, "writes": WRITES[step.case["mode"], step.case["requests"]]})
    for call in calls:
        price = {"make": 20e-6, "transfer": 50e-6 + 1e-6 * call.case["descriptors"], "check": 20e-6, "release": 10e-6}
        call.add(price | {"polls": 1})
    written = [asdict(call) for call in calls]
    return {
        "date": "2026-11-23",
        "machine": {"cpus": 2},
        "versions": {"nixl": "1.5.1"},
        "rounds": 3,
        "lines": {"locked": line(written, LOCKED), "unlocked": line(written, UNLOCKED)},
        "turns": [asdict(step) for step in steps],
        "calls": written,
    }


def test_a_line_has_the_price_of_a_write_and_of_a_descriptor() -> None:
    lines = result()["lines"]
    assert lines["locked"] == pytest.approx({"write_s": 10e-6, "descriptor_s": 0, "r2": 1}, abs=1e-9)
    assert lines["unlocked"] == pytest.approx({"write_s": 90e-6, "descriptor_s": 1e-6, "r2": 1}, abs=1e-9)


def test_one_write_for_all_requests_saves_the_price_of_the_others() -> None:
    measured = result()
    step = measured["turns"][2]
    assert step["case"] == {"mode": "layer", "requests": 16}
    assert descriptors(step) == 8
    apart, together = (step_s(step, measured["calls"], ALL, joined) for joined in (1, 16))
    assert apart == pytest.approx(8e-3 + 1280 * (100e-6 + 8e-6))
    assert apart - together == pytest.approx(1200 * 100e-6)
    assert step_s(step, measured["calls"], LOCKED) == pytest.approx(8e-3 + 1280 * 10e-6)


def test_the_page_has_every_step_and_no_figure_beyond_the_measured_writes() -> None:
    text = table(result())
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines()[2:8]]
    assert [(row[0].strip("`"), int(row[1])) for row in rows] == list(WRITES)
    joined = ["`layer`", "16", "1280", "8", "8.0 ms", "6.2 µs", "6.2 µs", "5.0 µs", "146.2 ms", "82 %", "58 %"]
    assert rows[2] == joined
    assert rows[3:] == [[*row[:8], "", "", ""] for row in rows[3:]]
    assert "10.0 µs under that lock (`release_xfer_handle`) and 91.0 µs outside it" in text
    assert "90.0 µs and 1.0 µs outside it (R² 1.00)" in text
    assert "Measured 2026-11-23: 2 CPU cores, NIXL 1.5.1." in text


def test_an_unknown_link_is_named() -> None:
    found = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["--link", "ib"])
    assert found.exit_code == 2
    assert "'ib' is none of shm" in found.output
