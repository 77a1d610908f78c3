"""A sweep of bench.serve: its calls, its results and its ends."""

from __future__ import annotations

import pytest

from bench.serve.plan import AGGREGATED, TOKEN, Setup, SweepPlan
from bench.serve.results import by_cell, compared
from bench.serve.run import Run, WrongAnswersError
from tests.unit.serve_stubs import CELL, MODES, SETUP, StubClient, StubSite, plan

WARM_UPS = len(MODES)


def run(client: StubClient, this: SweepPlan | None = None) -> tuple[Run, StubSite]:
    site = StubSite()
    return Run(this or plan(), site, client, lambda line: None), site


def test_all_calls_are_made_in_order_after_the_warm_ups() -> None:
    client = StubClient()
    this, site = run(client)
    this.measure()
    assert client.names[:WARM_UPS] == [f"warm-up-loopback-{mode}" for mode in MODES]
    assert client.measured == [call.key for call in plan().calls(SETUP)]
    assert site.ups == [(SETUP, list(MODES))]
    assert site.turns == [*MODES, *(call.mode for call in plan().calls(SETUP))]
    (result,) = by_cell([CELL], MODES, this.calls)
    assert [len(calls) for calls in result.calls.values()] == [3, 3, 3]


def test_each_link_has_engines_of_its_own() -> None:
    this, site = run(StubClient(), plan(setups=[SETUP, other := Setup("1gbit", 512)]))
    this.measure()
    assert site.ups == [(SETUP, list(MODES)), (other, list(MODES))]


def test_a_wrong_answer_ends_the_run() -> None:
    client = StubClient(answers={"layer": ["wrong"]})
    with pytest.raises(WrongAnswersError, match="'wrong' instead of 'right 0'"):
        run(client)[0].measure()
    assert len(client.measured) == 3  # the first round shows the wrong answer


def test_a_wrong_answer_is_found_in_any_order_of_the_modes() -> None:
    this = plan(modes=("layer", AGGREGATED), rounds=2)
    with pytest.raises(WrongAnswersError):
        run(StubClient(answers={AGGREGATED: ["other"]}), this)[0].measure()


def test_answers_of_modes_with_other_shapes_may_differ() -> None:
    """On a GPU a kernel of another shape rounds differently; modes of the same shapes still must agree."""
    other = StubClient(answers={AGGREGATED: ["rounded differently"]})
    this, _ = run(other, plan(compare="shapes"))
    this.measure()
    (result,) = by_cell([CELL], MODES, this.calls)
    assert {each.mode for each in result.wrong()} == {"request", "layer"}
    assert compared([result], this.plan.right) == compared([result]) / 2, "layer with request, request with none"
    wrong = StubClient(answers={"layer": ["wrong"]})
    with pytest.raises(WrongAnswersError, match=r"those of request; layer at .*'wrong' instead of 'right 0'"):
        run(wrong, plan(compare="shapes"))[0].measure()


@pytest.mark.parametrize(
    ("modes", "right"),
    [
        ((AGGREGATED, "auto", "request", TOKEN), [AGGREGATED, "auto", "auto", AGGREGATED]),
        ((AGGREGATED, "auto"), [AGGREGATED, "auto"]),
    ],
)
def test_each_mode_is_compared_with_a_mode_of_the_same_shapes(modes: tuple[str, ...], right: list[str]) -> None:
    assert [plan(modes=modes, compare="shapes").right(mode) for mode in modes] == right
    assert {plan(modes=modes).right(mode) for mode in modes} == {AGGREGATED}
