"""Verdicts on requests and rounds."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.e2e.results import Finished, KvDigest
from tests.faults.soak.audits import MORE_THREADS, held
from tests.faults.soak.inhost import Audit, Record
from tests.faults.soak.kinds import KINDS
from tests.faults.soak.plan import RequestPlan
from tests.faults.soak.report import verdict
from tests.faults.soak.request import Leg, Outcome, SoakRequest, State
from tests.faults.soak.schedule import Schedule
from tests.faults.soak.tally import Tally

RIGHT = (5, 6, 7)
KV = KvDigest(40, ((b"a", b"b"), (b"c", b"d")))
WRONG_KV = KvDigest(40, ((b"a", b"b"), (b"c", b"x")))
ONLY_LAST = KvDigest(40, ((None, b"b"), (None, b"d")))
IDLE = Audit(0, (), (), 0, ("MainThread",), 9)


def request(
    d_state: State = State.FINISHED,
    tokens: tuple[int, ...] = RIGHT,
    p_kv: KvDigest | None = KV,
    d_kv: KvDigest | None = KV,
    load_failed: bool = False,
    kept: bool = False,
) -> SoakRequest:
    plan = dataclasses.replace(RequestPlan(0, ()).next(), max_tokens=3)
    p = Leg("P", "P1", plan.token_ids, 1, state=State.FINISHED, expected=RIGHT)
    p.output, p.record = Finished("r", tokens[:1], None, "length"), Record(p_kv, False)
    d = Leg("D", "D1", plan.token_ids, 3, state=d_state, expected=RIGHT if d_state is State.FINISHED else None)
    d.output = Finished("r", tokens, None, "length") if d_state is State.FINISHED else None
    d.record = Record(d_kv, load_failed, kept)
    made = SoakRequest(plan, "r", p, d, sent_at=1.0, ended_at=2.0)
    made.compare_kv()
    return made


def begun(*, reads_kv: bool = True) -> Tally:
    tally = Tally()
    tally.begin_turn("plain", reads_kv=reads_kv)
    return tally


def accounted(made: SoakRequest, *, disturbed: bool = True) -> Tally:
    tally = begun()
    tally.begin_round()
    tally.account(made, disturbed=disturbed)
    tally.end_round()
    return tally


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        (request(), Outcome.COMPLETED),
        (request(load_failed=True), Outcome.RECOMPUTED),
        (request(load_failed=True, kept=True), Outcome.KEPT),
        (request(State.FAILED), Outcome.FAILED),
        (request(State.ABORTED), Outcome.ABORTED),
        (request(State.LOST), Outcome.LOST),
        (request(State.SENT), Outcome.HUNG),
    ],
)
def test_the_outcome_is_the_result_at_the_client_of_d(made: SoakRequest, outcome: Outcome):
    assert made.outcome is outcome
    assert accounted(made).outcomes == {outcome: 1}


def test_without_a_d_the_outcome_is_the_result_of_p():
    made = request(State.UNSENT)
    made.d.wanted = False
    assert made.over
    assert made.outcome is Outcome.COMPLETED


def test_right_tokens_and_bytes_are_no_problem():
    tally = accounted(request())
    assert tally.problems == []
    [turn] = tally.turns
    assert (turn.requests, turn.tokens, turn.pushes, turn.layer_blocks) == (1, 1, 1, 4)
    assert verdict(tally) == []


@pytest.mark.parametrize("load_failed", [False, True])
def test_wrong_tokens_are_a_mismatch_even_if_recomputed(load_failed: bool):
    tally = accounted(request(tokens=(5, 6, 8), load_failed=load_failed))
    assert [problem.ill for problem in tally.problems] == ["mismatch"]
    assert "D1 answered [5, 6, 8], the plain engine [5, 6, 7]" in tally.problems[0].text


def test_a_wrong_first_token_of_p_is_a_mismatch():
    assert accounted(request(State.ABORTED, tokens=(9, 6, 7))).count("mismatch") == 1


def test_wrong_bytes_are_a_mismatch_even_with_right_tokens():
    tally = accounted(request(d_kv=WRONG_KV))
    assert [problem.ill for problem in tally.problems] == ["mismatch"]
    assert "1 of 4 (layer, block) cells" in tally.problems[0].text
    assert verdict(tally) == ["1 mismatches"]


def test_only_pushed_blocks_are_compared():
    assert accounted(request(d_kv=ONLY_LAST)).turns[0].layer_blocks == 2
    for nothing in (
        request(load_failed=True, d_kv=WRONG_KV),
        request(State.ABORTED, d_kv=WRONG_KV),
        request(p_kv=None),
        request(d_kv=KvDigest(40, ((None, None), (None, None)))),
    ):
        tally = accounted(nothing)
        assert (tally.turns[0].pushes, tally.problems) == (0, [])


def test_a_prompt_that_p_computed_twice_is_compared_by_tokens_only():
    made = request(d_kv=WRONG_KV)
    made.compared_cells = made.differing_cells = 0
    made.faults.add("resend-p")
    assert made.compare_kv() == []
    assert (accounted(made).turns[0].tokens, accounted(made).turns[0].pushes) == (1, 0)


def test_a_load_that_d_finds_to_differ_is_a_failure():
    tally = accounted(request())
    tally.effects.update(verified_parts=900, verify_mismatches=2)
    assert verdict(tally) == ["2 loads that D has found to differ"]


def test_a_soak_that_compared_nothing_is_a_failure():
    tally = accounted(request())
    for name, reads_kv in (("gathered", True), ("ranks", False)):
        tally.begin_turn(name, reads_kv=reads_kv)
    assert verdict(tally) == [
        "gathered: no answer was compared with the plain engine's",
        "gathered: no pushed KV was compared",
        "ranks: no answer was compared with the plain engine's",
    ]


def test_faults_count_as_survived_if_their_round_had_no_problem():
    tally = begun()
    tally.begin_round()
    tally.struck("kill-p")
    tally.end_round()
    tally.begin_round()
    tally.struck("kill-p")
    tally.struck("stop-d")
    tally.problem("leak", "P1 keeps a block")
    tally.end_round()
    assert tally.injected == {"kill-p": 2, "stop-d": 1}
    assert tally.survived == {"kill-p": 1}
    assert tally.problems[0].round == 2


def test_a_recompute_without_a_reason_is_noted():
    assert accounted(request(load_failed=True), disturbed=True).unexplained == []
    assert len(accounted(request(load_failed=True), disturbed=False).unexplained) == 1
    assert len(accounted(request(load_failed=True, kept=True), disturbed=False).unexplained) == 1
    struck = request(State.FAILED)
    struck.faults.add(KINDS[0].name)
    assert accounted(struck, disturbed=False).unexplained == []


def test_an_idle_engine_holds_nothing():
    assert held(IDLE, usual_threads=9) == []
    assert held(dataclasses.replace(IDLE, os_threads=9 + MORE_THREADS), usual_threads=9) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"missing_blocks": 3}, "3 blocks are not free"),
        ({"requests": ("r WAITING_FOR_REMOTE_KVS",)}, "keeps r WAITING"),
        ({"mentions": ("worker._table{key}",)}, "1 table entries .* worker._table"),
        ({"open_handles": 2}, "2 transfer handles"),
        ({"os_threads": 9 + MORE_THREADS + 1}, "14 threads, 9 at first: MainThread"),
    ],
)
def test_every_held_resource_is_a_finding(change: dict[str, object], words: str):
    [finding] = held(dataclasses.replace(IDLE, **change), usual_threads=9)
    assert re.search(words, finding)


def test_the_schedule_runs_in_order_of_time():
    schedule, done = Schedule(), []
    for at in (3.0, 1.0, 2.0, 1.0):
        schedule.put(at, lambda at=at: done.append(at))
    schedule.run_due(2.5)
    assert done == [1.0, 1.0, 2.0]
    assert len(schedule) == 1
