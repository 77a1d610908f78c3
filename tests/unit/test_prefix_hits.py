"""Blocks of the prefix cache that are in memory before a step begins."""

from __future__ import annotations

import pytest

from layerpush.core.kv_kind import WHOLE_PROMPT, KvKind
from layerpush.engine.scheduler.prefix_hits import PrefixHits

SIZE = 16
TABLES = {"p-1": [[1, 2, 3, 4]], "p-2": [[1, 2, 3, 5]], "p-3": [[8, 9, 3]]}


@pytest.mark.parametrize(
    ("hits", "scheduled", "computed", "expected"),
    [
        ({"p-1": 48}, {"p-1": 16}, {"p-1": 48}, {"p-1": 48}),
        ({"p-1": 0}, {"p-1": 16}, {"p-1": 0}, {"p-1": 0}),
        ({}, {"p-1": 16}, {"p-1": 48}, {}),
        ({"p-1": 48}, {"p-1": 32}, {"p-1": 32}, {"p-1": 32}),
        ({"p-1": 16}, {"p-1": 16}, {"p-1": 48}, {"p-1": 16}),
        ({"p-1": 0, "p-2": 48}, {"p-1": 64, "p-2": 16}, {"p-1": 0, "p-2": 48}, {"p-1": 0, "p-2": 0}),
        ({"p-1": 48, "p-2": 48}, {"p-1": 64, "p-2": 16}, {"p-1": 0, "p-2": 48}, {"p-1": 0, "p-2": 0}),
        ({"p-1": 16, "p-2": 48}, {"p-1": 16, "p-2": 16}, {"p-1": 48, "p-2": 48}, {"p-1": 16, "p-2": 16}),
        ({"p-2": 48}, {"p-2": 16, "p-3": 1}, {"p-2": 48, "p-3": 47}, {"p-2": 32}),
    ],
    ids=[
        "computed by earlier steps",
        "no hit",
        "no lookup: it goes on",
        "vLLM took less than it found",
        "the rest was loaded from elsewhere",
        "computed by this step, for another prompt",
        "vLLM took less for another prompt",
        "loaded in this step, for another prompt",
        "filled by this step, for a request that goes on",
    ],
)
def test_a_hit_ends_at_the_first_block_that_the_step_writes(
    hits: dict[str, int], scheduled: dict[str, int], computed: dict[str, int], expected: dict[str, int]
) -> None:
    found = PrefixHits([KvKind(SIZE)])
    for request_id, tokens in hits.items():
        found.put_hit(request_id, tokens)
    assert found.in_memory(found.pop_hits(scheduled), scheduled, computed, TABLES.__getitem__) == expected


def test_the_shortest_group_decides() -> None:
    tables = {"p-1": [[1, 2, 3, 4, 5], [6, 7, 8]], "p-2": [[11], [7]]}
    found = PrefixHits([KvKind(16), KvKind(32)]).in_memory(
        {"p-1": 64}, {"p-1": 8, "p-2": 1}, {"p-1": 64, "p-2": 0}, tables.__getitem__
    )
    assert found == {"p-1": 32}


def test_a_written_state_shortens_no_hit() -> None:
    """The step begins with a copy of the state that it hits. P's table has the newest state only."""
    tables = {"p-1": [[1, 2, 3, 4], [9]]}
    found = PrefixHits([KvKind(16), KvKind(WHOLE_PROMPT, is_state=True)]).in_memory(
        {"p-1": 48}, {"p-1": 8}, {"p-1": 48}, tables.__getitem__
    )
    assert found == {"p-1": 48}


def test_a_null_block_shortens_no_hit() -> None:
    """Groups of sliding windows have it in the place of dropped blocks."""
    tables = {"p-1": [[0, 2, 3, 4]], "p-2": [[0, 0, 7]]}
    found = PrefixHits([KvKind(16)]).in_memory(
        {"p-1": 48}, {"p-1": 8, "p-2": 48}, {"p-1": 48, "p-2": 0}, tables.__getitem__
    )
    assert found == {"p-1": 48}


def test_a_hit_is_taken_once_and_can_be_forgotten() -> None:
    hits = PrefixHits([KvKind(SIZE)])
    for name in ("p-1", "p-2"):
        hits.put_hit(name, 48)
    hits.forget("p-2")
    assert hits.pop_hits(["p-1", "p-2"]) == {"p-1": 48}
    assert hits.pop_hits(["p-1", "p-2"]) == {}
