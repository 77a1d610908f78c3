"""The learned costs of a WRITE: from the calibration, and from unpacked WRITEs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerpush.core.write import Segment, Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import DescriptorIds, Route, WriteState
from layerpush.transport.link import Link
from layerpush.transport.packing.calibration import Calibration
from layerpush.transport.packing.cost_model import Costs, TransferSize
from layerpush.transport.packing.memory import MAX_PIECES, PIECE_BYTES
from layerpush.transport.packing.running_estimate import FORGOTTEN_S, CopyEstimates, RunningEstimate
from layerpush.transport.packing.runs import runs
from layerpush.transport.packing.strategy import PackingStrategy, _Engine
from tests.unit.builders import layout_of

ENGINE, ROUTE = "decode", Route("D", 0, "pieces", "ring")
WIRE = Costs(scattered=((512, 1e-3), (2048, 2e-3)), wire_s=1e-10, write_s=3e-4)
PIECES = 64


class Clock:
    """Time that passes only when a WRITE is on the wire, or when a test says so."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("calibration", "strategy"):
        monkeypatch.setattr(f"layerpush.transport.packing.{module}.time", clock)
    monkeypatch.setattr("layerpush.transport.packing.calibration.cool", lambda: None)
    return clock


class Wire:
    """Each WRITE takes exactly the time that ``WIRE`` gives."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def post_write(self, route: Route, local: DescriptorIds, remote: DescriptorIds) -> int:
        pieces = runs(local, remote)
        self.clock.now += WIRE.write_s + WIRE.scattered_s(pieces) + len(local) * PIECE_BYTES * WIRE.wire_s
        return 1

    def poll(self, handle: int) -> WriteState:
        return WriteState.LANDED

    def release(self, handle: int) -> None: ...


class OnePacker:
    """Reports the WRITE ``staged`` as unpacked."""

    staged: Any = None

    def unpacked(self, agent: str, number: int, done: bool) -> Any:
        return self.staged


def calibrated(clock: Clock, packer: OnePacker) -> PackingStrategy:
    prior = Costs(gather_s=1e-9, scatter_s=1e-9, messages_s=1e-3, copy_s=5e-4)
    strategy = PackingStrategy(packer, None, "auto", prior)  # type: ignore[arg-type]
    strategy.calibrate(ENGINE, Wire(clock), ROUTE)  # type: ignore[arg-type]
    while strategy.is_busy:
        strategy.turn()
    return strategy


def test_the_calibration_finds_the_constants(clock: Clock) -> None:
    calibration = Calibration(Wire(clock), ROUTE, Costs(copy_s=7.0), clock.now)  # type: ignore[arg-type]
    while not calibration.is_over:
        calibration.turn()
    learned = calibration.costs
    assert learned is not None
    for descriptors in (1, 64, 512, 2048, 4096):
        assert learned.scattered_s(descriptors) == pytest.approx(WIRE.scattered_s(descriptors))
    assert learned.wire_s == pytest.approx(WIRE.wire_s)
    assert learned.write_s == pytest.approx(WIRE.write_s)
    assert learned.copy_s == 7.0


def measured(strategy: PackingStrategy, engine_id: str, costs: Costs) -> None:
    """A calibration of the engine has found ``costs``."""
    engine = strategy._engines[engine_id] = _Engine(SimpleNamespace(), ROUTE, costs)  # type: ignore[arg-type]
    engine.costs, engine.calibration = costs, None


def test_the_writer_may_add_an_engine_while_another_thread_reads_them() -> None:
    """Forces the interleaving: the writer adds an engine while the reader looks at the first one."""
    strategy = PackingStrategy(OnePacker(), None, "auto", Costs())  # type: ignore[arg-type]
    added = SimpleNamespace(calibration=object())

    class First:
        @property
        def calibration(self) -> object:
            strategy._engines["added"] = added  # type: ignore[assignment]
            return object()

    strategy._engines["first"] = First()  # type: ignore[assignment]
    assert strategy.engines_to_measure == {"first"}
    assert strategy.engines_to_measure == {"first", "added"}


@pytest.mark.parametrize(("packing", "looks"), [("auto", False), ("gather", True)])
def test_the_transfer_size_is_computed_only_for_a_forced_plan(
    packing: Any, looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    monkeypatch.setattr(
        "layerpush.transport.packing.strategy.transfer_size", lambda *_: looked.append(1) or TransferSize(0, 0, 0)
    )
    packer, link = SimpleNamespace(block_bytes=8), Link("another", (), ())
    strategy = PackingStrategy(packer, None, packing, Costs(scattered=((1, 1.0),), copy_s=10.0))  # type: ignore[arg-type]
    measured(strategy, "another", strategy.costs_to("another"))
    ids = np.arange(10, dtype=np.int32)
    record = WriteRecord(0, (0, 0), (0, 0), 10, 80, 0.0, 0.0)
    write = Write(0, 0, 0, 80, ())
    assert strategy.begin(write, link, (ids, ids), record) is None
    assert record.plan == "direct"
    assert bool(looked) == looks


@pytest.mark.parametrize(
    ("packing", "plan", "room", "parts"),
    [
        ("packed", "packed", 3000, 2),
        ("packed", "packed", 1999, 1),
        ("gather", "packed", 3000, 1),
        ("auto", "packed", 3000, 2),
        ("auto", "gathered", 3000, 1),
        ("auto", "direct", 3000, 1),
    ],
)
def test_an_oversized_packed_write_is_split(packing: Any, plan: str, room: int, parts: int) -> None:
    """2000 pieces. With a window too small for all of them, the second half would go by another plan."""
    costs = {
        "packed": Costs(scattered=((1, 1.0),), gather_s=0.0, scatter_s=0.0, copy_s=0.1, messages_s=0.1),
        "gathered": Costs(scattered=((1, 1.0),), gather_s=0.0, scatter_s=0.0, copy_s=0.1, messages_s=1e9),
        "direct": Costs(copy_s=1e9),
    }[plan]
    layout = layout_of([0], 4096, PIECE_BYTES)
    strategy = PackingStrategy(SimpleNamespace(block_bytes=PIECE_BYTES), layout, packing, costs)  # type: ignore[arg-type]
    measured(strategy, "D", costs)
    window: Any = SimpleNamespace(offer=SimpleNamespace(size=room * PIECE_BYTES))
    scattered = np.arange(0, 4000, 2, dtype=np.int32)
    remote = np.arange(2000, dtype=np.int32) if plan == "gathered" else scattered
    segment = Segment(slice(0, 1), 0, 0, 2000, tuple(scattered.tolist()), tuple(remote.tolist()))
    write = Write(0, 0, 0, 2000 * PIECE_BYTES, (segment,))
    link = Link("D", (), (), gathered=ROUTE, window=window)
    got = strategy.split(write, link, (scattered, remote))
    assert [len(part.segments[0].source) for part in got] == ([MAX_PIECES, 2000 - MAX_PIECES] if parts == 2 else [2000])


@pytest.mark.parametrize(
    ("blocks", "of", "packs"), [(MAX_PIECES, MAX_PIECES, True), (1024, 1024, False), (9, 10, False)]
)
def test_an_oversized_write_or_one_with_gaps_is_not_packed(blocks: int, of: int, packs: bool) -> None:
    packed: list[int] = []
    packer = SimpleNamespace(block_bytes=PIECE_BYTES, pack=lambda write, window, size, record: packed.append(size))
    ids = np.arange(blocks, dtype=np.int32)
    segment = Segment(slice(0, 1), 0, 0, of, tuple(range(blocks)), tuple(range(blocks)))
    write, record = Write(0, 0, 0, 0, (segment,)), WriteRecord(0, (0, 0), (0, 0), blocks, 0, 0.0, 0.0)
    window: Any = "one that has room"
    PackingStrategy(packer, None, "packed", Costs()).begin(write, Link("D", (), (), window=window), (ids, ids), record)  # type: ignore[arg-type]
    assert packed == ([blocks * PIECE_BYTES] if packs else [])


def unpack_in(strategy: PackingStrategy, packer: OnePacker, clock: Clock, seconds: float, done: bool = True) -> float:
    """The learned time of messages, after a WRITE of ``PIECES`` pieces was unpacked in ``seconds``."""
    packer.staged = SimpleNamespace(asked_at=clock.now, local=range(PIECES))
    clock.now += seconds
    strategy.unpacked("D", 1, done)
    return strategy.costs_to(ENGINE).messages_s


def test_the_message_time_is_learned(clock: Clock) -> None:
    packer = OnePacker()
    strategy = calibrated(clock, packer)
    copied = 5e-4 + PIECES * PIECE_BYTES * 1e-9
    assert unpack_in(strategy, packer, clock, 3e-3 + copied) == 1e-3  # one WRITE may be an accident
    for _ in range(5):
        learned = unpack_in(strategy, packer, clock, 3e-3 + copied)
    assert learned == pytest.approx(3e-3)
    assert unpack_in(strategy, packer, clock, 80e-3) == pytest.approx(3e-3)
    for _ in range(20):
        learned = unpack_in(strategy, packer, clock, 2e-3 + copied)
    assert learned == pytest.approx(2e-3)


def test_refusals_unknown_agents_and_lost_engines_do_not_change_the_costs(clock: Clock) -> None:
    packer = OnePacker()
    strategy = calibrated(clock, packer)
    for _ in range(5):
        assert unpack_in(strategy, packer, clock, 1.0, done=False) == 1e-3
    packer.staged = SimpleNamespace(asked_at=clock.now - 1, local=range(PIECES))
    for _ in range(5):
        strategy.unpacked("another", 1, done=True)
    assert strategy.costs_to(ENGINE).messages_s == 1e-3
    for _ in range(5):
        unpack_in(strategy, packer, clock, 1.0)
    assert strategy.costs_to(ENGINE).messages_s > 0.9
    strategy.forget(ENGINE)
    assert strategy.costs_to(ENGINE).messages_s == 1e-3
    assert unpack_in(strategy, packer, clock, 1.0) == 1e-3


def test_copy_costs_are_learned_from_copies() -> None:
    estimates = CopyEstimates(Costs(copy_s=1e-4, gather_s=1e-10))
    for _ in range(20):
        estimates.copied(16 << 10, 5e-4 + (16 << 10) * 2e-10)
        estimates.copied(16 << 20, 5e-4 + (16 << 20) * 2e-10)
    learned = estimates.applied_to(Costs(messages_s=7.0))
    assert learned.copy_s == pytest.approx(5e-4, rel=0.02)
    assert learned.gather_s == learned.scatter_s == pytest.approx(2e-10, rel=0.02)
    assert learned.messages_s == 7.0
    estimates.copied(16 << 10, 1.0)
    assert estimates.applied_to(Costs()).copy_s == learned.copy_s, "one copy may be an accident"


def test_an_estimate_ignores_two_outliers_and_expires() -> None:
    clock = Clock()
    running = RunningEstimate(1.0, clock.perf_counter)
    for _ in range(2):
        running.add(50.0)
    assert running.value == 1.0
    for _ in range(8):
        running.add(50.0)
    assert running.value == 50.0
    clock.now += FORGOTTEN_S + 1
    assert running.value == 1.0, "a plan that is not chosen gets no new times"


def test_a_gather_updates_the_copy_cost_for_every_engine(clock: Clock) -> None:
    strategy = calibrated(clock, OnePacker())
    record = WriteRecord(0, (0, 0), (0, 0), 1, 100, 0.0, 0.0)
    for _ in range(8):
        strategy.learn(SimpleNamespace(record=record, copy_s=0.25))  # type: ignore[arg-type]
    assert strategy.costs_to(ENGINE).copy_s == pytest.approx(0.25)
    assert strategy.costs_to("another").copy_s == pytest.approx(0.25)


@pytest.mark.parametrize("room", [{"pack", "gather"}, {"gather"}, set()])
def test_without_room_the_next_best_plan_is_taken(room: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    staged = SimpleNamespace(local=np.arange(3))
    packer = SimpleNamespace(
        block_bytes=8,
        pack=lambda *_: staged if "pack" in room else None,
        gather=lambda *_: staged if "gather" in room else None,
    )
    costs = Costs(scattered=((1, 1.0),), gather_s=0.0, scatter_s=0.0, copy_s=0.1, messages_s=0.1)
    strategy = PackingStrategy(packer, None, "auto", costs)  # type: ignore[arg-type]
    measured(strategy, "another", costs)
    monkeypatch.setattr("layerpush.transport.packing.strategy.transfer_size", lambda *_: TransferSize(80, 10, 5))
    ids, link = np.arange(10, dtype=np.int32), Link("another", (), (), gathered=ROUTE, window=SimpleNamespace())  # type: ignore[arg-type]
    record = WriteRecord(0, (0, 0), (0, 0), 10, 80, 0.0, 0.0)
    taken = strategy.begin(Write(0, 0, 0, 80, ()), link, (ids, ids), record)
    assert (taken is None) == (not room)
    assert record.plan == ("packed" if "pack" in room else "gathered" if room else "direct")
