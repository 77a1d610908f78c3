"""A dictionary that forgets its oldest entries: bounded in number and in bytes."""

from __future__ import annotations

from layerpush.core.bounded_dict import ENTRY_BYTES, LIVE_LOOKS, BoundedDict
from layerpush.core.sizes import size_of


def test_the_oldest_entries_are_forgotten_beyond_either_limit() -> None:
    few = BoundedDict[str, str](2, 1 << 20)
    small = BoundedDict[str, str](100, 3 * (ENTRY_BYTES + 1000))
    for known in (few, small):
        for key in "abc":
            known.put(key, "x" * 900)
        known.put("b", "y" * 900)
        known.put("d", "z" * 900)
    assert list(few) == ["b", "d"]
    assert list(small) == ["c", "b", "d"][-len(small) :]
    assert small.held_bytes == sum(ENTRY_BYTES + size_of(key) + size_of(text) for key, text in small.items())
    for key in list(small):
        del small[key]
    assert small.held_bytes == 0


def test_live_entries_stay() -> None:
    known = BoundedDict[int, None](2, 1 << 20)
    for key in range(10):
        known.put(key, None, lambda key: key < 2)
    assert set(known) == {0, 1, 9}


def test_an_entry_looks_at_few_live_ones() -> None:
    """Junk may be live, too, for as long as it waits."""
    known, looks = BoundedDict[int, None](10, 1 << 20), list[int]()
    for key in range(1000):
        known.put(key, None, lambda key: looks.append(key) is None)
    assert len(looks) <= LIVE_LOOKS * 1000
    assert len(known) == 1000
    for key in range(1000, 1200):
        known.put(key, None)
    assert len(known) == 10
