"""bench.push: its random blocks, conclusions and tables. Its processes run in the contract tests."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.pair import processes
from bench.pair.tables import PATTERNS, Draw
from bench.push.__main__ import LINKS, app
from bench.push.cells import WAYS, Cell, Series
from bench.push.points import Point, draw
from layerpush.transport.packing.cost_model import Costs
from layerpush.transport.packing.runs import runs

POOL = 256


def drawn(ids: str, blocks: int, number: int = 0, seed: int = 0) -> Draw:
    return draw(Point(4096, blocks, ids), POOL, seed, number)


def runs_of(*sides: tuple[int, ...]) -> int:
    return runs(*(np.asarray(side, dtype=np.int32) for side in sides))


@given(st.sampled_from(list(PATTERNS)), st.integers(1, POOL // 2), st.integers(0, 5))
def test_a_draw_names_each_block_once_and_never_the_null_block(ids: str, blocks: int, number: int) -> None:
    chosen = drawn(ids, blocks, number)
    for side in (chosen.sources, chosen.targets):
        assert len(side) == len(set(side)) == blocks
        assert min(side) >= 1
        assert max(side) < POOL


def test_each_pattern_matches_its_name() -> None:
    one, p, half, both = (drawn(ids, 100) for ids in ("contiguous", "random-p", "half", "random"))
    assert runs_of(one.sources, one.targets) == 1
    assert runs_of(p.targets) == 1
    assert runs_of(p.sources) > 90
    assert runs_of(both.targets) > 90
    assert runs_of(both.sources) > 90
    assert runs_of(half.sources[:50], half.targets[:50]) == 1
    assert 40 < runs_of(half.sources) < 55
    assert 40 < runs_of(half.targets) < 55


COSTS = asdict(Costs(scattered=((1000, 2e-3),)))


def cell(auto_s: float, packs: bool = True, **fixed: float) -> Cell:
    """Seconds of each way without any noise. ``packs``: there is room for packed WRITEs."""
    seconds = {"direct": 4e-3, "gathered": 3e-3, "packed": 2e-3} | fixed | {"auto": auto_s}
    plans = {way: way for way in WAYS} | {"auto": "gathered", "packed": "packed" if packs else "direct"}
    ways = {way: Series([seconds[way]] * 4, [1e-4] * 4, [plans[way]] * 4) for way in WAYS}
    estimates = {"direct": 1e-3, "gathered": 2e-3, "packed": 5e-3}
    return Cell("shm", Point(4096, 64, "random"), ways, {"direct": 64}, estimates, COSTS)


def test_the_best_plan_is_the_fastest_possible_one() -> None:
    assert cell(2e-3).best == "packed"
    assert cell(2e-3, packs=False).best == "gathered"
    assert cell(2e-3, direct=1e-3).best == "direct"


@pytest.mark.parametrize(
    ("auto_s", "packs", "missed"),
    [
        (2.1e-3, True, []),
        (2.3e-3, True, ["1.15 x the best plan (packed)"]),
        (3.2e-3, False, []),
        (4.6e-3, False, ["1.53 x the best plan (gathered)", "1.15 x direct"]),
    ],
)
def test_the_missed_limits_of_auto_are_reported(auto_s: float, packs: bool, missed: list[str]) -> None:
    this = cell(auto_s, packs)
    assert this.misses == missed
    assert this.is_sure == bool(missed)


def test_json_has_every_sample_and_the_estimates() -> None:
    written = json.loads(json.dumps(cell(2.3e-3).as_json()))
    assert (written["link"], written["block_bytes"], written["blocks"], written["ids"]) == ("shm", 4096, 64, "random")
    assert written["best"] == "packed"
    assert written["auto"]["chose"] == "gathered"
    assert written["auto"]["to_best"]["ratio"] == pytest.approx(1.15)
    assert written["estimate_s"]["direct"] == 1e-3
    assert {way: len(each["seconds"]) for way, each in written["ways"].items()} == dict.fromkeys(WAYS, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--links", "ib"], "none of shm, tcp"),
        (["--device", "gpu"], "none of cpu, cuda"),
        (["--device", "cuda", "--links", "shm"], "none of cuda_ipc"),
        (["--links", "cuda_ipc"], "none of shm, tcp"),
        (["--ids", "sorted"], "none of contiguous"),
        (["--blocks", "none"], "positive whole number"),
        (["--block-kib", "256", "--blocks", "4096"], "--most-mib"),
        (["--polls", "often"], "none of engine, spin"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str) -> None:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_processes_get_their_links_settings_and_shareable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "ib")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for device, links in LINKS.items():
        for name, wire in links.items():
            for seat in wire.seats.values():
                found = processes._environment(seat)
                assert ("cuda_ipc" in found["UCX_TLS"].split(",")) == (device == "cuda"), name
                assert "PYTORCH_CUDA_ALLOC_CONF" not in found
