"""From calls to figures: intervals, ratios, JSON, tables, and wrong answers."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from bench.bootstrap import median
from bench.hand_over import PARTS, HandOver
from bench.serve.measured import RequestsFailedError, measured
from bench.serve.plan import AGGREGATED, TOKEN, Call
from bench.serve.results import MEASURES, CellResult, by_cell, compared
from tests.unit.serve_stubs import CELL, MODES, call, result


def three_rounds() -> list[CellResult]:
    calls = []
    for number in range(3):
        drift = 1.0 + number  # hits all modes of a round alike
        calls += [
            call(AGGREGATED, number, [1.0 * drift, 1.2 * drift]),
            call("request", number, [2.0 * drift, 2.4 * drift]),
            call("layer", number, [1.1 * drift, 1.32 * drift]),
        ]
    for each in calls:
        each.prefill_ms = [900.0 if each.mode == AGGREGATED else 918.0]
        if each.mode == "request":
            each.exposed_ms = [100.0] * 2
        if each.mode == "layer":
            each.exposed_ms, each.pushed_as = [5.0] * 2, {"layer": 2}
    return by_cell([CELL], MODES, calls)


@pytest.mark.parametrize(
    "changes",
    [
        {"failed": 1, "errors": ["", "Traceback\nConnectionError: gone"]},
        {"errors": ["", "ConnectionError: gone"]},
        {"completed": 0, "failed": 2},
    ],
)
def test_a_call_with_failed_requests_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RequestsFailedError, match="mode layer failed at 1024 tokens"):
        measured(Call(CELL, 0, "layer"), [], result([0.5, 0.25], **changes))


def test_drift_of_a_whole_round_cancels_in_ratios() -> None:
    (this,) = three_rounds()
    ratio = this.ratios()["ttft_ms"]["layer/request"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.55, 0.55, 0.55))
    assert this.ratios()["prefill_ms"]["layer/aggregated"].value == pytest.approx(1.02)
    assert this.ratios()["exposed_ms"]["layer/request"].value == pytest.approx(0.05)
    assert "layer/pull" not in this.ratios()["ttft_ms"]
    assert "layer/chunk" not in this.ratios()["exposed_ms"]


def with_auto(ttft_s: float, prefill_ms: float) -> CellResult:
    """Five rounds of ``auto`` beside ``layer`` (1 s) and ``request`` (2 s, prefill 900 ms)."""
    calls = []
    for number in range(5):
        noise = 1 + 0.02 * number
        for mode, first_s in ((AGGREGATED, 0.5), ("request", 2.0), ("layer", noise), ("auto", ttft_s)):
            calls.append(call(mode, number, [first_s]))
            calls[-1].prefill_ms = [prefill_ms if mode == "auto" else 900.0 * noise]
    (cell,) = by_cell([CELL], [*MODES, "auto"], calls)
    return cell


def test_without_a_transfer_there_is_no_best_mode() -> None:
    assert with_auto(0.9, 900.0).best == "layer"
    (alone,) = by_cell([CELL], MODES, [call(AGGREGATED, 0, [1.0])])
    assert alone.best is None
    assert alone.misses == []


@pytest.mark.parametrize(
    ("ttft_s", "prefill_ms", "missed"),
    [
        (1.0, 900.0, []),
        (1.05, 955.0, []),  # both medians are beyond their limits, but the intervals include these
        (1.2, 900.0, ["the first token of auto takes 1.154 x the time of layer's"]),
        (1.0, 1000.0, ["prefill of auto takes 1.068 x the time of request's"]),
    ],
)
def test_a_limit_is_missed_if_the_whole_interval_is_beyond_it(
    ttft_s: float, prefill_ms: float, missed: list[str]
) -> None:
    this = with_auto(ttft_s, prefill_ms)
    assert [re.sub(r" \[[^]]*\]", "", text) for text in this.misses] == missed
    written = this.as_json()
    assert (written["best"], written["misses"]) == ("layer", this.misses)
    assert {"auto/request"} <= written["ratios"]["prefill_ms"].keys()
    assert {"auto/layer"} <= written["ratios"]["ttft_ms"].keys()


def with_token(ttft_s: float, prefill_ms: float, tokens: int = 2048) -> CellResult:
    """Five rounds of ``token`` beside one engine, which takes 1 s, 10 ms of it after prefill."""
    place, calls = replace(CELL, prompt_tokens=tokens), []
    for number in range(5):
        for mode, first_s, prefill in ((AGGREGATED, 1.0, 990.0), (TOKEN, ttft_s, prefill_ms)):
            calls.append(measured(Call(place, number, mode), [], result([first_s + 0.001 * number])))
            calls[-1].prefill_ms = [prefill]
        calls[-1].first_tokens = {"prefill": 1}
    (cell,) = by_cell([place], [AGGREGATED, TOKEN], calls)
    return cell


@pytest.mark.parametrize(
    ("ttft_s", "prefill_ms", "tokens", "missed"),
    [
        (1.015, 991.0, 2048, []),
        (1.03, 1006.0, 2048, ["the first token of token takes 1.030 x the time of one engine's"]),
        (1.03, 1006.0, 1024, []),
        (1.01, 984.0, 512, ["token takes 16.0 ms longer than one engine from prefill to the first token"]),
    ],
)
def test_the_limits_of_mode_token(ttft_s: float, prefill_ms: float, tokens: int, missed: list[str]) -> None:
    this = with_token(ttft_s, prefill_ms, tokens)
    assert [re.sub(r" \[[^]]*\]", "", text) for text in this.misses] == missed
    written = this.as_json()["modes"]
    longer_ms = 1e3 * (ttft_s - 1) - (prefill_ms - 990)
    assert written[TOKEN]["longer_after_prefill_ms"]["difference"] == pytest.approx(longer_ms)
    assert written[AGGREGATED]["longer_after_prefill_ms"]["difference"] == 0
    assert written[TOKEN]["first_tokens"] == {"prefill": 5}
    assert this.best is None


def test_a_measure_missing_in_one_round_is_unknown() -> None:
    (this,) = three_rounds()
    assert this.series("layer", "exposed_ms") is not None
    this.calls["layer"][1].exposed_ms = None
    assert this.series("layer", "exposed_ms") is None
    assert this.as_json()["modes"]["layer"]["exposed_ms"] is None
    assert "layer/request" not in this.ratios()["exposed_ms"]


def test_json_has_every_sample() -> None:
    (this,) = three_rounds()
    written = json.loads(json.dumps(this.as_json(), allow_nan=False))
    assert (written["link"], written["max_num_batched_tokens"], written["prompt_tokens"]) == ("loopback", 512, 1024)
    assert (written["concurrency"], written["rounds"], written["requests"]) == (1, 3, 2)
    assert set(written["modes"]) == set(MODES)
    for mode in MODES:
        assert set(MEASURES) <= set(written["modes"][mode])
    ttft = written["modes"]["layer"]["ttft_ms"]
    assert [[round(each) for each in one] for one in ttft["raw"]] == [[1100, 1320], [2200, 2640], [3300, 3960]]
    assert ttft["p50"] == pytest.approx(2420)
    assert ttft["low"] < ttft["p50"] < ttft["high"]
    assert written["modes"]["layer"]["pushed_as"] == {"layer": 6}
    assert written["modes"]["aggregated"]["exposed_ms"] is None
    assert written["ratios"]["ttft_ms"]["request/aggregated"]["ratio"] == pytest.approx(2.0)


def with_hand_overs(*parts_ms: float) -> CellResult:
    """Three rounds of two requests of layer mode; their hand-overs take 10 and 20 ms more than the parts."""
    (this,) = three_rounds()
    for each in this.calls["layer"]:
        parts = dict(zip(PARTS, parts_ms, strict=bool(parts_ms))) if parts_ms else {}
        each.add_hand_overs([HandOver(sum(parts_ms) + more, parts) for more in (10.0, 20.0)])
    return this


def test_the_hand_over_and_its_parts() -> None:
    this = with_hand_overs(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    hand_over = this.series("layer", "hand_over_ms")
    assert hand_over is not None
    assert hand_over.rounds == [[31.0, 41.0]] * 3
    written = json.loads(json.dumps(this.as_json(), allow_nan=False))["modes"]
    assert written["layer"]["hand_over_ms"]["p50"] == 36.0
    assert written["layer"]["hand_over_parts_ms"] == dict(zip(PARTS, map(float, range(7)), strict=True))
    assert (written["request"]["hand_over_ms"], written["request"]["hand_over_parts_ms"]) == (None, {})
    assert with_hand_overs().as_json()["modes"]["layer"]["hand_over_parts_ms"] == {}


def test_every_mode_has_the_time_from_prefill_to_the_first_token() -> None:
    """From the means of 1.0 and 1.2 s, and of 2.0 and 2.4 s."""
    (this,) = three_rounds()
    for mode, expected in ((AGGREGATED, 1100.0 - 900.0), ("request", 2200.0 - 918.0)):
        assert this.calls[mode][0].after_prefill_ms == pytest.approx([expected])
        assert this.as_json()["modes"][mode]["after_prefill_ms"]["raw"][0] == pytest.approx([expected])
    this.calls["layer"][0].prefill_ms = None
    assert this.series("layer", "after_prefill_ms") is None


def test_the_time_of_a_first_token_is_on_the_clients_clock() -> None:
    assert call("layer", 0, [1.0, 1.2]).first_token_at == [101.0, 111.2]


def test_a_wrong_answer_is_found_in_its_own_round() -> None:
    calls = [call(AGGREGATED, number, [1.0, 1.0], [f"a{number}", f"b{number}"]) for number in range(2)]
    calls += [call("layer", 0, [1.0, 1.0], ["a0", "b0"]), call("layer", 1, [1.0, 1.0], ["a1", "b0"])]
    (this,) = by_cell([CELL], MODES, calls)
    (wrong,) = this.wrong()
    assert (wrong.mode, wrong.round, wrong.request, wrong.right, wrong.answer) == ("layer", 1, 1, "b1", "b0")
    assert "layer at 1024 tokens" in str(wrong)
    assert "'b0' instead of 'b1'" in str(wrong)
    assert compared([this]) == 4


def test_unequal_rounds_are_refused() -> None:
    for rounds in ([], [[]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match=r"number of rounds|inhomogeneous"):
            median(rounds)
