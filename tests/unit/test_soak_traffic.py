"""Requests of the soak: their start, their faults and their end."""

from __future__ import annotations

import pytest

from layerpush.core.prefill_identity import TO_PREFILL
from tests.faults.soak.inhost import collect
from tests.faults.soak.request import Outcome, State
from tests.faults.soak.traffic import LONGEST_PROMPT
from tests.unit.soak_stubs import RIGHT, SoakRig


def test_both_engines_get_the_request_at_once_and_every_answer_is_compared():
    rig = SoakRig()
    plan = rig.send()
    assert [len(engine.added) for engine in (rig.p, rig.d)] == [1, 1]
    assert rig.d.added[0].kv_transfer_params is not None
    assert rig.d.added[0].kv_transfer_params["remote_request_id"] == rig.p.added[0].request_id
    rig.finish("P1")
    rig.finish("D1")
    assert rig.done == []
    assert rig.traffic.outstanding == 1
    assert list(plan.token_ids) == rig.r.added[0].token_ids
    rig.finish("R")
    [request] = rig.done
    assert request.outcome is Outcome.COMPLETED
    assert (request.p.expected, request.d.expected) == (RIGHT, RIGHT)
    assert [function for function, _ in rig.p.called + rig.d.called] == [collect, collect]
    assert rig.traffic.outstanding == 0


def test_p_first_forwards_the_params_that_p_returned():
    rig = SoakRig()
    rig.send(order="p-first")
    assert rig.d.added == []
    rig.finish("P1", params={"from": "P"})
    rig.pass_time()
    assert rig.d.added[0].kv_transfer_params == {"from": "P"}


def test_the_next_turn_has_the_tokens_of_the_last_one_and_d_s_params():
    rig = SoakRig()
    first = rig.send()
    assert rig.p.added[0].kv_transfer_params == TO_PREFILL
    rig.finish("P1")
    rig.finish("D1", params={"from": "D"})
    second = rig.send(number=2, turn=0.9, fault="resend-p")
    rig.pass_time()
    assert [sent.kv_transfer_params for sent in rig.p.added[1:]] == 2 * [{"from": "D"}]
    prompt = [*first.token_ids, *RIGHT, *second.token_ids][:LONGEST_PROMPT]
    assert rig.p.added[1].token_ids == rig.d.added[1].token_ids == prompt


def test_d_first_sends_to_p_later():
    rig = SoakRig()
    rig.send(order="d-first")
    assert rig.p.added == []
    rig.pass_time()
    assert len(rig.p.added) == 1


def test_a_d_request_after_an_abort_of_p_names_the_engine_of_p():
    rig = SoakRig()
    rig.send(order="p-first", fault="abort-p")
    rig.pass_time()
    assert rig.p.aborted
    assert rig.d.added[0].kv_transfer_params is not None
    assert rig.d.added[0].kv_transfer_params["remote_engine_id"] == "P1-1"


@pytest.mark.parametrize(
    ("fault", "aborted"), [("abort-p", (1, 0)), ("abort-d", (0, 1)), ("abort-both", (1, 1)), ("resend-p", (1, 0))]
)
def test_aborts_hit_the_side_in_their_name(fault: str, aborted: tuple[int, int]):
    rig = SoakRig()
    rig.send(fault=fault)
    rig.pass_time()
    assert (len(rig.p.aborted), len(rig.d.aborted)) == aborted
    assert len(rig.p.added) == (2 if fault == "resend-p" else 1)
    assert rig.struck == [fault]


def test_an_abort_after_the_end_does_not_count_as_a_fault():
    rig = SoakRig()
    rig.send(fault="abort-both")
    rig.finish("P1")
    rig.finish("D1")
    rig.pass_time()
    assert rig.struck == []
    assert rig.p.aborted + rig.d.aborted == []


def test_a_request_does_not_wait_for_an_unused_side():
    rig = SoakRig()
    rig.send(fault="no-p", order="p-first")
    assert (len(rig.p.added), len(rig.d.added)) == (0, 1)
    rig.finish("D1")
    rig.finish("R")
    assert rig.done[0].outcome is Outcome.COMPLETED
    rig.send(fault="no-d")
    rig.finish("P1")
    rig.finish("R")
    assert rig.done[1].outcome is Outcome.COMPLETED
    assert len(rig.d.added) == 1


def test_unequal_prompts_are_compared_with_their_own_answers():
    rig = SoakRig()
    rig.send(fault="unequal")
    assert len(rig.d.added[0].token_ids) > len(rig.p.added[0].token_ids)
    rig.finish("P1")
    rig.finish("D1")
    assert [len(question.token_ids) for question in rig.r.added] == [
        len(rig.p.added[0].token_ids),
        len(rig.d.added[0].token_ids),
    ]


def test_a_refused_request_has_failed_cleanly():
    rig = SoakRig()
    rig.d.refusal = "Traceback:\nValueError: remote_port is missing\n"
    rig.send(fault="bad-params-d")
    rig.finish("P1")
    rig.finish("R")
    assert rig.done[0].outcome is Outcome.FAILED
    assert rig.done[0].d.error == "ValueError: remote_port is missing"


def test_an_error_from_the_engine_is_a_clean_failure():
    rig = SoakRig()
    rig.send()
    rig.finish("P1")
    rig.finish("D1", tokens=(), reason="error")
    rig.finish("R")
    assert rig.done[0].outcome is Outcome.FAILED


def test_requests_of_a_dead_engine_are_lost_and_the_other_side_goes_on():
    rig = SoakRig()
    rig.send()
    rig.traffic.lose(rig.slots["D1"])
    assert rig.done == []
    rig.finish("P1")
    rig.finish("R")
    assert rig.done[0].outcome is Outcome.LOST
    assert rig.done[0].p.state is State.FINISHED


def test_an_answer_of_a_restarted_engine_does_not_count_for_the_old_one():
    rig = SoakRig()
    rig.send()
    rig.slots["D1"].incarnation = 2
    rig.finish("D1")
    assert rig.traffic.live


def test_no_request_is_sent_to_a_dead_engine():
    rig = SoakRig()
    rig.send(order="d-first")
    rig.slots["P1"].leaving = True
    rig.pass_time()
    assert rig.p.added == []
    rig.finish("D1")
    rig.finish("R")
    assert rig.done[0].p.state is State.LOST


def test_a_hung_request_is_given_up_on_both_sides():
    rig = SoakRig()
    rig.send()
    [request] = rig.traffic.live.values()
    rig.traffic.give_up(request)
    assert rig.p.aborted
    assert rig.d.aborted
    assert rig.done[0].outcome is Outcome.HUNG
    assert rig.traffic.live == {}


def test_the_plain_engine_gets_equal_prompts_once():
    rig = SoakRig()
    rig.send()
    rig.finish("P1")
    rig.finish("D1")
    assert len(rig.r.added) == 1
