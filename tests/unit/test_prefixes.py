"""The longest prefix that two engines share, by digests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.prefixes import SHOWN_CHARS, Prefixes

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(st.integers(1, 5), TOKENS, TOKENS, TOKENS)
def test_the_longest_shared_prefix_of_whole_strides_is_found(
    stride: int, common: list[int], ours: list[int], theirs: list[int]
) -> None:
    one, other = Prefixes.of(common + ours, stride), Prefixes.of(common + theirs, stride)
    shared = 0
    while (common + ours)[: shared + stride] == (common + theirs)[: shared + stride] and (
        shared + stride <= min(len(common + ours), len(common + theirs))
    ):
        shared += stride
    assert one.shared(other.shown) == other.shared(one.shown) == shared
    assert one.digest(shared) == other.digest(shared)


@given(st.integers(1, 5), st.integers(1, 4), TOKENS)
def test_a_digest_does_not_depend_on_the_stride(stride: int, factor: int, tokens: list[int]) -> None:
    fine, coarse = Prefixes.of(tokens, stride), Prefixes.of(tokens, stride * factor)
    for end in range(0, len(tokens) + 1, stride * factor):
        assert fine.digest(end) == coarse.digest(end)


def test_there_are_digests_of_whole_strides_only() -> None:
    prefixes = Prefixes.of([1, 2, 3, 4, 5], 2)
    assert len(prefixes.shown) == 2 * SHOWN_CHARS
    assert [tokens for tokens in range(-2, 8) if prefixes.digest(tokens) is not None] == [2, 4]


OWNERS = [("", None), ("adapter", None), ("", "adapter"), ("adapter", "salt"), ("", "another"), ("", "\ud800")]


def test_adapters_and_salts_differ() -> None:
    each = [Prefixes.of([1, 2], 2, *owner) for owner in OWNERS]
    assert len({one.digest(2) for one in each}) == len(each)
    assert all(one.shared(other.shown) == 0 for one in each for other in each if one is not other)
    of_earlier_releases = "a6554188d97913ad40eb09aa3738df95"
    assert Prefixes.of([1, 2], 2, salt="").digest(2) == each[0].digest(2) == of_earlier_releases


def test_a_prefix_is_known_by_its_whole_digest() -> None:
    prefixes = Prefixes.of(range(8), 2)
    assert [prefixes.has(prefixes.digest(tokens)) for tokens in (2, 8)] == [True, True]
    across, another = prefixes.digests[8:24].hex(), Prefixes.of(range(9), 3).digest(9)
    wrong = (None, "", "nonsense", prefixes.shown[:8], prefixes.digests.hex(), across, another)
    assert not any(map(prefixes.has, wrong))


def test_what_a_client_has_changed_shares_less() -> None:
    prefixes = Prefixes.of(range(8), 2)
    assert prefixes.shared(prefixes.shown[:-1]) == 6
    assert prefixes.shared("") == 0
    assert prefixes.shared("nonsense") == 0
    assert prefixes.shared(prefixes.shown * 2) == 8
