"""Requests of the soak: their start, their faults and their end."""

from __future__ import annotations

import pytest

from tests.faults.soak.inhost import collect
from tests.faults.soak.request import Outcome, State
from tests.unit.soak_stubs import RIGHT, World


def test_both_engines_get_the_request_at_once_and_every_answer_is_compared():
    world = World()
    plan = world.send()
    assert [len(engine.added) for engine in (world.p, world.d)] == [1, 1]
    assert world.d.added[0].kv_transfer_params is not None
    assert world.d.added[0].kv_transfer_params["remote_request_id"] == world.p.added[0].request_id
    world.finish("P1")
    world.finish("D1")
    assert world.done == []
    assert world.traffic.outstanding == 1
    assert list(plan.token_ids) == world.r.added[0].token_ids
    world.finish("R")
    [request] = world.done
    assert request.outcome is Outcome.COMPLETED
    assert (request.p.expected, request.d.expected) == (RIGHT, RIGHT)
    assert [function for function, _ in world.p.called + world.d.called] == [collect, collect]
    assert world.traffic.outstanding == 0


def test_p_first_forwards_the_params_that_p_returned():
    world = World()
    world.send(order="p-first")
    assert world.d.added == []
    world.finish("P1", params={"from": "P"})
    world.pass_time()
    assert world.d.added[0].kv_transfer_params == {"from": "P"}


def test_d_first_sends_to_p_later():
    world = World()
    world.send(order="d-first")
    assert world.p.added == []
    world.pass_time()
    assert len(world.p.added) == 1


def test_a_d_request_after_an_abort_of_p_names_the_engine_of_p():
    world = World()
    world.send(order="p-first", fault="abort-p")
    world.pass_time()
    assert world.p.aborted
    assert world.d.added[0].kv_transfer_params is not None
    assert world.d.added[0].kv_transfer_params["remote_engine_id"] == "P1-1"


@pytest.mark.parametrize(
    ("fault", "aborted"), [("abort-p", (1, 0)), ("abort-d", (0, 1)), ("abort-both", (1, 1)), ("resend-p", (1, 0))]
)
def test_aborts_hit_the_side_in_their_name(fault: str, aborted: tuple[int, int]):
    world = World()
    world.send(fault=fault)
    world.pass_time()
    assert (len(world.p.aborted), len(world.d.aborted)) == aborted
    assert len(world.p.added) == (2 if fault == "resend-p" else 1)
    assert world.struck == [fault]


def test_an_abort_after_the_end_does_not_count_as_a_fault():
    world = World()
    world.send(fault="abort-both")
    world.finish("P1")
    world.finish("D1")
    world.pass_time()
    assert world.struck == []
    assert world.p.aborted + world.d.aborted == []


def test_a_request_does_not_wait_for_an_unused_side():
    world = World()
    world.send(fault="no-p", order="p-first")
    assert (len(world.p.added), len(world.d.added)) == (0, 1)
    world.finish("D1")
    world.finish("R")
    assert world.done[0].outcome is Outcome.COMPLETED
    world.send(fault="no-d")
    world.finish("P1")
    world.finish("R")
    assert world.done[1].outcome is Outcome.COMPLETED
    assert len(world.d.added) == 1


def test_unequal_prompts_are_compared_with_their_own_answers():
    world = World()
    world.send(fault="unequal")
    assert len(world.d.added[0].token_ids) > len(world.p.added[0].token_ids)
    world.finish("P1")
    world.finish("D1")
    assert [len(question.token_ids) for question in world.r.added] == [
        len(world.p.added[0].token_ids),
        len(world.d.added[0].token_ids),
    ]


def test_a_refused_request_has_failed_cleanly():
    world = World()
    world.d.refusal = "Traceback:\nValueError: remote_port is missing\n"
    world.send(fault="bad-params-d")
    world.finish("P1")
    world.finish("R")
    assert world.done[0].outcome is Outcome.FAILED
    assert world.done[0].d.error == "ValueError: remote_port is missing"


def test_an_error_from_the_engine_is_a_clean_failure():
    world = World()
    world.send()
    world.finish("P1")
    world.finish("D1", tokens=(), reason="error")
    world.finish("R")
    assert world.done[0].outcome is Outcome.FAILED


def test_requests_of_a_dead_engine_are_lost_and_the_other_side_goes_on():
    world = World()
    world.send()
    world.traffic.lose(world.slots["D1"])  # type: ignore[arg-type]
    assert world.done == []
    world.finish("P1")
    world.finish("R")
    assert world.done[0].outcome is Outcome.LOST
    assert world.done[0].p.state is State.FINISHED


def test_an_answer_of_a_restarted_engine_does_not_count_for_the_old_one():
    world = World()
    world.send()
    world.slots["D1"].incarnation = 2
    world.finish("D1")
    assert world.traffic.live


def test_no_request_is_sent_to_a_dead_engine():
    world = World()
    world.send(order="d-first")
    world.slots["P1"].leaving = True
    world.pass_time()
    assert world.p.added == []
    world.finish("D1")
    world.finish("R")
    assert world.done[0].p.state is State.LOST


def test_a_hung_request_is_given_up_on_both_sides():
    world = World()
    world.send()
    [request] = world.traffic.live.values()
    world.traffic.give_up(request)
    assert world.p.aborted
    assert world.d.aborted
    assert world.done[0].outcome is Outcome.HUNG
    assert world.traffic.live == {}


def test_the_plain_engine_gets_equal_prompts_once():
    world = World()
    world.send()
    world.finish("P1")
    world.finish("D1")
    assert len(world.r.added) == 1
