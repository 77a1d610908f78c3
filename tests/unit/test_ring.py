"""Spans of staging memory: never two that overlap, never room that is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.transport.gather.ring import Ring, RingError

SIZE = 256


@given(st.lists(st.tuples(st.integers(1, 80), st.sampled_from([1, 4, 16]), st.integers(0, 20)), max_size=60))
def test_spans_never_overlap_and_all_space_is_returned(steps: list[tuple[int, int, int]]) -> None:
    ring, taken = Ring(SIZE), {}
    for size, align, given_back in steps:
        offset = ring.allocate(size, align)
        if offset is not None:
            assert offset % align == 0
            assert 0 <= offset <= SIZE - size
            assert all(offset + size <= other or other + length <= offset for other, length in taken.items())
            taken[offset] = size
        if taken and given_back % 2:
            victim = sorted(taken)[given_back % len(taken)]
            del taken[victim]
            ring.free(victim)
        assert (ring.used_bytes, len(ring)) == (sum(taken.values()), len(taken))
    for offset in taken:
        ring.free(offset)
    assert ring.allocate(SIZE) == 0


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_a_span_is_refused_only_if_no_gap_is_large_enough(sizes: list[int]) -> None:
    """Bytes are refused only if no gap is large enough."""
    ring, taken = Ring(SIZE), {}
    for size in sizes:
        offset = ring.allocate(size)
        edges = sorted([(start, start + length) for start, length in taken.items()])
        gaps = [
            right - left
            for left, right in zip([0, *[end for _, end in edges]], [*[s for s, _ in edges], SIZE], strict=True)
        ]
        assert (offset is not None) == (max(gaps) >= size)
        if offset is not None:
            taken[offset] = size
        if len(taken) > 3:
            ring.free(oldest := next(iter(taken)))
            del taken[oldest]


def test_a_returned_span_is_reused_last() -> None:
    ring = Ring(30)
    first = ring.allocate(10)
    assert first == 0
    ring.free(first)
    assert ring.allocate(10) == 10
    assert ring.allocate(10) == 20
    assert ring.allocate(10) == 0


@pytest.mark.parametrize("offset", [0, 5, 10])
def test_a_span_that_is_not_taken_cannot_be_returned(offset: int) -> None:
    ring = Ring(30)
    span = ring.allocate(10)
    assert span == 0
    ring.free(span)
    with pytest.raises(RingError):
        ring.free(offset)


def test_an_empty_span_is_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        Ring(30).allocate(0)
