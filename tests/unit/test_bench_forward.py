"""bench.forward: its measurements, conclusions and tables. Its processes run in the contract tests."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.forward import page
from bench.forward.__main__ import app
from bench.forward.cases import GROWN, LEAST, Case, growing_cases, known_cases
from bench.forward.cells import OFF, CaseSamples, Series
from bench.forward.cells import missed as missed_by
from bench.forward.cores import Cores, queued_s, split_cores
from bench.forward.end import LOOK_BYTES, by_rank, strays
from bench.forward.growth import COSTS, fit, lines
from bench.forward.kv import Noise
from bench.forward.models import SMALL, WHOLE
from bench.forward.presets import LONG
from bench.forward.settings import POISON

CASE = Case("llama-70b-tp8", 80, 8192, 4096, "random")
CPU = torch.device("cpu")


def test_a_step_computes_its_tokens_for_all_requests_together() -> None:
    assert CASE.steps == (2048, 2048)
    assert replace(CASE, tokens=5000).steps == (2048, 2048, 904)
    assert replace(CASE, requests=4).steps == (512,) * 8
    assert replace(CASE, requests=1000, tokens=32).steps == (16, 16)  # a block each at least


def test_requests_share_no_block_and_none_has_block_0() -> None:
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


def test_kv_is_reproducible_differs_by_layer_and_forward_and_has_no_poison() -> None:
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
    forward_s: float,
    exposed_s: float = 0.0,
    end_s: float = 0.0,
    hook_us: float = 5.0,
    queued_s: float = 0.02,
    writer_s: float = 0.1,
) -> Series:
    rounds = 4
    return Series(
        forward_s=[forward_s] * rounds,
        forward_cpu_s=[0.7] * rounds,
        forward_queued_s=[queued_s] * rounds,
        end_s=[end_s or forward_s + exposed_s] * rounds,
        exposed_s=[exposed_s] * rounds,
        writer_s=[writer_s] * rounds,
        writes=[80] * rounds,
        descriptors=[20480] * rounds,
        plans=[{"direct": 80}] * rounds,
        hooks_us=[hook_us] * 80 * rounds,
    )


def cell(
    layer: Series | None = None, ceiling_s: float = 0.02, forward_s: float = 0.8, auto: Series | None = None
) -> CaseSamples:
    """One descriptor of 16 MiB takes ``ceiling_s``, all 160 MiB ten times that."""
    measured = {
        OFF: series(forward_s),
        **({"auto": auto} if auto else {}),
        "layer": layer or series(forward_s, exposed_s=0.002),
        "chunk": series(forward_s, exposed_s=0.05),
        "request": series(forward_s, exposed_s=0.2),
    }
    return CaseSamples("loopback", CASE, measured, 16 << 20, [ceiling_s] * 4)


def test_the_figures_derived_from_a_cell() -> None:
    here = cell()
    assert here.wire_s == pytest.approx(0.2)
    assert here.load == pytest.approx(0.25)
    assert here.bound_s == pytest.approx(0.8 + 0.2 / 160)  # the last layer of the last step is sent after the forward
    assert here.slowdown("layer").value == pytest.approx(1.0)
    assert here.exposed_ratio("layer", "request").value == pytest.approx(0.01)
    assert here.exposed_limit == pytest.approx(2 / 80)
    assert here.misses == []


def test_the_delay_of_a_forward_is_split_by_cause() -> None:
    later = series(0.88, queued_s=0.036)
    later.forward_s, later.forward_cpu_s = [0.8, 0.8, 0.8, 1.12], [0.708] * 4
    delays = cell(later).delays("layer")
    assert delays is not None
    assert (delays.computing, delays.for_a_core, delays.for_the_lock) == pytest.approx((0.01, 0.02, 0.07))


def test_without_schedstat_the_delay_is_not_split(tmp_path: Path) -> None:
    silent = series(0.88, 0.002)
    silent.forward_queued_s = []
    assert cell(silent).delays("layer") is None
    assert cell(silent).as_json()["modes"]["layer"]["delays"] is None
    assert queued_s(tmp_path / "none") is None
    for text in ("", "0 0 0", "1 2", "1 2 x"):
        (tmp_path / "schedstat").write_text(text)
        assert queued_s(tmp_path / "schedstat") is None


@pytest.mark.parametrize(
    ("layer", "missed"),
    [
        (series(0.8, 0.002, hook_us=5.1), "a hook takes 5.1 us, not 5"),
        (series(0.84, 0.002), "the forward takes 1.050 x its time without a push, not 1.03, for sure"),
        (series(0.8, 0.006), "exposed is 0.030 x request's, not 0.025, for sure"),
    ],
)
def test_a_missed_limit_is_reported(layer: Series, missed: str) -> None:
    assert cell(layer).misses == [missed]
    assert missed_by([cell(layer)]) == [f"loopback, llama-70b-tp8 4k random: {missed}"]


@pytest.mark.parametrize(
    ("auto", "missed"),
    [
        (series(0.812, 0.002), "the forward takes 1.015 x its time with chunk, not 1.01, for sure"),
        (series(0.8, 0.0025), "exposed is 1.250 x layer's, not 1.2, for sure"),
    ],
)
def test_auto_is_also_compared_with_chunk_and_layer(auto: Series, missed: str) -> None:
    assert cell(auto=auto).misses == [missed]
    assert cell(layer=auto).misses == [], "without auto, layer is compared with neither"


def test_a_limit_inside_the_interval_is_not_reported_as_missed_for_sure() -> None:
    unsteady = series(0.8, 0.002)
    unsteady.forward_s = [0.79, 0.82, 0.83, 0.84]
    assert cell(auto=unsteady).misses == [
        "the forward takes 1.031 x its time without a push, not 1.03",
        "the forward takes 1.031 x its time with chunk, not 1.01",
    ]


def test_auto_has_the_limits_if_measured_and_is_compared_with_every_mode() -> None:
    slow = series(0.84, 0.001)
    here = cell(slow, auto=series(0.8, 0.001, writer_s=0.05))
    assert here.misses == []
    assert "the forward takes 1.050 x its time without a push, not 1.03, for sure" in cell(auto=slow).misses
    written = json.loads(json.dumps(here.as_json()))
    auto = written["modes"]["auto"]
    assert auto["forward_of_layer"]["ratio"] == pytest.approx(0.8 / 0.84)
    assert auto["exposed_of_chunk"]["ratio"] == pytest.approx(0.02)
    about = {"cpus": 2, "gpus": []}
    head = {"rounds": 4, "date": "2026-01-02", "machine": about, "versions": {}, "settings": {}}
    text = page.table({"cells": [written], **head})
    assert "P and D share all cores." in text
    pinned = {"cores": {"forward": [3], "others": [0, 1, 2]}}
    assert "The forward has core 3 to itself; P's other threads and D have core 0, 1, 2." in page.table(
        {"cells": [written], **head, "settings": pinned}
    )
    headings, _, row = text.splitlines()[:3]
    assert headings.index("exposed by `auto`") < headings.index("exposed by `layer`") < headings.index("hook")
    assert "| 50.0 ms |" in row
    assert "in mode `auto`" in text


def test_the_table_of_long_prompts_lists_the_omitted_prompts() -> None:
    written = json.loads(json.dumps(cell(auto=series(0.8, 0.002)).as_json()))
    machine = {"cpus": 2, "gpus": []}
    head = {"rounds": 3, "date": "2026-01-02", "machine": machine, "versions": {}, "settings": {}}
    absent = {"model": "llama-8b", "tokens": 131072, "memory_bytes": 41 << 30}
    text = page.long_table({"cells": [written], "left_out": [absent], **head})
    assert text.splitlines()[2] == (
        "| llama-70b-tp8 | 4096 | 160 | 0.25 | 2.0 ms | 2.0 ms | 50.0 ms | 200.0 ms "
        "| 0.010 [0.010, 0.010] | 0.025 | 1.000 [1.000, 1.000] |"
    )
    assert "Left out, with the memory of both sides: llama-8b with 131072 tokens (41 GiB). P and D" in text
    assert "Left out" not in page.long_table({"cells": [written], "left_out": [], **head})


def test_fit_finds_the_line_through_points() -> None:
    slope, intercept, r2 = fit([1, 2, 4, 8], [3.0, 5.0, 9.0, 17.0])
    assert (slope, intercept, r2) == pytest.approx((2.0, 1.0, 1.0))
    assert fit([1, 2, 4], [0.0, 0.0, 0.0]) == pytest.approx((0.0, 0.0, 1.0))
    assert fit([1, 2, 3, 4], [1.0, 3.0, 1.0, 3.0])[2] < 0.5
    with pytest.raises(ValueError, match="two points"):
        fit([1, 1], [1.0, 2.0])


def test_the_json_has_every_figure() -> None:
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
    assert found["layer", "exposed"].slope == pytest.approx(0.002)
    assert found["layer", "WRITEs"].figures == (80, 80, 80)
    assert layer["hook_us"]["calls"] == 320
    assert written["off"]["raw"]["forward_s"] == [0.8] * 4
    assert "exposed ms: layer 2.0  chunk 50.0  request 200.0" in str(here)


def test_the_forward_has_its_own_cores_if_others_remain() -> None:
    assert split_cores({4, 1, 2}) == Cores(forward=(4,), others=(1, 2))
    assert split_cores({0}) is None


def test_each_line_varies_one_quantity_and_ranks_split_eight_heads() -> None:
    grown = {what: [each for each in growing_cases(5) if each.what == what] for what in GROWN}
    assert {what: [each.value for each in line] for what, line in grown.items()} == {
        "layers": [8, 16, 32, 64],
        "blocks": [64, 128, 256, 512],
        "requests": [1, 2, 4, 8, 16],
        "ranks": [1, 2, 4, 8],
    }
    for what, line in grown.items():
        assert [getattr(each.case, what) for each in line] == [each.value for each in line]
        for other in grown.keys() - {what}:
            assert {getattr(each.case, other) for each in line} == {LEAST[other]}
        assert all(len(each.case.steps) == 1 for each in line)
    assert {each.case.block_bytes // each.value for each in grown["ranks"][-1:]} == {8192}
    assert [len(list(growing_cases(3))), len({each.what for each in growing_cases(3)})] == [12, 4]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_caches_of_all_ranks_share_the_memory(ranks: int) -> None:
    memory = torch.zeros(3 * 5 * 64 + 7, dtype=torch.uint8)
    caches = by_rank(memory, block_bytes=64, layers=3, ranks=ranks)
    assert [[layer.shape for layer in cache] for cache in caches] == [[(5, 64 // ranks)] * 3] * ranks
    for layer in itertools.chain(*caches):
        layer.add_(1)
    assert int(memory.sum()) == 3 * 5 * 64, "each byte is in exactly one tensor"


@pytest.mark.parametrize("size", [0, 100, LOOK_BYTES + 100])
def test_every_byte_that_is_not_poison_is_counted(size: int) -> None:
    memory = torch.full((size,), POISON, dtype=torch.uint8)
    assert strays(memory) == 0
    wrong = sorted({0, size // 2, size - 1}) if size else []
    memory[wrong] = 1
    assert strays(memory) == len(wrong)


def test_long_prompts_of_every_small_model_fit_into_14_gib() -> None:
    fitting, left_out = known_cases(SMALL, LONG.tokens, LONG.ids, LONG.chunk_tokens, LONG.most_mib << 20)
    assert len(fitting) == 4 * 5
    assert not left_out
    assert max(case.tokens for case in fitting) == 131072
    assert max(case.memory_bytes for case in fitting) <= 14 << 30
    fitting, left_out = known_cases(WHOLE, LONG.tokens, LONG.ids, LONG.chunk_tokens, LONG.most_mib << 20)
    assert {case.model for case in left_out if case.tokens == 131072} == set(WHOLE) - {"llama-70b-tp8"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--links", "ib"], "none of shm, loopback, cuda_ipc, shm+sgl, loopback+sgl, and no rate such as"),
        (["--links", "cuda_ipc"], "add --device cuda"),
        (["--models", "gpt-2"], "none of llama-8b"),
        (["--most-mib", "1"], "the smallest"),
        (["--tokens", "0"], "'0' is no whole number of 1 or more"),
        (["--quick", "--long"], "not both"),
        (["--packing", "zip"], "not one of 'auto', 'off', 'gather'"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert said in result.output
