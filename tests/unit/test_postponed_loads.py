"""Loads that give their blocks to other requests: which ones, and until when."""

from __future__ import annotations

from layerpush.engine.scheduler.postponed_loads import PostponedLoads

COMPUTED = frozenset({"a", "other"})
"""P cannot begin "b", and holds the blocks of the prompt "a"."""


def postponed(ranks: int = 1) -> PostponedLoads:
    """The request of prompt "a" waits for blocks."""
    loads = PostponedLoads(ranks)
    loads.request_waits("request of a", {"a", "transfer"})
    return loads


def given_way(ranks: int = 1) -> PostponedLoads:
    loads = postponed(ranks)
    loads.load_queued("b", COMPUTED)
    assert loads.to_unregister(short_of_blocks=True) == ["b"]
    return loads


def test_a_load_gives_way_to_a_request_whose_prompt_p_holds() -> None:
    loads = given_way()
    assert loads.is_asked("b")
    assert loads.to_unregister(short_of_blocks=True) == [], "once for each report"
    loads.load_unregistered("b", 0)
    assert loads.load_ended("b")
    assert not loads.is_asked("b")
    loads.request_waits("b", {"b"})
    assert loads.must_wait("b")
    loads.request_placed("request of a")
    assert not loads.must_wait("b")


def test_a_load_stays_if_nothing_is_gained() -> None:
    loads = postponed()
    loads.load_queued("b", COMPUTED)
    assert loads.to_unregister(short_of_blocks=False) == [], "the request gets its blocks in the next step"
    loads.load_queued("b", frozenset({"other"}))
    assert loads.to_unregister(short_of_blocks=True) == [], "nobody waits for that prompt here"
    loads.load_queued("b", COMPUTED)
    loads.request_finished("request of a")
    assert loads.to_unregister(short_of_blocks=True) == []


def test_two_requests_do_not_wait_for_each_other() -> None:
    loads = given_way()
    loads.load_unregistered("b", 0)
    assert loads.load_ended("b")
    loads.request_waits("b", {"b"})
    loads.load_queued("request of a", frozenset({"b"}))
    assert loads.to_unregister(short_of_blocks=True) == []
    loads.request_placed("request of a")
    loads.load_queued("request of a", frozenset({"b"}))
    assert loads.to_unregister(short_of_blocks=True) == ["request of a"], "P lost the prompt, and has the other one"
    loads.load_unregistered("request of a", 0)
    assert loads.load_ended("request of a")
    loads.request_waits("request of a", {"a"})
    assert loads.must_wait("request of a")
    assert not loads.must_wait("b"), "it has given way to that request already"


def test_no_load_waits_for_a_request_that_had_its_blocks_before_the_load_was_over() -> None:
    loads = given_way()
    loads.request_placed("request of a")
    loads.load_unregistered("b", 0)
    assert loads.load_ended("b")
    assert not loads.must_wait("b")


def test_a_load_is_registered_again_only_if_every_rank_has_unregistered_it() -> None:
    loads = given_way(ranks=2)
    loads.load_unregistered("b", 0)
    assert not loads.load_ended("b")
    loads = given_way(ranks=2)
    loads.load_unregistered("b", 0)
    loads.load_unregistered("b", 1)
    assert loads.load_ended("b")


def test_a_request_that_ends_leaves_nothing() -> None:
    loads = given_way()
    loads.load_unregistered("b", 0)
    loads.request_finished("b")
    loads.request_finished("request of a")
    assert [name for name, table in vars(loads).items() if table and name != "_ranks"] == []


def test_a_load_gives_way_to_running_requests_and_waits_for_nobody() -> None:
    loads = PostponedLoads(1)
    assert loads.to_unregister(short_of_blocks=False, spared=["b"]) == ["b"]
    loads.load_unregistered("b", 0)
    assert loads.load_ended("b")
    loads.request_waits("b", {"b"})
    assert not loads.must_wait("b")


def test_a_load_that_is_asked_already_still_gives_way_to_the_first_request() -> None:
    loads = given_way()
    assert loads.to_unregister(short_of_blocks=False, spared=["b"]) == ["b"]
    loads.load_unregistered("b", 0)
    assert loads.load_ended("b")
    loads.request_waits("b", {"b"})
    assert loads.must_wait("b")
