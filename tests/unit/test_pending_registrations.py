"""Registrations that wait for their request: the one that names it exactly goes first, none is kept for ever."""

from __future__ import annotations

from layerpush.core.request_names import RequestNames
from layerpush.core.wire import Registration
from layerpush.prefill.pending_registrations import PendingRegistrations
from tests.unit import builders


def registration(request_id: str, block: int = 1, layerpush: int = 1, **details: str) -> Registration:
    return builders.registration([block], request_id=request_id, layerpush=layerpush, **details)


NAMES = RequestNames(lambda request_id: request_id.partition("/")[0], lambda _: None, lambda _: None)
"""An id is a router's id, a slash and an engine's suffix."""


def pending_of(*registrations: Registration, kept: int = 100, kept_s: float = 10.0) -> PendingRegistrations:
    pending = PendingRegistrations(NAMES, kept=kept, kept_s=kept_s)
    for one in registrations:
        pending.add(one, 0.0)
    return pending


def test_an_exact_id_takes_precedence_over_a_base_id() -> None:
    pending = pending_of(*map(registration, ("a/1", "a/2", "b/1")))
    assert pending.take("a/1", 0.0) == registration("a/1")
    assert pending.take("b/7", 0.0) == registration("b/1")
    assert pending.take("c/1", 0.0) is None
    assert ("D", "a/2") in pending
    assert len(pending) == 1


def test_the_prefill_request_id_counts_as_an_exact_id() -> None:
    named = registration("a/d", prefill="a/p7")
    pending = pending_of(named, registration("a/new"))
    assert pending.take("a/p7", 0.0) == named
    other = registration("x/d", prefill="a/p7")
    assert pending_of(other).take("a/p7", 0.0) == other


def test_the_newest_registration_of_a_base_id_is_taken_first() -> None:
    pending = pending_of(*map(registration, ("a/old", "a/older", "a/new")))
    assert pending.take("a/x", 1.0) == registration("a/new")
    assert pending.take("a/y", 1.0) == registration("a/older")


def test_a_taken_registration_drops_older_stock_ones_of_its_base_id() -> None:
    """A stock engine never cancels a registration that a router left behind for a new try; others do."""
    ours = registration("a/ours")
    pending = pending_of(registration("a/stock", layerpush=0), ours, registration("b/stock", layerpush=0))
    pending.add(registration("a/new"), 0.0)
    assert pending.take("a/x", 1.0) == registration("a/new")
    assert ("D", "a/stock") not in pending
    assert pending.matching("a/x", 1.0) == [ours]
    assert ("D", "b/stock") in pending


def test_matching_registrations_come_oldest_first_without_expired_ones() -> None:
    pending = pending_of(registration("a/1"))
    pending.add(registration("a/2"), 5.0)
    pending.add(registration("a/3"), 6.0)
    assert [one.request_id for one in pending.matching("a/x", 9.0)] == ["a/1", "a/2", "a/3"]
    assert [one.request_id for one in pending.matching("a/x", 10.0)] == ["a/2", "a/3"]
    assert len(pending) == 3


def test_equal_ids_of_two_engines_are_distinct() -> None:
    pending = pending_of(registration("a/1", engine="D"), registration("a/1", engine="E"))
    assert len(pending) == 2
    pending.drop(("D", "a/1"))
    assert pending.take("a/1", 0.0) == registration("a/1", engine="E")


def test_drop_if_drops_only_the_registrations_of_one_engine() -> None:
    pending = pending_of(registration("a/1"), registration("b/1"), registration("a/1", engine="E"))
    pending.drop_if(lambda entry: entry.decode_engine_id == "D")
    assert len(pending) == 1
    assert ("E", "a/1") in pending


def test_a_repeated_registration_replaces_the_first_and_counts_as_new() -> None:
    pending = pending_of(registration("a/1", block=1), registration("a/2"), registration("a/1", block=5))
    assert pending.take("a/x", 0.0) == registration("a/1", block=5)


def test_pending_registrations_are_bounded_and_expire() -> None:
    pending = PendingRegistrations(NAMES, kept=2, kept_s=10.0)
    pending.add(registration("a/1"), 0.0)
    assert pending.add(registration("b/1"), 10.0) == [registration("a/1")]
    assert pending.add(registration("c/1"), 11.0) == []
    assert pending.add(registration("d/1"), 12.0) == [registration("b/1")]
    assert pending.take("c/1", 21.0) is None
    assert pending.expire(20.9) == []
    assert pending.expire(21.0) == [registration("c/1")]
    pending.drop(("D", "d/1"))
    pending.drop(("D", "d/1"))
    assert len(pending) == 0
