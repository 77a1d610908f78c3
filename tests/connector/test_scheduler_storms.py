"""Random courses of an engine that is P and D, under vLLM's real scheduler: no block is reused while another engine may
use it, none leaks, no table keeps a request, and every request ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.connector.conftest import PORTS
from tests.connector.engine import config_of
from tests.connector.scheduler_mutants import MUTANTS
from tests.connector.scheduler_world import RANKS, SchedulerWorld

SEEDS, MORE_SEEDS = range(60), range(1000, 1300)
RARE = ("kept", "parked", "preempted", "registered again", "reset", "returning", "token: prefill", "unregistered")

Storm = Callable[..., Counter[str]]


@pytest.fixture
def storm(world: None, model: Path, monkeypatch: pytest.MonkeyPatch) -> Storm:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(PORTS.next_free()))

    def storm(seeds: Iterable[int], policy: str, *, ahead: bool) -> Counter[str]:
        """``ahead``: vLLM schedules a step before it has the results of the step before."""
        config = config_of(
            model, "kv_both", "storm", {"bidirectional_kv_xfer": True, "answer_early": True},
            enable_prefix_caching=True, max_num_seqs=16, max_num_batched_tokens=256, tensor_parallel_size=RANKS,
        )  # fmt: skip
        config.scheduler_config.async_scheduling = ahead
        config.kv_transfer_config.kv_load_failure_policy = policy
        seen = Counter[str]()
        for seed in seeds:
            course = SchedulerWorld(config, seed)
            try:
                course.run()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            finally:
                course.scheduler.shutdown()
            seen += course.seen
        return seen

    return storm


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ahead", [True, False], ids=["asynchronous", "synchronous"])
def test_every_course_ends_well(storm: Storm, policy: str, ahead: bool) -> None:
    seen = storm(SEEDS, policy, ahead=ahead)
    assert not [event for event in RARE if not seen[event]]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ahead", [True, False], ids=["asynchronous", "synchronous"])
def test_more_courses_end_well(storm: Storm, policy: str, ahead: bool) -> None:
    storm(MORE_SEEDS, policy, ahead=ahead)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.replace("_", " "))
def test_storms_reveal_a_removed_guard(
    storm: Storm, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        storm(SEEDS, "recompute", ahead=True)
