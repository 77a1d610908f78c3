"""A sweep of bench.serve: its results, its resumption and its ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serve.parts import Parts, PartsError
from bench.serve.plan import AGGREGATED, TOKEN, Plan, Setup
from bench.serve.results import by_cell, compared
from bench.serve.run import Run, WrongAnswersError
from tests.unit.serve_rig import CELL, MODES, SETUP, Heard, StubClient, StubSite, plan

SETTINGS = {"lengths": [1024], "rounds": 3}
WARM_UPS = len(MODES)


def run(out: Path, client: StubClient, this: Plan | None = None, resume: bool = False) -> tuple[Run, StubSite, Heard]:
    site, heard = StubSite(), Heard()
    return Run(this or plan(), site, client, Parts(out, SETTINGS, resume), heard), site, heard


def test_all_calls_are_made_in_order_after_the_warm_ups(tmp_path: Path) -> None:
    client = StubClient()
    this, site, heard = run(tmp_path / "serve.json", client)
    this.measure()
    assert client.names[:WARM_UPS] == [f"warm-up-loopback-{mode}" for mode in MODES]
    assert client.measured == [call.key for call in plan().calls(SETUP)]
    assert site.ups == [(SETUP, list(MODES))]
    assert site.turns == [*MODES, *(call.mode for call in plan().calls(SETUP))]
    assert heard.left[0] is not None
    assert heard.left[-1] == 0
    (result,) = by_cell([CELL], MODES, this.parts.calls)
    assert [len(calls) for calls in result.calls.values()] == [3, 3, 3]


def test_an_interrupted_run_continues_with_the_next_call(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    first = StubClient(stop_after=WARM_UPS + 4)
    with pytest.raises(KeyboardInterrupt):
        run(out, first)[0].measure()
    second = StubClient()
    this, _, _ = run(out, second, resume=True)
    this.measure()
    assert first.measured + second.measured == [call.key for call in plan().calls(SETUP)]
    assert len(this.parts.calls) == 9
    assert [call.start for call in sorted(this.parts.calls, key=lambda call: call.start)] == [0] * 4 + [1] * 5


def test_a_finished_setup_is_not_started_again(tmp_path: Path) -> None:
    out, other = tmp_path / "serve.json", Setup("1gbit", 512)
    both = plan(setups=[SETUP, other])
    with pytest.raises(KeyboardInterrupt):
        run(out, StubClient(stop_after=2 * WARM_UPS + 9 + 8), both)[0].measure()
    client = StubClient()
    this, site, _ = run(out, client, both, resume=True)
    this.measure()
    assert site.ups == [(other, [client.measured[0].rpartition("-")[2]])]  # one call is missing, so one mode is needed
    this, site, _ = run(out, StubClient(), both, resume=True)
    this.measure()
    assert site.ups == []


def test_a_wrong_answer_ends_the_run_and_every_run_that_resumes_it(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    client = StubClient(answers={"layer": ["wrong"]})
    with pytest.raises(WrongAnswersError, match="'wrong' instead of 'right 0'"):
        run(out, client)[0].measure()
    assert len(client.measured) == 3  # the first round shows the wrong answer
    again = StubClient()
    with pytest.raises(WrongAnswersError):
        run(out, again, resume=True)[0].measure()
    assert again.names == []


def test_a_wrong_answer_is_found_in_any_order_of_the_modes(tmp_path: Path) -> None:
    this = plan(modes=("layer", AGGREGATED), rounds=2)
    with pytest.raises(WrongAnswersError):
        run(tmp_path / "serve.json", StubClient(answers={AGGREGATED: ["other"]}), this)[0].measure()


def test_answers_of_modes_with_other_shapes_may_differ(tmp_path: Path) -> None:
    """On a GPU a kernel of another shape rounds differently; modes of the same shapes still must agree."""
    other = StubClient(answers={AGGREGATED: ["rounded differently"]})
    this, _, _ = run(tmp_path / "serve.json", other, plan(compare="shapes"))
    this.measure()
    (result,) = by_cell([CELL], MODES, this.parts.calls)
    assert {each.mode for each in result.wrong()} == {"request", "layer"}
    assert compared([result], this.plan.right) == compared([result]) / 2, "layer with request, request with none"
    wrong = StubClient(answers={"layer": ["wrong"]})
    with pytest.raises(WrongAnswersError, match=r"those of request; layer at .*'wrong' instead of 'right 0'"):
        run(tmp_path / "other.json", wrong, plan(compare="shapes"))[0].measure()


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


def test_a_resumed_run_must_have_the_same_settings(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    Parts(out, SETTINGS, resume=False)
    with pytest.raises(PartsError, match=r"rounds was 3, is 4") as caught:
        Parts(out, SETTINGS | {"rounds": 4}, resume=True)
    assert "lengths" not in str(caught.value)
    with pytest.raises(PartsError, match="seed was None, is 1"):
        Parts(out, SETTINGS | {"seed": 1}, resume=True)


def test_an_unfinished_run_is_not_overwritten_and_resume_requires_one(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    with pytest.raises(PartsError, match="nothing to go on with"):
        Parts(out, SETTINGS, resume=True)
    parts = Parts(out, SETTINGS, resume=False)
    with pytest.raises(PartsError, match=f"--resume {out}"):
        Parts(out, SETTINGS, resume=False)
    parts.remove()
    Parts(out, SETTINGS, resume=False)


def test_a_partly_written_call_is_ignored(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    parts = Parts(out, SETTINGS, resume=False)
    (parts.folder / "loopback-b512-p1024-c1-000-layer.tmp").write_text('{"cell": ')
    assert Parts(out, SETTINGS, resume=True).have == set()
