"""The output of the overhead benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import proxy as bench
from bench.proxy import Cell, Series, Times, app


def series(*first: float) -> Series:
    return Series([Times(each, 2 * each) for each in first], round_ms=list(first))


def test_added_time_and_ratio() -> None:
    cell = Cell(16, 1, series(1.0, 2.0, 3.0), series(4.0, 5.0, 6.0)).as_json()
    first, whole = cell["first_ms"], cell["whole_ms"]
    assert isinstance(first, dict)
    assert isinstance(whole, dict)
    assert first["added"]["difference"] == 3.0
    assert first["added"]["low"] <= 3.0 <= first["added"]["high"]
    assert first["ratio"]["ratio"] == 2.5
    assert whole["added"]["difference"] == 6.0
    assert first["direct"] == {"median": 2.0, "p99": 2.98, "raw": [1.0, 2.0, 3.0]}
    assert cell["requests"] == 3


def test_a_small_run(tmp_path: Path) -> None:
    out = tmp_path / "new" / "proxy.json"
    arguments = ["--lengths", "16", "--streams", "2", "--requests", "4", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert {"argv", "git_sha", "versions", "machine", "date", "seed", "cells"} <= written.keys()
    assert {"aiohttp", "uvicorn", "fastapi", "layerpush", "python"} == written["versions"].keys()
    (cell,) = written["cells"]
    for part in ("first_ms", "whole_ms"):
        for way in ("direct", "proxied"):
            assert len(cell[part][way]["raw"]) == 4
    assert len(cell["round_ms"]["proxied"]["raw"]) == 2


def test_a_wrong_answer_ends_the_benchmark_without_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = bench._request

    async def cut_short(*arguments: object) -> tuple[Times, bytes]:
        asked.append(1)
        times, answer = await request(*arguments)  # type: ignore[arg-type]
        return times, answer[:-1] if len(asked) > 24 else answer

    asked: list[int] = []
    monkeypatch.setattr(bench, "_request", cut_short)
    monkeypatch.setattr(bench, "WARM_UP", 2)
    out = tmp_path / "proxy.json"
    result = CliRunner().invoke(app, ["--lengths", "16", "--streams", "2", "--requests", "40", "--out", str(out)])
    assert result.exit_code == 1
    assert "gave another answer than the engine" in result.output
    assert not out.exists()
