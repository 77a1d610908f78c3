"""Tables of the pages: no bad figure is published or hidden. `test_docs.py` renders every committed result."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench import RESULTS, kernelpage
from bench.forward import page as forward
from bench.markdown import Result, conditions
from bench.serve import page as serve
from scripts.docgen import figures, soakrun


def committed(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text()) | changes


@pytest.mark.parametrize("render", [serve.tables, serve.summary, serve.sweep])
def test_engines_with_wrong_answers_are_not_published(render: Callable[[Result], str]) -> None:
    with pytest.raises(ValueError, match="wrong answers"):
        render(committed("serve", answers={"compared": 200, "wrong": 1}))


def test_a_soak_that_found_something_is_not_published() -> None:
    with pytest.raises(ValueError, match="failed"):
        soakrun.tables(committed("soak", verdict="failed"))


def test_the_table_of_the_demo_hides_no_bad_news() -> None:
    result = committed("demo", negative_control_detected=False)
    first = next(iter(result["modes"].values()))
    first |= {"exposed_ms": None, "tokens_equal": False}
    text = figures.demo(result)
    assert "| tokens equal | **no** | yes |" in text
    assert "| **exposed** | **?** |" in text
    assert "leaves" not in text
    assert "equal tokens say nothing" in text


def test_a_forward_without_statistics_of_the_system_has_no_delays() -> None:
    result = committed("forward")
    first = next(iter(result["cells"][0]["modes"].values()))
    first["delays"] = None
    assert f"|  |  |  | {first['hook_us']['p50']:.1f} µs |" in forward.table(result).splitlines()[2]


def test_the_kernel_table_of_a_gpu_has_the_cost_for_its_neighbour() -> None:
    contention = {
        "max_programs": 16,
        "gathered_gb_s": [90.0, 110.0, 100.0],
        "slowdown": {"ratio": 1.031, "low": 1.02, "high": 1.04},
    }
    device = {"kind": "cuda", "name": "NVIDIA H200"}
    gpu_machine = {"cpus": 16, "gpus": [{"name": "NVIDIA H200", "memory_mib": 143771}]}
    result = committed("kernel", device=device, contention=[contention], machine=gpu_machine)
    text = kernelpage.tables(result)
    assert "| 16 | 100 | 3.1 [2.0, 4.0] |" in text.splitlines()
    assert f"On one NVIDIA H200, with at most {result['max_programs']} programs." in text
    assert "1 x NVIDIA H200, 16 CPU cores" in conditions(result)
