"""Registrations that wait for their request: found by exact id, then by base id, and not kept for ever."""

from __future__ import annotations

from layerpush.prefill.ledger import Ledger
from layerpush.wire import Registration


def registration(request_id: str, block: int = 1) -> Registration:
    return Registration(
        request_id=request_id,
        decode_engine_id="D",
        decode_host="127.0.0.1",
        decode_port=1,
        decode_tp_size=1,
        local_block_ids=((block,),),
    )


def base_id(request_id: str) -> str:
    return request_id.partition("/")[0]


def test_the_exact_id_goes_before_the_base_id() -> None:
    ledger = Ledger(base_id)
    for request_id in ("a/1", "a/2", "b/1"):
        ledger.add(registration(request_id), 0.0)
    assert ledger.take("a/1", 0.0) == registration("a/1")
    assert ledger.take("b/7", 0.0) == registration("b/1")
    assert ledger.take("c/1", 0.0) is None
    assert len(ledger) == 1


def test_of_one_base_id_the_newest_is_meant_and_the_older_ones_end() -> None:
    ledger = Ledger(base_id)
    for request_id in ("a/old", "a/older", "a/new"):
        ledger.add(registration(request_id), 0.0)
    assert ledger.take("a/x", 1.0) == registration("a/new")
    assert len(ledger) == 0


def test_a_second_copy_replaces_the_first_and_counts_as_new() -> None:
    ledger = Ledger(base_id)
    ledger.add(registration("a/1", block=1), 0.0)
    ledger.add(registration("a/2"), 0.0)
    ledger.add(registration("a/1", block=5), 0.0)
    assert ledger.take("a/x", 0.0) == registration("a/1", block=5)


def test_nothing_is_kept_for_ever() -> None:
    ledger = Ledger(base_id, kept=2, kept_s=10.0)
    ledger.add(registration("a/1"), 0.0)
    assert ledger.add(registration("b/1"), 10.0) == [registration("a/1")]
    assert ledger.add(registration("c/1"), 11.0) == []
    assert ledger.add(registration("d/1"), 12.0) == [registration("b/1")]
    assert ledger.take("c/1", 21.0) is None
    ledger.drop("d/1")
    assert len(ledger) == 0
