"""The choice of a plan for a WRITE, and the learned costs of copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import Route
from layerpush.transport.packing.cost_model import Costs, TransferSize
from layerpush.transport.packing.running_estimate import FORGOTTEN_S, CopyEstimates, RunningEstimate
from layerpush.transport.packing.strategy import PackingStrategy

ROUTE = Route("D", 0, "blocks", "kv")
IDS = np.arange(10, dtype=np.int32)


@pytest.mark.parametrize(("packing", "looks"), [("auto", False), ("gather", True)])
def test_the_transfer_size_is_computed_only_if_a_copy_can_pay(
    packing: Any, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    monkeypatch.setattr(
        "layerpush.transport.packing.strategy.transfer_size", lambda *_: looked.append(1) or TransferSize(0, 0, 0)
    )
    packer = SimpleNamespace(block_bytes=8, gather=lambda *_: None)
    strategy = PackingStrategy(packer, packing, Costs(scattered=((1, 1.0),), copy_s=10.0))  # type: ignore[arg-type]
    record = WriteRecord(0, (0, 0), (0, 0), 10, 80, 0.0, 0.0)
    assert strategy.begin(Write(0, 0, 0, 80, ()), ROUTE, (IDS, IDS), record) is None
    assert record.plan == "direct"
    assert bool(looked) == looks


def test_copy_costs_are_learned_from_copies() -> None:
    estimates = CopyEstimates(Costs(copy_s=1e-4, gather_s=1e-10))
    for _ in range(20):
        estimates.copied(16 << 10, 5e-4 + (16 << 10) * 2e-10)
        estimates.copied(16 << 20, 5e-4 + (16 << 20) * 2e-10)
    learned = estimates.applied_to(Costs(wire_s=7.0))
    assert learned.copy_s == pytest.approx(5e-4, rel=0.02)
    assert learned.gather_s == pytest.approx(2e-10, rel=0.02)
    assert learned.wire_s == 7.0
    estimates.copied(16 << 10, 1.0)
    assert estimates.applied_to(Costs()).copy_s == learned.copy_s, "one copy may be an accident"


def test_an_estimate_ignores_two_outliers_and_expires() -> None:
    clock = SimpleNamespace(now=100.0)
    running = RunningEstimate(1.0, lambda: clock.now)
    for _ in range(2):
        running.add(50.0)
    assert running.value == 1.0
    for _ in range(8):
        running.add(50.0)
    assert running.value == 50.0
    clock.now += FORGOTTEN_S + 1
    assert running.value == 1.0, "a plan that is not chosen gets no new times"


def test_a_gathered_write_updates_the_copy_cost() -> None:
    strategy = PackingStrategy(SimpleNamespace(), "auto", Costs())  # type: ignore[arg-type]
    record = WriteRecord(0, (0, 0), (0, 0), 1, 100, 0.0, 0.0)
    for _ in range(8):
        strategy.learn(SimpleNamespace(record=record, copy_s=0.25))  # type: ignore[arg-type]
    assert strategy.costs.copy_s == pytest.approx(0.25)


@pytest.mark.parametrize("room", [True, False])
def test_without_room_a_write_goes_directly(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = SimpleNamespace()
    packer = SimpleNamespace(block_bytes=8, gather=lambda *_: staged if room else None)
    strategy = PackingStrategy(packer, "auto", Costs(scattered=((1, 1.0),), gather_s=0.0, copy_s=0.1))  # type: ignore[arg-type]
    monkeypatch.setattr("layerpush.transport.packing.strategy.transfer_size", lambda *_: TransferSize(80, 10, 5))
    record = WriteRecord(0, (0, 0), (0, 0), 10, 80, 0.0, 0.0)
    taken = strategy.begin(Write(0, 0, 0, 80, ()), ROUTE, (IDS, IDS), record)
    assert (taken is None) == (not room)
    assert record.plan == ("gathered" if room else "direct")
