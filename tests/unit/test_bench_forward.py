"""bench.forward: what it measures, what it concludes, what it shows. Its processes run in the contract tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bench.forward import page, report
from bench.forward.__main__ import app
from bench.forward.cases import Case
from bench.forward.cells import OFF, Cell, Series
from bench.forward.growth import COSTS, fit, lines
from bench.forward.kv import Noise
from bench.forward.queued import queued_s
from bench.pair.settings import POISON

CASE = Case("llama-70b-tp8", 80, 8192, 4096, "random")
CPU = torch.device("cpu")


def test_a_step_computes_its_tokens_for_all_requests_together() -> None:
    assert CASE.steps == (2048, 2048)
    assert replace(CASE, tokens=5000).steps == (2048, 2048, 904)
    assert replace(CASE, requests=4).steps == (512,) * 8
    assert replace(CASE, requests=1000, tokens=32).steps == (16, 16)  # a block each at least


def test_requests_have_blocks_of_their_own_and_nobody_has_block_0() -> None:
    case = replace(CASE, requests=3, tokens=1000)
    pool = case.cache_bytes // (case.layers * case.block_bytes)
    draws = case.draws(pool, seed=0)
    assert draws == case.draws(pool, seed=0)
    assert draws != case.draws(pool, seed=1)
    for side in ("sources", "targets"):
        blocks = [block for draw in draws for block in getattr(draw, side)]
        assert len(blocks) == len(set(blocks)) == 3 * 63
        assert min(blocks) > 0
        assert max(blocks) < pool


def test_kv_differs_by_layer_and_forward_is_the_same_everywhere_and_never_poison() -> None:
    here, there = Noise(1 << 16, 0, CPU), Noise(1 << 16, 0, CPU)
    kv = {(turn, layer): here.layer(turn, layer, 1 << 16) for turn in range(3) for layer in (0, 1, 79)}
    for at, bytes_ in kv.items():
        assert torch.equal(bytes_, there.layer(*at, 1 << 16))
        assert not (bytes_ == POISON).any()
        others = [other for where, other in kv.items() if where != at]
        assert all((bytes_ != other).float().mean() > 0.9 for other in others)
    for turn in range(0, 10_000, 997):  # however long a run is, a cut is whole
        assert here.layer(turn, 130, 1 << 16).numel() == 1 << 16


def series(
    forward_s: float, exposed_s: float = 0.0, end_s: float = 0.0, hook_us: float = 5.0, queued_s: float = 0.02
) -> Series:
    rounds = 4
    return Series(
        forward_s=[forward_s] * rounds,
        forward_cpu_s=[0.7] * rounds,
        forward_queued_s=[queued_s] * rounds,
        end_s=[end_s or forward_s + exposed_s] * rounds,
        exposed_s=[exposed_s] * rounds,
        transfer_s=[0.2] * rounds,
        post_s=[0.05] * rounds,
        arm_s=[1e-5] * rounds,
        writer_s=[0.1] * rounds,
        decode_s=[0.1] * rounds,
        writes=[80] * rounds,
        descriptors=[20480] * rounds,
        plans=[{"direct": 80}] * rounds,
        hooks_us=[hook_us] * 80 * rounds,
    )


def cell(
    layer: Series | None = None, ceiling_s: float = 0.02, forward_s: float = 0.8, auto: Series | None = None
) -> Cell:
    """One descriptor of 16 MiB takes ``ceiling_s``, all 160 MiB ten times that."""
    measured = {
        OFF: series(forward_s),
        **({"auto": auto} if auto else {}),
        "layer": layer or series(forward_s, exposed_s=0.002),
        "chunk": series(forward_s, exposed_s=0.05),
        "request": series(forward_s, exposed_s=0.2),
    }
    return Cell("loopback", CASE, measured, 16 << 20, [ceiling_s] * 4)


def shown(parts: Iterable[object]) -> str:
    console = Console(width=240, record=True)
    console.print(*parts)
    return console.export_text()


def test_what_follows_from_a_cell() -> None:
    here = cell()
    assert here.wire_s == pytest.approx(0.2)
    assert here.load == pytest.approx(0.25)
    assert here.bound_s == pytest.approx(0.8 + 0.2 / 160)  # the last layer of the last step is sent after the forward
    assert here.rate("layer") == pytest.approx(CASE.bytes / 0.2)
    assert here.post_share("layer") == pytest.approx(0.25)
    assert here.slowdown("layer").ratio == pytest.approx(1.0)
    assert here.exposed_ratio("layer", "request").ratio == pytest.approx(0.01)
    assert here.exposed_limit == pytest.approx(2 / 80)
    assert here.misses == []


def test_what_a_forward_takes_longer_is_told_apart() -> None:
    later = series(0.88, queued_s=0.036)
    later.forward_s, later.forward_cpu_s = [0.8, 0.8, 0.8, 1.12], [0.708] * 4
    delays = cell(later).delays("layer")
    assert delays is not None
    assert (delays.computing, delays.for_a_core, delays.for_the_lock) == pytest.approx((0.01, 0.02, 0.07))
    assert "+1.0% / +2.0% / +7.0%" in shown(report.tables([cell(later)]))


def test_without_the_system_s_word_nothing_is_told_apart(tmp_path: Path) -> None:
    silent = series(0.88, 0.002)
    silent.forward_queued_s = []
    assert cell(silent).delays("layer") is None
    assert cell(silent).as_json()["modes"]["layer"]["delays"] is None
    assert shown(report.tables([cell(silent)])).count("% / ") == 4, "two of three modes have two slashes each"
    assert queued_s(tmp_path / "none") is None
    for text in ("", "0 0 0", "1 2", "1 2 x"):
        (tmp_path / "schedstat").write_text(text)
        assert queued_s(tmp_path / "schedstat") is None


@pytest.mark.parametrize(
    ("layer", "missed"),
    [
        (series(0.8, 0.002, hook_us=11.0), "a hook takes 11.0 us"),
        (series(0.84, 0.002), "the forward takes 1.050 x its time for sure"),
        (series(0.8, 0.006), "exposed is 0.030 x a request's, not 0.025"),
    ],
)
def test_a_missed_limit_is_named(layer: Series, missed: str) -> None:
    assert cell(layer).misses == [missed]
    assert report.missed([cell(layer)]) == [f"loopback, llama-70b-tp8 4k random: {missed}"]


def test_auto_has_the_limits_if_it_was_measured_and_is_compared_with_all_others() -> None:
    slow = series(0.84, 0.001)
    here = cell(slow, auto=series(0.8, 0.001))
    assert here.misses == []
    assert cell(auto=slow).misses == ["the forward takes 1.050 x its time for sure"]
    written = json.loads(json.dumps(here.as_json()))
    auto = written["modes"]["auto"]
    assert auto["forward_of_layer"]["ratio"] == pytest.approx(0.8 / 0.84)
    assert auto["exposed_of_chunk"]["ratio"] == pytest.approx(0.02)
    about = {"cpus": 2, "gpus": []}
    text = page.table({"cells": [written], "rounds": 4, "date": "2026-01-02", "machine": about, "versions": {}})
    headings, _, row = text.splitlines()[:3]
    assert headings.index("exposed by `auto`") < headings.index("exposed by `layer`") < headings.index("forward of")
    assert row.endswith("| 0.952 [0.952, 0.952] | 1.000 [1.000, 1.000] | 1.000 [1.000, 1.000] | 0.020 [0.020, 0.020] |")
    assert "in mode `auto`" in text


def test_a_line_through_points_is_found() -> None:
    slope, intercept, r2 = fit([1, 2, 4, 8], [3.0, 5.0, 9.0, 17.0])
    assert (slope, intercept, r2) == pytest.approx((2.0, 1.0, 1.0))
    assert fit([1, 2, 4], [0.0, 0.0, 0.0]) == pytest.approx((0.0, 0.0, 1.0))
    assert fit([1, 2, 3, 4], [1.0, 3.0, 1.0, 3.0])[2] < 0.5
    with pytest.raises(ValueError, match="two points"):
        fit([1, 1], [1.0, 2.0])


def test_everything_is_in_the_json_and_in_the_tables() -> None:
    here, fitted = (
        cell(),
        list(lines([("layers", value, cell(series(0.8, 0.002 * value, hook_us=value))) for value in (8, 16, 32)])),
    )
    written = json.loads(json.dumps(here.as_json()))
    assert written["bytes"] == CASE.bytes
    assert written["misses"] == []
    layer = written["modes"]["layer"]
    assert layer["raw"]["exposed_s"] == [0.002] * 4
    assert layer["exposed_of_request"]["ratio"] == pytest.approx(0.01)
    found = {(line.mode, line.cost): line for line in fitted}
    assert set(found) == {(mode, cost) for mode in ("layer", "chunk", "request") for cost in COSTS}
    assert found["layer", "hooks"].slope_s == pytest.approx(80e-6)
    assert sum(layer["hook_us"]["histogram"]["counts"]) == layer["hook_us"]["calls"] == 320
    assert written["off"]["raw"]["forward_s"] == [0.8] * 4
    text = shown([*report.tables([here]), report.growth(fitted), report.line(here)])
    assert "0.010 (2/L 0.025)" in text
    assert "writer's processor time" in text
    assert "exposed ms: layer 2.0  chunk 50.0  request 200.0" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--links", "ib"], "none of shm, loopback, cuda_ipc, and no rate such as"),
        (["--links", "cuda_ipc"], "add --device cuda"),
        (["--models", "gpt-2"], "none of llama-8b"),
        (["--most-mib", "1"], "the smallest"),
        (["--tokens", "0"], "positive"),
        (["--packing", "zip"], "none of auto, off, gather, packed"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert said in result.output
