"""The output and the files of the demo, from samples made by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

from bench.demo.measure import DemoSample
from bench.demo.report import DemoReport
from bench.figures import figures_of
from bench.hand_over import PARTS, HandOver
from bench.servers.load import GreedyAnswer
from tests.unit.test_demo_figures import parse

KEYS = {
    "ttft_ms",
    "ttft_range_ms",
    "hand_over_ms",
    "hand_over_parts_ms",
    "prefill_ms",
    "exposed_ms",
    "transfer_ms",
    "hooked_layers",
    "swept_layers",
    "writes",
    "descriptors",
    "bytes",
    "tokens_equal",
}


HAND_OVER = HandOver(200.0, dict(zip(PARTS, (0.0, 20.0, 30.0, 5.0, 1.0, 44.0, 100.0), strict=True)))


def sample(exposed_s: float = 0.1, **changes: object) -> DemoSample:
    push = parse(t_last_landed=11.3 + exposed_s)
    made = DemoSample(0, GreedyAnswer("abc", (5, 6, 7), 10.0, 11.5), True, push, figures_of(push), HAND_OVER, None)
    return dataclasses.replace(made, **changes)


def report(**modes: list[DemoSample]) -> DemoReport:
    exposed = {"auto": 0.01, "layer": 0.02, "chunk": 0.05, "request": 0.1}
    samples = {mode: [sample(seconds)] for mode, seconds in exposed.items()} | modes
    return DemoReport(samples, negative_control_detected=True, verify_detected=True)


def test_a_good_run_has_no_problem_and_all_keys():
    good = report()
    assert good.problems() == []
    written = json.loads(json.dumps(good.as_json()))
    assert set(written["modes"]) == {"auto", "layer", "chunk", "request"}
    assert all(set(mode) == KEYS for mode in written["modes"].values())
    assert written["negative_control_detected"] is True
    assert written["modes"]["auto"]["exposed_ms"] == pytest.approx(10)
    assert written["samples"]["layer"][0]["push"]["chunks"]
    assert good.sooner_ms() == 0
    sooner = sample(hand_over=dataclasses.replace(HAND_OVER, ms=150.0))
    assert report(auto=[sooner]).sooner_ms() == pytest.approx(50)


def test_one_differing_prompt_fails_its_mode():
    bad = report(chunk=[sample(), sample(tokens_equal=False)])
    assert bad.problems() == ["chunk: tokens differ from those without a transfer"]
    assert bad.as_json()["modes"]["chunk"]["tokens_equal"] is False


def test_a_missing_trace_fails_and_leaves_null_figures():
    bad = report(request=[sample(), sample(push=None, figures=None, problem="no trace")])
    assert bad.problems() == ["request: no trace"]
    assert bad.as_json()["modes"]["request"]["exposed_ms"] is None
    assert bad.sooner_ms() is None


@pytest.mark.parametrize(
    ("control", "words"), [("negative_control_detected", "did not change any token"), ("verify_detected", "verify 1.0")]
)
def test_an_undetected_corruption_fails_the_run(control: str, words: str):
    [problem] = dataclasses.replace(report(), **{control: False}).problems()
    assert words in problem


def test_the_table_fits_80_columns_and_names_every_mode():
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(report(chunk=[sample(tokens_equal=False)]).table())
    text = captured.get()
    words = (
        "auto",
        "layer",
        "chunk",
        "request",
        "exposed",
        "10.0 ms",
        "hand-over",
        "200 ms",
        "D's step begins",
        "44.0 ms",
        "DIFFER",
        "equal",
        "1.5-1.5 s",
    )
    assert all(word in text for word in words)
    assert "…" not in text
    assert text.index("exposed") < text.index("hand-over") < text.index("equal") < text.index("time to first token")


def test_the_picture_shows_the_push_with_the_median_exposed_time():
    pushes = report(layer=[sample(0.5), sample(0.2), sample(0.9)]).typical_pushes("layer", "request")
    assert pushes is not None
    assert pushes["layer"].t_last_landed == pytest.approx(11.8)
    assert report(layer=[sample(figures=None)]).typical_pushes("layer") is None
