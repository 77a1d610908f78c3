"""bench.kernel: its result file, and that a wrong byte prevents it."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from bench import kernel

FEW = ["--block-bytes", "64,4096", "--blocks", "1,4", "--rounds", "2", "--device", "cpu"]
FLUSH = mock.patch.dict(kernel.FLUSH_BYTES, {"cpu": 1 << 16})


@FLUSH
def test_the_benchmark_writes_every_sample_with_its_provenance(tmp_path: Path) -> None:
    out = tmp_path / "results" / "kernel.json"
    result = CliRunner().invoke(kernel.app, [*FEW, "--out", str(out)])
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert {"argv", "git_sha", "versions", "machine", "date", "seed", "device", "rounds"} <= set(written)
    assert {"torch", "triton", "ucx"} <= set(written["versions"])
    assert written["left_out"] == []
    cells = written["cells"]
    assert len(cells) == 2 * 2 * 2
    for cell in cells:
        assert set(cell["ways"]) == {"copy", "layerpush", "index_select"}
        for way in cell["ways"].values():
            assert len(way["seconds"]) == 2
            assert way["gb_s"]["p20"] <= way["gb_s"]["p50"] <= way["gb_s"]["p80"]
            assert way["gb_s"]["p20"] * min(way["seconds"]) <= cell["block_bytes"] * cell["blocks"] / 1e9


@FLUSH
def test_cases_above_the_memory_limit_are_left_out_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "kernel.json"
    arguments = ["--block-bytes", "64,2097152", "--blocks", "1", "--rounds", "2", "--device", "cpu", "--out", str(out)]
    with mock.patch.dict(kernel.MOST_BYTES, {"cpu": 1 << 20}):
        result = CliRunner().invoke(kernel.app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 cases above 1 MiB left out" in result.output
    assert json.loads(out.read_text())["left_out"] == [
        {"block_bytes": 2097152, "blocks": 1, "ids": ids} for ids in ("contiguous", "random")
    ]


@FLUSH
def test_a_wrong_byte_is_an_error_and_nothing_is_written(tmp_path: Path) -> None:
    """Figures of other ways are not written either."""
    right = kernel.gather_blocks

    def wrong(*tensors: torch.Tensor) -> None:
        right(*tensors)
        tensors[-1].view(torch.uint8).view(-1)[-1] ^= 1

    out = tmp_path / "kernel.json"
    with mock.patch.object(kernel, "gather_blocks", wrong):
        result = CliRunner().invoke(kernel.app, [*FEW, "--out", str(out)])
    assert result.exit_code == 1
    assert "layerpush: wrong bytes after the gather" in result.output
    assert list(tmp_path.iterdir()) == []


@FLUSH
def test_a_killed_run_leaves_the_finished_cases(tmp_path: Path) -> None:
    measure, asked = kernel.KernelBench.measure, []

    def killed(bench: kernel.KernelBench, case: kernel.CopyCase, timer: kernel.Timer) -> kernel.CopyTimes:
        asked.append(case)
        if len(asked) == 3:
            raise MemoryError
        return measure(bench, case, timer)

    out = tmp_path / "kernel.json"
    with mock.patch.object(kernel.KernelBench, "measure", killed):
        assert isinstance(CliRunner().invoke(kernel.app, [*FEW, "--out", str(out)]).exception, MemoryError)
    assert [path.name for path in tmp_path.iterdir()] == ["kernel.unfinished.json"]
    kept = json.loads((tmp_path / "kernel.unfinished.json").read_text())
    assert {(each["block_bytes"], each["blocks"], each["ids"]) for each in kept["cells"]} == {
        (case.block_bytes, case.blocks, case.ids) for case in asked[:2]
    }
    assert kept["rounds"] == 2


@pytest.mark.parametrize("blocks", [1, 2, 7, 64])
@pytest.mark.parametrize("pattern", kernel.IDS)
def test_ids_are_distinct_and_follow_their_pattern(pattern: str, blocks: int) -> None:
    ids = kernel.CopyCase(64, blocks, pattern).block_ids()
    assert len(ids) == len(set(ids.tolist())) == blocks
    assert 0 <= int(ids.min()) <= int(ids.max()) < 2 * blocks
    steps = (ids.diff() == 1).tolist()
    if pattern == "contiguous":
        assert all(steps)
    elif blocks == 64:
        assert not any(steps[-8:])
