"""The fake network knows the owners of memory: it notices a WRITE into memory that its owner gave away."""

from __future__ import annotations

import re

import pytest

from tests.support.fake_pair import ALL, Pair
from tests.support.fake_transport import Faults, Violation


def held() -> Pair:
    """The first WRITE is held back."""
    return Pair(Faults(hold_writes={0: 5}))


def accusation(pair: Pair) -> str:
    """The first violation, in words."""
    return str(pair.fabric.violations[0])


def test_a_read_from_a_freed_block_is_a_violation() -> None:
    pair = Pair()
    handle = pair.post(ALL[:4], ALL[4:8])
    pair.ours.give_away([2])
    pair.p.release(handle)
    pair.fabric.settle()
    assert pair.fabric.violations == [Violation("P", "kv", 2)]


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_post_for_a_freed_block_is_a_violation_at_once(side: str) -> None:
    pair = Pair()
    (pair.ours if side == "P" else pair.theirs).give_away([3])
    handle = pair.post()
    assert pair.fabric.violations == [Violation(side, "kv", 3)]
    pair.land(handle)
    assert len(pair.fabric.violations) == 1


def test_owners_have_names() -> None:
    pieces = Pair().theirs
    assert pieces.owners(0) == {"anyone"}
    pieces.hand_to([0, 1, 2], "r1")
    pieces.share_with([1], "r2")
    pieces.hand_to([2], ("r3", 0))
    pieces.give_away([0])
    assert [set(pieces.owners(index)) for index in range(4)] == [set(), {"r1", "r2"}, {("r3", 0)}, {"anyone"}]

    pieces.give_away([1], "r1")
    assert pieces.owners(1) == {"r2"}
    with pytest.raises(ValueError, match="'r1' does not own descriptor 1"):
        pieces.give_away([1], "r1")


def test_a_write_into_a_block_of_the_next_request_is_a_violation() -> None:
    """The block needs an owner, and this must be the WRITE's own request."""
    pair = held()
    pair.ours.hand_to(ALL[:4], "r1")
    pair.theirs.hand_to(ALL[4:8], "r1")
    handle = pair.post(ALL[:4], ALL[4:8])
    pair.theirs.hand_to([6], "r2")
    pair.land(handle)
    assert accusation(pair) == (
        "WRITE 0 from 'P' to 'D' lands in descriptor 6 in 'kv' of endpoint 'D': "
        "the WRITE is for 'r1', the descriptor belongs to 'r2'"
    )


def test_a_write_may_land_after_its_blocks_return_to_their_request() -> None:
    pair = held()
    pair.theirs.hand_to(ALL, "r1")
    handle = pair.post()
    pair.theirs.hand_to(ALL, "r2")
    pair.theirs.hand_to(ALL, "r1")
    pair.land(handle)
    assert pair.fabric.violations == []


def test_blocks_may_be_freed_after_the_write_has_landed() -> None:
    pair = held()
    pair.theirs.hand_to(ALL, "r1")
    pair.land(pair.post())
    pair.theirs.give_away(ALL)
    pair.ours.give_away(ALL)
    pair.fabric.settle()
    assert pair.fabric.violations == []


def test_a_write_between_blocks_of_two_requests_is_a_violation_at_once() -> None:
    pair = Pair()
    pair.ours.hand_to(ALL, "r1")
    pair.theirs.hand_to(ALL, "r1")
    pair.theirs.hand_to([9], "r2")
    pair.post()
    assert accusation(pair) == (
        "WRITE 0 from 'P' to 'D' is posted for descriptor 9 in 'kv' of endpoint 'D': "
        "the WRITE is for 'r1', the descriptor belongs to 'r2'"
    )


@pytest.mark.parametrize(
    ("handed_on", "error"),
    [
        (["ours"], r"WRITE 0 .* reads from .*'P'.* for 'r1', .* belongs to 'r2'"),
        (["ours", "theirs"], r"for 'r1'.* belongs to 'r2'"),
    ],
)
def test_blocks_of_either_side_may_not_change_owner_during_a_write(handed_on: list[str], error: str) -> None:
    pair = held()
    for pieces in (pair.ours, pair.theirs):
        pieces.hand_to(ALL, "r1")
    handle = pair.post()
    for side in handed_on:
        getattr(pair, side).hand_to(ALL, "r2")
    pair.land(handle)
    assert re.search(error, accusation(pair))


def test_a_new_owner_during_a_write_of_anyone_is_a_violation() -> None:
    pair = held()
    handle = pair.post()
    pair.theirs.hand_to([0], "r1")
    pair.land(handle)
    assert "is for 'anyone', the descriptor belongs to 'r1'" in accusation(pair)


def test_requests_may_share_a_source_block() -> None:
    """A cached prefix on P stays readable for each request until that request gives it away."""
    pair = Pair(Faults(hold_writes={0: 5, 1: 5}))
    pair.ours.hand_to(ALL[:2], "r1")
    pair.ours.share_with(ALL[:2], "r2")
    pair.theirs.hand_to(ALL[:2], "r1")
    pair.theirs.hand_to(ALL[2:4], "r2")
    first, second = pair.post(ALL[:2], ALL[:2]), pair.post(ALL[:2], ALL[2:4])
    pair.ours.give_away(ALL[:2], "r1")
    pair.land(second)
    assert pair.fabric.violations == []
    pair.land(first)
    assert "WRITE 0 from 'P' to 'D' reads from" in accusation(pair)
    assert "is for 'r1', the descriptor belongs to 'r2'" in accusation(pair)


def test_writes_of_a_dead_peer_are_still_checked() -> None:
    pair = held()
    pair.post()
    pair.fabric.kill("P", lingers=9)
    pair.theirs.give_away([5])
    for _ in range(9):
        pair.d.notifications()
    assert "lands in descriptor 5" in accusation(pair)


def test_every_violation_is_recorded() -> None:
    pair = held()
    handle = pair.post()
    pair.theirs.give_away([5, 6])
    pair.land(handle)
    assert sorted(violation.descriptor for violation in pair.fabric.violations) == [5, 6]
    assert {str(violation) for violation in pair.fabric.violations} == {
        f"WRITE 0 from 'P' to 'D' lands in descriptor {index} in 'kv' of endpoint 'D': "
        "the WRITE is for 'anyone', the descriptor belongs to nobody"
        for index in (5, 6)
    }
