"""Generated parts of the pages that show what the benches of packing measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench import kernelpage
from bench.forward import page as forward
from bench.markdown import Result, conditions, machine
from bench.push import page as push
from bench.serve import page as serve

HEAD = {
    "argv": ["bench/push/__main__.py"],
    "machine": {"cpus": 2},
    "versions": {"nixl": "1.5.1", "torch": "2.13.0+cpu", "triton": "3.7.0"},
    "date": "2026-11-21T09:00:00+00:00",
    "rounds": 15,
}
GPU_MACHINE = {"cpus": 16, "gpus": [{"name": "NVIDIA H200", "memory_mib": 143771}]}


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


def test_push_tables_have_a_row_for_each_size_and_a_column_for_each_count() -> None:
    cells = [
        point(8, 64, "direct", 1.0, 1.02),
        point(8, 1024, "packed", 0.42, 1.12),
        point(16, 64, "gathered", 0.61, 1.3),
        point(8, 64, "gathered", 0.9, link="tcp", ids="random-p"),
        point(8, 64, "direct", 1.0, link="tcp", ids="contiguous"),
    ]
    text = push.tables(push_result(*cells))
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


def test_the_push_summary_is_one_paragraph() -> None:
    result = push_result(point(8, 64, "direct", 1.0))
    assert push.summary(result) == push.tables(result).splitlines()[0]


def way(gb_s: float, of_copy: float) -> dict[str, Any]:
    return {"gb_s": {"p20": gb_s - 1, "p50": gb_s, "p80": gb_s + 1}, "of_copy": ratio(of_copy)}


def kernel_result(**changes: Any) -> dict[str, Any]:
    cells = [
        {
            "block_bytes": kib << 10,
            "blocks": blocks,
            "ids": ids,
            "direction": direction,
            "ways": {"copy": way(5, 1), "layerpush": way(4.444 if ids == "random" else 5, 0.89), torchs: way(3, 0.6)},
        }
        for kib, blocks in ((4, 64), (8, 64), (16, 1024), (256, 512))
        for ids in ("random", "contiguous")
        for direction, torchs in (("gather", "index_select"), ("scatter", "index_copy_"))
    ]
    device = {"kind": "cpu", "name": None}
    return HEAD | {"device": device, "threads": 1, "max_programs": 792, "contention": [], "cells": cells} | changes


def test_the_kernel_table_is_of_random_ids_and_few_sizes() -> None:
    lines = kernelpage.tables(kernel_result()).splitlines()
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


def test_on_a_gpu_the_kernel_table_says_what_it_costs_the_neighbour() -> None:
    contention = {
        "max_programs": 16,
        "gathered_gb_s": [90.0, 110.0, 100.0],
        "slowdown": {"ratio": 1.031, "low": 1.02, "high": 1.04},
    }
    device = {"kind": "cuda", "name": "NVIDIA H200"}
    changes = {"device": device, "contention": [contention], "machine": GPU_MACHINE}
    text = kernelpage.tables(kernel_result(**changes))
    assert "| 16 | 100 | 3.1 [2.0, 4.0] |" in text.splitlines()
    assert "On one NVIDIA H200, with at most 792 programs." in text
    assert "Measured 2026-11-21: 1 x NVIDIA H200, 16 CPU cores" in text


def test_conditions_name_the_gpus() -> None:
    said = conditions(HEAD | {"machine": GPU_MACHINE}, "loopback")
    assert said.startswith("Measured 2026-11-21: loopback, 1 x NVIDIA H200, 16 CPU cores, NIXL")


def test_conditions_name_the_processor_where_it_is_known() -> None:
    known = HEAD | {"machine": {"cpus": 2, "processor": "Intel(R) Core(TM) i7"}}
    assert machine(known) == "2 CPU cores (Intel Core i7)"


def timed(p50: float) -> dict[str, Any]:
    return {"p50": p50, "low": p50, "high": p50, "raw": [[p50]]}


def serve_cell(tokens: int, **changes: Any) -> dict[str, Any]:
    modes = {
        "aggregated": {"ttft_ms": timed(100.0), "prefill_ms": timed(90.0), "exposed_ms": None},
        "pull": {"ttft_ms": timed(120.0), "prefill_ms": None, "exposed_ms": None},
        "request": {"ttft_ms": timed(110.0), "prefill_ms": timed(91.0), "exposed_ms": timed(10.0)},
        "layer": {"ttft_ms": timed(101.0), "prefill_ms": timed(92.0), "exposed_ms": timed(0.5)},
    }
    ratios = {
        "ttft_ms": {"layer/aggregated": ratio(1.01)},
        "prefill_ms": {"layer/aggregated": ratio(1.02)},
        "exposed_ms": {"layer/request": ratio(0.05)},
    }
    cell = {
        "link": "loopback",
        "max_num_batched_tokens": 512,
        "prompt_tokens": tokens,
        "concurrency": 1,
        "request_rate": None,
        "rounds": 5,
        "modes": modes,
        "ratios": ratios,
    }
    return cell | changes


def serve_result(*cells: dict[str, Any], wrong: int = 0) -> dict[str, Any]:
    return HEAD | {"answers": {"compared": 1234, "wrong": wrong}, "cells": list(cells)}


def test_engines_have_a_table_of_first_tokens_and_one_of_what_is_exposed() -> None:
    cells = [serve_cell(4096), serve_cell(1024), serve_cell(1024, link="1gbit", concurrency=None, request_rate=0.5)]
    text = serve.tables(serve_result(*cells))
    lines = text.splitlines()
    assert lines[0] == "Loopback, 1 at a time, 512 tokens a step. Time to first token:"
    assert "Link emulated at 1gbit, 0.5 requests per second, 512 tokens a step. Time to first token:" in lines
    assert lines[2] == "| tokens | `aggregated` | `pull` | `request` | `layer` |"
    first = "| 100.0 ms | 120.0 ms | 110.0 ms | 101.0 ms (1.010 [0.960, 1.060]) |"
    assert lines[4:6] == [f"| 1024 {first}", f"| 4096 {first}"]
    assert "| tokens | `request` | `layer` |" in lines
    assert "| 1024 | 10.0 ms | 0.5 ms (0.050 [0.000, 0.100]) |" in lines
    assert "| tokens | `aggregated` | `request` | `layer` |" in lines
    assert "| 1024 | 90.0 ms | 91.0 ms | 92.0 ms (1.020 [0.970, 1.070]) |" in lines
    assert "1,234 answers compared" in lines[-1]


def test_the_summary_has_the_longest_prompts_on_each_link() -> None:
    cells = [serve_cell(tokens, link=link) for link in ("1gbit", "loopback") for tokens in (1024, 4096)]
    text = serve.summary(serve_result(*cells))
    first = "| 100.0 ms | 120.0 ms | 110.0 ms | 101.0 ms (1.010 [0.960, 1.060]) |"
    assert text.splitlines()[2:5] == [f"| 1gbit {first}", f"| loopback {first}", ""]
    assert "prompts of 4096 tokens, median of 5 rounds" in text


def test_a_sweep_has_a_table_for_each_of_what_matters_under_load() -> None:
    cell = serve_cell(512, concurrency=4, max_num_batched_tokens=128)
    for mode, per_second in (("aggregated", 0.8), ("pull", 0.5), ("request", 0.6), ("layer", 0.7)):
        cell["modes"][mode] |= {"tpot_ms": timed(30.0), "requests_per_s": timed(per_second)}
    cell["ratios"] |= {"requests_per_s": {"layer/aggregated": ratio(0.875)}}
    rate = cell | {"concurrency": None, "request_rate": 0.5, "max_num_batched_tokens": None}
    lines = serve.sweep(serve_result(cell, rate)).splitlines()
    assert lines[0] == "Time to first token:"
    assert lines[2] == "| link | tokens a step | tokens | load | `aggregated` | `pull` | `request` | `layer` |"
    first = "| 100.0 ms | 120.0 ms | 110.0 ms | 101.0 ms (1.010 [0.960, 1.060]) |"
    assert lines[4:6] == [
        f"| loopback | 128 | 512 | 4 at a time {first}",
        f"| loopback |  | 512 | 0.5 requests per second {first}",
    ]
    assert "| loopback | 128 | 512 | 4 at a time | 0.800 | 0.500 | 0.600 | 0.700 (0.875 [0.825, 0.925]) |" in lines
    assert "| link | tokens a step | tokens | load | `request` | `layer` |" in lines
    assert "| loopback | 128 | 512 | 4 at a time | 10.0 ms | 0.5 ms (0.050 [0.000, 0.100]) |" in lines
    assert "1,234 answers compared" in lines[-1]


@pytest.mark.parametrize("render", [serve.tables, serve.summary, serve.sweep])
def test_engines_with_wrong_answers_are_not_published(render: Callable[[Result], str]) -> None:
    with pytest.raises(ValueError, match="wrong answers"):
        render(serve_result(serve_cell(1024), wrong=1))


def forward_cell(**changes: Any) -> dict[str, Any]:
    layer = {
        "exposed_s_median": 0.0005,
        "exposed_of_request": ratio(0.05),
        "slowdown": ratio(1.02),
        "delays": {"computing": 0.004, "for_a_core": -0.0012, "for_the_lock": 0.0172},
        "end_of_bound": 1.0316,
        "hook_us": {"p50": 3.21},
    }
    cell = {
        "model": "llama-8b",
        "link": "loopback",
        "ids": "random",
        "tokens": 4096,
        "load": 0.4567,
        "exposed_limit": 0.0625,
        "misses": ["a hook takes 12 us"],
        "modes": {"layer": layer, "request": {"exposed_s_median": 0.01}},
    }
    return cell | changes


def test_a_forward_has_a_row_for_each_case() -> None:
    beyond = forward_cell(exposed_limit=None, misses=[], link="500mbit")
    only_request = forward_cell(modes={"request": {"exposed_s_median": 0.01}}, misses=[])
    for cells, row in (
        (
            [forward_cell(), beyond],
            "0.5 ms | 10.0 ms | 0.050 | 0.062 | 1.032 | 1.020 [0.970, 1.070] | +0.4 % | -0.1 % | +1.7 % | 3.2 µs |",
        ),
        ([only_request], "10.0 ms |  |  |  |  |  |  |  |  |"),
    ):
        text = forward.table(HEAD | {"cells": cells})
        assert text.splitlines()[2] == f"| llama-8b | loopback | random | 4096 | 0.46 | {row}"
        assert f"In {len(cells) - 1} of {len(cells)} cases" in text
