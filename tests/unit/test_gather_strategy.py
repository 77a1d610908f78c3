"""The choice of a plan for a WRITE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import Route
from layerpush.transport.gather.cost import CopyCost
from layerpush.transport.gather.strategy import GatherStrategy
from layerpush.transport.link_speed import FIRST_TRIAL, TRIAL_EVERY, LinkSpeed, Terms

ROUTE, BLOCK_BYTES, BLOCKS = Route("D", 0, "blocks", "kv"), 1000, 100
SCATTERED = np.arange(0, 2 * BLOCKS, 2, dtype=np.int32)
IN_ORDER = np.arange(BLOCKS, dtype=np.int32)
COPIES = CopyCost(1e-5, 1e-9)
"""0.11 ms for each of these WRITEs."""


class Chooser:
    """A strategy, and the estimate of a link on which a descriptor takes ``descriptor_s``; None: nothing is known."""

    def __init__(
        self,
        descriptor_s: float | None,
        packing: Any = "auto",
        room: bool = True,
        copies: CopyCost = COPIES,
        byte_s: float = 1e-9,
        gaps: bool = False,
    ) -> None:
        self.speed = LinkSpeed()
        if descriptor_s is not None:
            self.speed.write_posted(0, 1000, 0.0)
            self.speed.write_ended(0, 1.0, landed=True)
            self.speed.terms = Terms(1e-4, byte_s, descriptor_s)
        self.staged: list[Any] = []
        layout = SimpleNamespace(has_gaps=gaps)
        gatherer = SimpleNamespace(
            block_bytes=BLOCK_BYTES, layout=layout, gather=lambda *_: self._gather() if room else None
        )
        self.strategy = GatherStrategy(gatherer, packing, copies)

    def _gather(self) -> Any:
        self.staged.append(SimpleNamespace())
        return self.staged[-1]

    def record(self, local: Any = SCATTERED, remote: Any = IN_ORDER) -> WriteRecord:
        """The record of one more WRITE."""
        record = WriteRecord(0, (0, 0), (0, 0), BLOCKS, BLOCKS * BLOCK_BYTES, 0.0, 0.0)
        taken = self.strategy.begin(Write(0, 0, 0, 0, ()), ROUTE, (local, remote), record, self.speed)
        assert (taken is not None) == (record.plan == "gathered")
        return record

    def plans(self, writes: int) -> list[int]:
        """The numbers of the gathered ones among this many WRITEs; the first has number 1."""
        return [number for number in range(1, writes + 1) if self.record().plan == "gathered"]


@pytest.mark.parametrize(
    ("descriptor_s", "local", "remote", "plan"),
    [
        (3e-6, SCATTERED, IN_ORDER, "gathered"),
        (3e-6, SCATTERED, SCATTERED, "direct"),
        (3e-6, IN_ORDER, IN_ORDER, "direct"),
        (1.6e-6, SCATTERED, IN_ORDER, "gathered"),
        (1.2e-6, SCATTERED, IN_ORDER, "direct"),  # 0.11 ms against 0.12: not worth a copy
        (0.0, SCATTERED, IN_ORDER, "direct"),
        (None, SCATTERED, IN_ORDER, "direct"),
    ],
)
def test_the_faster_plan_is_taken(descriptor_s: float | None, local: Any, remote: Any, plan: str) -> None:
    assert Chooser(descriptor_s).record(local, remote).plan == plan


def test_the_record_has_the_estimate_of_the_plan_that_was_taken() -> None:
    gathered = Chooser(3e-6).record()
    assert gathered.runs == 1
    assert gathered.estimate_s == pytest.approx(1e-4 + 1e-4 + 3e-6 + 1.1e-4)
    direct = Chooser(0.0).record()
    assert direct.runs == BLOCKS
    assert direct.estimate_s == pytest.approx(1e-4 + 1e-4)
    unknown = Chooser(None).record()
    assert (unknown.runs, unknown.estimate_s) == (BLOCKS, None)


def test_blocks_that_are_apart_in_memory_are_a_descriptor_each() -> None:
    """NIXL merges nothing in rows of several layers, so that a gather saves no descriptor."""
    record = Chooser(3e-6, gaps=True).record(IN_ORDER, IN_ORDER)
    assert (record.plan, record.runs) == ("direct", BLOCKS)


def test_now_and_then_the_slower_plan_is_taken_as_a_trial() -> None:
    trials = list(range(FIRST_TRIAL, 201, TRIAL_EVERY))
    assert Chooser(0.0).plans(200) == trials
    assert Chooser(3e-6).plans(200) == [number for number in range(1, 201) if number not in trials]


@pytest.mark.parametrize(
    "chooser",
    [
        Chooser(None),
        Chooser(0.0, copies=CopyCost(2.1e-4, 0.0)),
        Chooser(0.0, room=False),
    ],
    ids=["nothing is known", "the copy takes longer than the WRITE", "no room"],
)
def test_no_trial(chooser: Chooser) -> None:
    assert chooser.plans(200) == []


def test_a_gather_that_saves_few_descriptors_is_no_trial() -> None:
    chooser = Chooser(0.0)
    remote = SCATTERED.copy()
    remote[: BLOCKS // 3] = np.arange(BLOCKS // 3)
    assert {chooser.record(SCATTERED, remote).plan for _ in range(200)} == {"direct"}


def test_copies_that_have_become_slow_end_the_gathering() -> None:
    chooser = Chooser(3e-6)
    assert chooser.record().plan == "gathered"
    for _ in range(10):
        chooser.staged[-1].on_landed(SimpleNamespace(record=SimpleNamespace(bytes=BLOCKS * BLOCK_BYTES), copy_s=1e-3))
    assert chooser.record().plan == "direct"


@pytest.mark.parametrize("room", [True, False])
def test_every_write_is_gathered_if_that_is_forced_and_there_is_room(room: bool) -> None:
    chooser = Chooser(None, "gather", room)
    assert len(chooser.plans(100)) == (100 if room else 0)
