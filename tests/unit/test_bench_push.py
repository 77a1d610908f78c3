"""bench.push: what it draws, what it concludes, what it shows. Its processes run in the contract tests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from bench.pair import processes
from bench.pair.end import settle
from bench.pair.lists import names, numbers
from bench.pair.sweep import time_left
from bench.pair.tables import PATTERNS, Draw
from bench.push import report
from bench.push.__main__ import LINKS, app
from bench.push.cells import WAYS, Cell, Series, summary
from bench.push.plot import plot
from bench.push.points import COUNTS, SIZES, Point, draw, points
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


def test_patterns_are_what_they_say() -> None:
    one, p, half, both = (drawn(ids, 100) for ids in ("contiguous", "random-p", "half", "random"))
    assert runs_of(one.sources, one.targets) == 1
    assert runs_of(p.targets) == 1
    assert runs_of(p.sources) > 90
    assert runs_of(both.targets) > 90
    assert runs_of(both.sources) > 90
    assert runs_of(half.sources[:50], half.targets[:50]) == 1
    assert 40 < runs_of(half.sources) < 55
    assert 40 < runs_of(half.targets) < 55


def test_a_draw_is_the_same_everywhere_and_others_are_others() -> None:
    assert drawn("random", 50) == drawn("random", 50)
    different = {drawn("random", 50), drawn("random", 50, number=1), drawn("random", 50, seed=1), drawn("half", 50)}
    assert len(different) == 4


def test_points_are_all_combinations_but_the_too_large_ones() -> None:
    wanted, left_out = points(SIZES, COUNTS, list(PATTERNS), 1, 64 << 20)
    assert len(wanted) + len(left_out) == len(SIZES) * len(COUNTS) * len(PATTERNS)
    assert max(point.bytes for point in wanted) == 64 << 20
    assert min(point.bytes for point in left_out) > 64 << 20
    sizes = [point.block_bytes for point in wanted]
    assert sizes == sorted(sizes)  # a geometry is set up once


def test_time_left_follows_the_bytes() -> None:
    small, large = Point(1024, 1, "random"), Point(1 << 20, 64, "random")
    assert time_left([small] * 3, [small], 2.0) == pytest.approx(6.0)
    assert time_left([large], [small], 2.0) > 4.0
    assert time_left([], [small], 2.0) == 0


def test_lists_of_the_command_line() -> None:
    assert numbers("2, 16,2") == [2, 16]
    assert names("tcp,shm", ["shm", "tcp"]) == ["tcp", "shm"]
    for text in ("", "2,x", "0", "-1", "1.5"):
        with pytest.raises(ValueError, match="positive"):
            numbers(text)
    with pytest.raises(ValueError, match="none of shm, tcp"):
        names("shm,ib", ["shm", "tcp"])


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
def test_what_auto_misses(auto_s: float, packs: bool, missed: list[str]) -> None:
    this = cell(auto_s, packs)
    assert this.misses == missed
    assert this.is_sure == bool(missed)


def test_a_miss_within_the_noise_is_not_sure() -> None:
    this = cell(0.0)
    this.ways["auto"].seconds[:] = [1.5e-3, 1.6e-3, 3.5e-3, 3.6e-3]
    assert this.misses
    assert not this.is_sure


def test_what_the_choice_alone_costs() -> None:
    assert cell(9e-3).regret == pytest.approx(1.5)  # auto chose gathered, packed takes two thirds of its time


def test_json_has_every_sample_and_the_estimates() -> None:
    written = json.loads(json.dumps(cell(2.3e-3).as_json()))
    assert (written["link"], written["block_bytes"], written["blocks"], written["ids"]) == ("shm", 4096, 64, "random")
    assert written["best"] == "packed"
    assert written["auto"]["chose"] == "gathered"
    assert written["auto"]["to_best"]["ratio"] == pytest.approx(1.15)
    assert written["estimate_s"]["direct"] == 1e-3
    assert {way: len(each["seconds"]) for way, each in written["ways"].items()} == dict.fromkeys(WAYS, 4)


def test_the_tables_name_the_misses_with_their_estimates() -> None:
    console = Console(width=200, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    cells = [cell(2.3e-3), cell(4.6e-3, packs=False)]
    console.print(report.misses(cells), report.model(cells))
    text = console.export_text()
    assert "4 (1)" in text
    assert "no room" in text
    assert "1.15 [1.15, 1.15]" in text
    assert report.misses([cell(2e-3)]) is None
    assert "direct at 1 of 2 points" in summary([cell(2e-3), cell(2.3e-3)])
    assert "of it, at 0 of 1 points" in summary([cell(2e-3)])
    assert "of it, at 1 of 1 points" in summary([cell(2e-3, packs=False)])
    assert "gathered" in report.line(cells[0])


def test_the_picture(tmp_path: Path) -> None:
    plot([cell(2.3e-3), cell(2.3e-3, packs=False)], tmp_path / "push.png", "two points")
    assert (tmp_path / "push.png").read_bytes().startswith(b"\x89PNG")


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


def test_help_teaches() -> None:
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    for word in ("direct", "gathered", "packed", "auto", "poison", "python -m bench.push --quick", "--corrupt"):
        assert word in text


def test_memory_of_a_gpu_needs_a_gpu() -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["--device", "cuda"])
    assert result.exit_code == 2
    assert "torch finds no CUDA device here" in result.output


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 1), ("cuda:1", 1)])
def test_what_was_begun_on_a_gpu_is_waited_for(device: str, waits: int) -> None:
    with mock.patch.object(torch.cuda, "synchronize") as synchronize:
        settle(torch.device(device))
    assert synchronize.call_count == waits


def test_processes_get_their_links_settings_and_memory_that_can_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "ib")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for device, links in LINKS.items():
        for name, wire in links.items():
            for seat in wire.seats.values():
                found = processes._environment(seat)
                assert ("cuda_ipc" in found["UCX_TLS"].split(",")) == (device == "cuda"), name
                assert "PYTORCH_CUDA_ALLOC_CONF" not in found
