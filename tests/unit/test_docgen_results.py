"""Generated parts of the pages that show what the benches of packing measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.docgen import conditions, kernelfigures, pushfigures
from scripts.docgen.sections import SECTIONS

ROOT = Path(__file__).parents[2]
HEAD = {
    "argv": ["bench/push/__main__.py"],
    "machine": {"cpus": 2},
    "versions": {"nixl": "1.5.1", "torch": "2.13.0+cpu", "triton": "3.7.0"},
    "date": "2026-11-21T09:00:00+00:00",
    "rounds": 15,
}
GPU_MACHINE = {"cpus": 16, "gpus": [{"name": "NVIDIA H200", "memory_mib": 143771}]}


def write(root: Path, name: Path, result: dict[str, Any]) -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(json.dumps(result))
    return root


def ratio(value: float) -> dict[str, float]:
    return {"ratio": value, "low": value - 0.05, "high": value + 0.05}


def point(
    kib: int, blocks: int, best: str, of_direct: float, to_best: float = 1.0, link: str = "shm", ids: str = "random"
) -> dict[str, Any]:
    misses = [f"{to_best:.2f} x the best plan ({best})"] if to_best > 1.1 else []
    return {
        "link": link,
        "block_bytes": kib << 10,
        "blocks": blocks,
        "ids": ids,
        "best": best,
        "auto": {"chose": best, "to_best": ratio(to_best), "to_direct": ratio(0.5), "misses": misses},
        "ways": {plan: {"of_direct": ratio(1.0)} for plan in ("direct", "gathered", "packed")}
        | {best: {"of_direct": ratio(of_direct)}},
    }


def push_result(*cells: dict[str, Any]) -> dict[str, Any]:
    about = {"shm": {"ucx": "1.23.0"}, "tcp": {"ucx": "1.23.0"}}
    return HEAD | {"about": about, "summary": "auto chose the best plan at 3 of 4 points", "cells": list(cells)}


def test_push_tables_have_a_row_for_each_size_and_a_column_for_each_count(tmp_path: Path) -> None:
    cells = [
        point(8, 64, "direct", 1.0, 1.02),
        point(8, 1024, "packed", 0.42, 1.12),
        point(16, 64, "gathered", 0.61, 1.3),
        point(8, 64, "gathered", 0.9, link="tcp", ids="random-p"),
        point(8, 64, "direct", 1.0, link="tcp", ids="contiguous"),
    ]
    text = pushfigures.tables(write(tmp_path, pushfigures.RESULT, push_result(*cells)))
    lines = text.splitlines()
    assert lines[0].startswith("Auto chose the best plan at 3 of 4 points. Measured 2026-11-21: 2 CPU cores, NIXL")
    assert "UCX 1.23.0" in lines[0]
    assert "| per block | 64 blocks | 1024 blocks |" in lines
    assert "| 8 KiB | direct, 1.02 | packed 0.42, **1.12** |" in lines
    assert "| 16 KiB | gathered 0.61, **1.30!** |  |" in lines
    assert "Over TCP over loopback, any order on P, one run on D:" in lines
    assert "| 8 KiB | gathered 0.90, 1.00 |" in lines
    assert text.count("| per block |") == 2, "a contiguous WRITE has nothing to pack"
    assert "15 rounds" in lines[-1]


def test_the_push_summary_is_one_paragraph(tmp_path: Path) -> None:
    root = write(tmp_path, pushfigures.RESULT, push_result(point(8, 64, "direct", 1.0)))
    assert pushfigures.summary(root) == pushfigures.tables(root).splitlines()[0]


def way(gb_s: float, of_copy: float) -> dict[str, Any]:
    return {"gb_s": {"p20": gb_s - 1, "p50": gb_s, "p80": gb_s + 1}, "of_copy": ratio(of_copy)}


def kernel_result(**changes: Any) -> dict[str, Any]:
    cells = [
        {
            "block_bytes": kib << 10,
            "blocks": blocks,
            "ids": ids,
            "direction": direction,
            "ways": {"copy": way(5, 1), "layerpush": way(4.444, 0.89), torchs: way(3, 0.6)},
        }
        for kib, blocks in ((4, 64), (8, 64), (16, 1024), (256, 512))
        for ids in ("random", "contiguous")
        for direction, torchs in (("gather", "index_select"), ("scatter", "index_copy_"))
    ]
    device = {"kind": "cpu", "name": None}
    return HEAD | {"device": device, "threads": 1, "max_programs": 792, "contention": [], "cells": cells} | changes


def test_the_kernel_table_is_of_random_ids_and_few_sizes(tmp_path: Path) -> None:
    lines = kernelfigures.tables(write(tmp_path, kernelfigures.RESULT, kernel_result())).splitlines()
    assert lines[0] == (
        "| KiB per block | blocks | gather GB/s | of a copy | `index_select` GB/s | of a copy "
        "| scatter GB/s | of a copy | `index_copy_` GB/s | of a copy |"
    )
    assert lines[2:4] == [
        "| 4 | 64 | 4.44 | 89% | 3 | 60% | 4.44 | 89% | 3 | 60% |",
        "| 16 | 1024 | 4.44 | 89% | 3 | 60% | 4.44 | 89% | 3 | 60% |",
    ]
    assert lines[4] == ""
    assert "one thread" in lines[-1]
    assert "says nothing about a GPU" in lines[-1]
    assert lines[-1].endswith("Measured 2026-11-21: 2 CPU cores, NIXL 1.5.1, torch 2.13.0+cpu, Triton 3.7.0.")


def test_on_a_gpu_the_kernel_table_says_what_it_costs_the_neighbour(tmp_path: Path) -> None:
    contention = {
        "max_programs": 16,
        "gathered_gb_s": [90.0, 110.0, 100.0],
        "slowdown": {"ratio": 1.031, "low": 1.02, "high": 1.04},
    }
    device = {"kind": "cuda", "name": "NVIDIA H200"}
    changes = {"device": device, "contention": [contention], "machine": GPU_MACHINE}
    text = kernelfigures.tables(write(tmp_path, kernelfigures.RESULT, kernel_result(**changes)))
    assert "| 16 | 100 | 3.1 [2.0, 4.0] |" in text.splitlines()
    assert "On one NVIDIA H200, with at most 792 programs." in text
    assert "Measured 2026-11-21: 1 x NVIDIA H200, 16 CPU cores" in text


@pytest.mark.parametrize(
    ("render", "command"),
    [
        (pushfigures.tables, "python -m bench.push"),
        (pushfigures.summary, "python -m bench.push"),
        (kernelfigures.tables, "python -m bench.kernel"),
    ],
)
def test_without_a_result_the_page_says_how_to_get_one(
    tmp_path: Path, render: Callable[[Path], str], command: str
) -> None:
    assert render(tmp_path).startswith(f"Not measured yet: `{command}")


def test_conditions_name_the_gpus() -> None:
    said = conditions.conditions(HEAD | {"machine": GPU_MACHINE, "link": None})
    assert said.startswith("Measured 2026-11-21: loopback, 1 x NVIDIA H200, 16 CPU cores for all engines, NIXL")


def test_all_figures_are_put_into_the_pages_by_one_command() -> None:
    script = (ROOT / "scripts/readme-figures").read_text()
    shown = {marker for marker in SECTIONS if re.search(r"-figures$|^soak-|^push-", marker)}
    assert shown == set(re.findall(r"[\w-]+-(?:figures|summary|tables)\b", script.split("exec")[1]))
