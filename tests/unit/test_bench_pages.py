"""Tables of the pages: no bad figure is published or hidden. `test_docs.py` renders every committed result."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench import RESULTS, kernelpage
from bench.forward import page as forward
from bench.hand_over import PARTS
from bench.markdown import Result, conditions
from bench.serve import page as serve
from bench.serve.plan import AGGREGATED, Cell, Pace, Setup
from bench.serve.results import by_cell
from scripts.docgen import figures, soakrun
from tests.unit.serve_stubs import call


def committed(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text()) | changes


@pytest.mark.parametrize("render", [serve.tables, serve.headline, serve.in_short])
def test_engines_with_wrong_answers_are_not_published(render: Callable[[Result], str]) -> None:
    with pytest.raises(ValueError, match="wrong answers"):
        render(committed("serve", answers={"compared": 200, "wrong": 1}))


def test_tables_of_engines_name_the_answers_that_were_compared() -> None:
    result = committed("serve")
    assert "648 answers compared with the aggregated engine's, all equal." in serve.tables(result)
    result["settings"]["compare"] = "shapes"
    result["answers"]["unlike_aggregated"] = 7
    said = "648 answers compared with those of a mode with the same shapes, all equal; 7 differ from the aggregated"
    assert said in serve.tables(result)


def serve_cell(link: str, streams: int, tokens: int) -> dict[str, Any]:
    """A cell of three modes, with ``auto`` slower than ``layer``."""
    calls = [call(mode, 0, [s]) for mode, s in ((AGGREGATED, 1.0), ("request", 2.0), ("layer", 1.2), ("auto", 1.5))]
    for each in calls:
        each.cell = (cell := Cell(Setup(link, 512), tokens, Pace(concurrency=streams))).key
        each.prefill_ms = [900.0]
    (found,) = by_cell([cell], [each.mode for each in calls], calls)
    return found.as_json()


def test_tables_of_engines_have_a_column_for_each_condition_that_varies() -> None:
    places = [(link, streams, tokens) for link in ("loopback", "1gbit") for tokens in (512, 16) for streams in (1, 4)]
    text = serve.tables(committed("serve", cells=[serve_cell(*place) for place in places]))
    lines = text.splitlines()
    assert "| link | requests | tokens | `aggregated` | `request` | `layer` | `auto` |" in lines
    rows = [line.split(" | ") for line in lines if line.startswith(("| loopback", "| 1gbit"))]
    assert [(row[0], row[1], row[2]) for row in rows[:4]] == [
        ("| loopback", "1 at a time", "16"),
        ("| loopback", "1 at a time", "512"),
        ("| loopback", "4 at a time", "16"),
        ("| loopback", "4 at a time", "512"),
    ]
    assert "Requests per second:" in lines
    assert "512 tokens a step, 2 CPU cores" in lines[-1]


def test_tables_of_engines_have_the_limits_of_auto() -> None:
    text = serve.tables(committed("serve", cells=[serve_cell("loopback", 1, 16), serve_cell("1gbit", 1, 16)]))
    row = "| loopback | 16 | `layer` | 1.250 [1.250, 1.250] | 1.000 [1.000, 1.000] |"
    assert row in text.splitlines()
    assert "In 2 of 2 cells a whole interval of `auto` is above a limit. The limits of `auto`: 1 for its first" in text
    assert "first token to the best's, 1.01 for its prefill to `request`'s. Measured" in text
    assert "Requests per second" not in text
    assert "`auto`" not in serve.tables(committed("serve", cells=[without_auto(serve_cell("loopback", 1, 16))]))


def test_tables_of_engines_have_the_hand_over_if_the_run_measured_it() -> None:
    parts = dict(zip(PARTS, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0), strict=True))
    cell = serve_cell("loopback", 1, 16)
    cell["modes"]["auto"] |= {"hand_over_ms": cell["modes"]["auto"]["ttft_ms"], "hand_over_parts_ms": parts}
    lines = serve.tables(committed("serve", cells=[cell])).splitlines()
    assert "| 16 | 0.0 ms | 1.0 ms | 2.0 ms | 3.0 ms | 4.0 ms | 5.0 ms | 6.0 ms |" in lines
    assert "| 16 | 100.0 ms | 1100.0 ms | 300.0 ms | 600.0 ms |" in lines, "time to first token less prefill"
    older = serve_cell("loopback", 1, 16)
    for mode in older["modes"].values():
        for name in ("hand_over_ms", "hand_over_parts_ms", "after_prefill_ms"):
            del mode[name]
    text = serve.tables(committed("serve", cells=[older]))
    assert "less prefill" not in text
    assert "Hand-over" not in text


def without_auto(cell: dict[str, Any]) -> dict[str, Any]:
    return cell | {"modes": {mode: figures for mode, figures in cell["modes"].items() if mode != "auto"}}


def test_the_headline_has_the_longest_prompt_over_the_slow_link_with_an_idle_d() -> None:
    result = committed("token-serve")
    text = serve.headline(result)
    longest = max(cell["prompt_tokens"] for cell in result["cells"])
    (cell,) = (
        cell
        for cell in result["cells"]
        if (cell["link"], cell["prompt_tokens"], cell["background_streams"]) == ("1gbit", longest, 0)
    )
    first, after = (cell["modes"]["token"][name]["p50"] for name in ("ttft_ms", "after_prefill_ms"))
    assert f"| **layerpush**, as it is installed | {first / 1e3:.2f} s | {after:.0f} ms |" in text.splitlines()
    assert "over a link emulated at 1gbit to an idle D, on 2 CPU cores" in text


def test_a_failed_soak_is_not_published() -> None:
    with pytest.raises(ValueError, match="a soak with 1 leaks, 2 hangs is not published"):
        soakrun.tables(committed("soak", verdict=["1 leaks", "2 hangs"]))


def test_the_table_of_the_demo_shows_failures() -> None:
    result = committed("demo", negative_control_detected=False)
    first = next(iter(result["modes"].values()))
    first |= {"exposed_ms": None, "hand_over_ms": None, "tokens_equal": False}
    text = figures.demo(result)
    assert "| tokens equal | **no** | yes |" in text
    assert "| **exposed** | **?** |" in text
    assert "ms less than" not in text
    assert "equal tokens say nothing" in text


def test_a_forward_without_schedstat_has_no_delays() -> None:
    result = committed("forward")
    first = next(iter(result["cells"][0]["modes"].values()))
    first["delays"] = None
    assert f"|  |  |  | {first['hook_us']['p50']:.1f} µs |" in forward.table(result).splitlines()[2]


def test_the_kernel_table_of_a_gpu_names_the_gpu() -> None:
    result = committed("gpu-kernel")
    text = kernelpage.tables(result)
    assert f"On one NVIDIA H200, with at most {result['max_programs']} programs." in text
    assert "1 x NVIDIA H200, 16 CPU cores" in conditions(result)
