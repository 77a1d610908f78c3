"""Windows of a decode rank's ring: their owners, and their return."""

from __future__ import annotations

import pytest

from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.ring import Ring
from layerpush.transport.packing.windows import Windows

SIZE = 2 * PIECE_BYTES


@pytest.fixture
def windows() -> Windows:
    return Windows(Ring(3 * SIZE), SIZE)


def test_each_request_has_its_own_window_until_none_is_left(windows: Windows) -> None:
    assert [windows.open(name) for name in "abcd"] == [0, SIZE, 2 * SIZE, None]
    assert windows.open("a") is None


@pytest.mark.parametrize(
    ("calls", "is_free"),
    [
        (["close"], True),
        (["read_begun", "read_begun", "close", "read_ended"], False),
        (["read_begun", "read_begun", "close", "read_ended", "read_ended"], True),
        (["read_begun", "read_ended"], False),
    ],
)
def test_a_closed_window_is_reused_after_its_last_read(windows: Windows, calls: list[str], is_free: bool) -> None:
    for name in "abc":
        windows.open(name)
    for call in calls:
        getattr(windows, call)("b")
    assert windows.open("d") == (SIZE if is_free else None)


@pytest.mark.parametrize(
    ("offset", "size", "holds"),
    [(SIZE, SIZE, True), (SIZE + 8, SIZE - 8, True), (SIZE - 1, 2, False), (SIZE + 8, SIZE, False), (0, 8, False)],
)
def test_a_window_holds_only_its_own_range(windows: Windows, offset: int, size: int, holds: bool) -> None:
    windows.open("a")
    windows.open("b")
    assert windows.holds("b", offset, size) is holds
    assert not windows.holds("nobody", offset, size)


def test_the_close_of_an_unopened_window_does_nothing(windows: Windows) -> None:
    windows.close("nobody")
    assert len(windows) == 0


def test_a_closed_window_holds_no_range(windows: Windows) -> None:
    windows.open("a")
    windows.read_begun("a")
    windows.close("a")
    assert not windows.holds("a", 0, 8)


def test_a_ring_too_small_for_windows_has_none() -> None:
    assert Windows(Ring(3 * SIZE), 0).open("a") is None
