"""Values that are found by several names: bounded in number, bytes and time."""

from __future__ import annotations

import pytest

from layerpush.core.bounded_index import ENTRY_BYTES, EXPIRED_AT_ONCE, BoundedIndex
from layerpush.core.sizes import size_of
from tests.unit.builders import registration


def index_of(*values: tuple[str, ...], limit: int = 10, max_bytes: int = 1 << 20) -> BoundedIndex[tuple[str, ...]]:
    index = BoundedIndex[tuple[str, ...]](limit, max_bytes, kept_s=10.0)
    for value in values:
        index.add(value, value)
    return index


def test_values_are_found_by_each_name_once_and_oldest_first() -> None:
    index = index_of(("a", "x"), ("b", "x"), ("c", "y"), ("d", "x", "x"))
    assert index.find(["y", "x"]) == [("a", "x"), ("b", "x"), ("c", "y"), ("d", "x", "x")]
    assert index.find(["d", "x", "nobody"]) == [("a", "x"), ("b", "x"), ("d", "x", "x")]
    assert ("a" in index, "nobody" in index) == (True, False)


def test_dropped_values_leave_nothing_behind() -> None:
    index = index_of(("a", "x"), ("b", "x"), ("c", "y"))
    assert index.drop(["b"]) == [("b", "x")]
    assert index.find(["x", "y"]) == [("a", "x"), ("c", "y")]
    index.drop(["a", "c"])
    assert (len(index), index.held_bytes, index._named) == (0, 0, {})


def test_the_oldest_values_are_dropped_beyond_either_limit() -> None:
    assert list(index_of(("a",), ("b",), ("c",), limit=2)) == [("b",), ("c",)]
    index = index_of(max_bytes=5 * ENTRY_BYTES)
    texts = [(letter * ENTRY_BYTES,) for letter in "abc"]
    assert [index.add(text, text) for text in texts] == [[], [texts[0]], [texts[1]]]
    assert 3 * ENTRY_BYTES < index.held_bytes <= 5 * ENTRY_BYTES
    huge = ("d" * 5 * ENTRY_BYTES,)
    assert index.add(huge, huge) == [texts[2], huge]
    assert index.held_bytes == 0


def test_a_value_that_grows_keeps_its_place() -> None:
    index = BoundedIndex[list[str]](10, 6 * ENTRY_BYTES)
    first, second = ["a"], ["b"]
    index.add(first, "a")
    index.add(second, "b")
    first.append("a" * 2 * ENTRY_BYTES)
    assert index.grown("a") == []
    assert list(index) == [first, second]
    second.append("b" * 2 * ENTRY_BYTES)
    assert index.grown("b") == [first]
    index.drop(["b"])
    assert index.held_bytes == 0


def test_values_expire() -> None:
    index = index_of()
    index.add(("a",), "a", 0.0)
    index.add(("b",), "b", 5.0)
    assert index.older_than(4.0, 6.0) == [(4.0, ("a",))]
    assert index.find("ab", 10.0) == [("b",)]
    assert index.add(("c",), "c", 10.0) == [("a",)]
    assert index.expire(15.0) == [("b",)]


def test_many_values_expire_in_several_calls() -> None:
    index = BoundedIndex[int](1000, 1 << 20, kept_s=10.0)
    for number in range(EXPIRED_AT_ONCE + 1):
        index.add(number, [number], 0.0)
    assert index.find([0], 10.0) == [], "it is too old, although it is still there"
    assert index.expire(10.0) == list(range(EXPIRED_AT_ONCE))
    assert index.expires_at == 10.0
    assert index.expire(10.0) == [EXPIRED_AT_ONCE]


@pytest.mark.parametrize("blocks", [1, 1000])
def test_the_size_of_a_registration_is_that_of_its_blocks(blocks: int) -> None:
    """Block ids are most of a registration; each is a number of 32 bytes and a place in a list."""
    wanted = registration(list(range(1000, 1000 + blocks)))
    assert 40 * blocks <= size_of(wanted) < 40 * blocks + 2000
