"""P's steps that vLLM may take back because another connector may have lost blocks."""

from __future__ import annotations

import pytest

from layerpush.core.kv_kind import WHOLE_PROMPT, KvKind
from layerpush.engine.scheduler.provisional_steps import ProvisionalSteps

SIZE = 16
TABLES = {"p-1": [[1, 2, 3, 4]], "p-2": [[1, 2, 3, 5]], "p-3": [[1, 6, 7, 8]]}


def found(steps: ProvisionalSteps, hits: dict[str, int], computed: dict[str, int]) -> set[str]:
    return steps.begin_requests(hits, computed, TABLES.__getitem__)


@pytest.mark.parametrize(
    ("hits", "computed", "expected"),
    [
        ({"p-1": 0}, {"p-1": 0}, set()),
        ({"p-1": 48}, {"p-1": 48}, set()),
        ({"p-1": 48}, {"p-1": 32}, set()),
        ({"p-1": 0}, {"p-1": 48}, {"p-1"}),
        ({"p-1": 16}, {"p-1": 40}, {"p-1"}),
        ({"p-1": 16, "p-2": 48}, {"p-1": 48, "p-2": 48}, {"p-1", "p-2"}),
        ({"p-1": 16, "p-3": 16}, {"p-1": 48, "p-3": 16}, {"p-1"}),
        ({"p-1": 16, "p-2": 0}, {"p-1": 48, "p-2": 0}, {"p-1"}),
    ],
    ids=[
        "no hit",
        "vLLM's own hit",
        "vLLM took a part of its hit",
        "loaded from elsewhere",
        "a hit, and the rest of a block more was loaded",
        "another request hits the loaded blocks",
        "another request hits a block before the loaded ones",
        "another request hits nothing",
    ],
)
def test_requests_that_read_loaded_blocks_are_provisional(
    hits: dict[str, int], computed: dict[str, int], expected: set[str]
) -> None:
    steps = ProvisionalSteps([KvKind(SIZE)], 1)
    steps.begin()
    assert found(steps, hits, computed) == expected


@pytest.mark.parametrize(("in_flight", "later", "expected"), [(1, 1, set()), (2, 1, {"p-2"}), (2, 2, set())])
def test_blocks_may_be_lost_until_the_result_of_their_step_is_processed(
    in_flight: int, later: int, expected: set[str]
) -> None:
    steps = ProvisionalSteps([KvKind(SIZE)], in_flight)
    steps.begin()
    assert found(steps, {"p-1": 0}, {"p-1": 48}) == {"p-1"}
    for _ in range(later):
        steps.begin()
    assert found(steps, {"p-2": 48}, {"p-2": 48}) == expected


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_prompt_is_accepted_once_when_its_last_step_is_processed(in_flight: int) -> None:
    steps = ProvisionalSteps([KvKind(SIZE)], in_flight)
    steps.begin()
    steps.awaits("p-1")
    assert [steps.begin() for _ in range(4)] == [["p-1"] if step == in_flight else [] for step in range(1, 5)]


def test_a_prompt_that_begins_anew_is_not_accepted() -> None:
    steps = ProvisionalSteps([KvKind(SIZE)], 2)
    steps.begin()
    steps.awaits("p-1")
    assert steps.begin() == []
    steps.forget("p-1")
    steps.awaits("p-1")
    assert [steps.begin() for _ in range(2)] == [[], ["p-1"]]


def test_states_and_null_blocks() -> None:
    """A request that hits a state which is being loaded is provisional; a null block makes none so."""
    tables = {"p-1": [[0, 2, 3], [9]], "p-2": [[0, 5, 6], [9]], "p-3": [[0, 7, 8], [10]]}
    steps = ProvisionalSteps([KvKind(SIZE), KvKind(WHOLE_PROMPT, is_state=True)], 1)
    steps.begin()
    hits = {"p-1": 0, "p-2": 32, "p-3": 32}
    assert steps.begin_requests(hits, dict.fromkeys(hits, 32), tables.__getitem__) == {"p-1", "p-2"}
