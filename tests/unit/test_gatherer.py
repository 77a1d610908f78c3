"""The gatherer over the fake network."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerpush.core.write import Segment, Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import PeerLostError, Route, TransportError, WriteState
from layerpush.transport.gather.gatherer import Gatherer, Stage, StagedWrite
from tests.support.fake_transport import Bytes, FakeFabric, Faults
from tests.support.numpy_staging import BrokenCopy, NumpyStaging
from tests.unit.builders import layout_of

LAYERS, BLOCKS, BLOCK_BYTES, RING = 3, 16, 1024, 64 << 10
SOURCE, TARGET = (7, 2, 9, 4), (3, 8, 1, 6)


class Pair:
    """A prefill rank that gathers, and the cache of a decode rank."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.layout = layout_of([0] * LAYERS, BLOCKS, BLOCK_BYTES)
        self.fabric = FakeFabric(faults)
        self.p, self.d = self.fabric.endpoint("P"), self.fabric.endpoint("D")
        random = np.random.default_rng(7)
        self.p_cache: Bytes = random.integers(0, 256, LAYERS * BLOCKS * BLOCK_BYTES, dtype=np.uint8)
        self.d_cache: Bytes = np.full(LAYERS * BLOCKS * BLOCK_BYTES, 0xEE, np.uint8)
        self.staging = NumpyStaging(self.layout, self.p_cache, RING)
        self.p.describe("blocks", self.staging.memory, range(0, RING, BLOCK_BYTES), BLOCK_BYTES)
        self.d.describe("kv", self.d_cache, range(0, len(self.d_cache), BLOCK_BYTES), BLOCK_BYTES)
        self.gatherer = Gatherer(self.p, self.layout, self.staging, BLOCK_BYTES)

    def gather(self, *cuts: slice) -> StagedWrite | None:
        """A WRITE with a segment for each of these cuts of the layers."""
        segments = tuple(Segment(layers, 0, 0, len(SOURCE), SOURCE, TARGET) for layers in cuts or (slice(0, LAYERS),))
        remote = [
            layer * BLOCKS + block for part in segments for layer in range(LAYERS)[part.layers] for block in TARGET
        ]
        write = Write(0, 0, 0, len(remote) * BLOCK_BYTES, segments)
        record = WriteRecord(0, (0, 0), (0, 0), 0, 0, 0.0, 0.0)
        return self.gatherer.gather(write, Route("D", 0, "blocks", "kv"), np.asarray(remote, np.int32), record)

    def gathered(self, *cuts: slice) -> StagedWrite:
        staged = self.gather(*cuts)
        assert staged is not None
        return staged

    def has_landed(self) -> bool:
        ours, theirs = (cache.reshape(LAYERS, BLOCKS, BLOCK_BYTES) for cache in (self.p_cache, self.d_cache))
        return bool((ours[:, SOURCE] == theirs[:, TARGET]).all())


def test_gathered_blocks_land_in_their_target_blocks() -> None:
    pair = Pair()
    staged = pair.gathered(slice(0, 1), slice(1, 3))
    while staged.poll() is WriteState.PENDING:
        assert len(pair.staging.ring) == 1
    assert pair.has_landed()
    assert len(pair.staging.ring) == 0
    others = [block for block in range(BLOCKS) if block not in TARGET]
    assert (pair.d_cache.reshape(LAYERS, BLOCKS, BLOCK_BYTES)[:, others] == 0xEE).all()


def test_a_write_starts_after_its_gather() -> None:
    pair = Pair()
    pair.staging.looks.append(4)
    staged = pair.gathered()
    for _ in range(3):
        assert staged.poll() is WriteState.PENDING
        assert not pair.fabric.writes
    while staged.poll() is WriteState.PENDING:
        assert pair.fabric.writes
    assert pair.has_landed()


def test_a_write_starts_at_once_after_an_instant_gather() -> None:
    pair = Pair()
    assert pair.gathered().stage is Stage.WRITING
    assert len(pair.fabric.writes) == 1


def test_the_cost_of_a_copy_is_its_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's kernels and the writer's other work delay it: neither makes another plan faster."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr("layerpush.transport.gather.gatherer.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    pair = Pair()
    pair.staging.looks.append(50)
    pair.staging.device_s = 0.25
    staged = pair.gathered()
    for _ in range(50):
        next(clock)
        staged.poll()
    assert staged.stage is not Stage.GATHERING
    assert staged.copy_s == 1.25, "between two looks at this clock a second passes"


def test_a_failed_post_keeps_no_ring_space() -> None:
    pair = Pair()
    pair.fabric.kill("D")
    with pytest.raises(PeerLostError):
        pair.gather()
    assert len(pair.staging.ring) == 0


def test_a_full_ring_refuses_a_write() -> None:
    pair = Pair()
    assert pair.staging.ring.allocate(pair.staging.ring.capacity_bytes) == 0
    assert pair.gather() is None
    assert len(pair.staging.ring) == 1


def fails_second(copy: Callable[..., Any], how: str) -> Callable[..., Any]:
    """The second copy fails: at once, or later."""
    calls = itertools.count()

    def failing(*args: Any) -> Any:
        if not next(calls):
            return copy(*args)
        if how == "at once":
            raise RuntimeError("no memory")
        return BrokenCopy()

    return failing


@pytest.mark.parametrize("fails", ["at once", "later"])
def test_a_failed_gather_frees_its_span_after_the_other_copies_end(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.staging.looks.append(3)
    monkeypatch.setattr(pair.staging, "gather", fails_second(pair.staging.gather, fails))
    staged = pair.gathered(slice(0, 1), slice(1, 3))
    assert [staged.poll() for _ in range(2)] == [WriteState.PENDING] * 2
    assert len(pair.staging.ring) == 1
    with pytest.raises(TransportError, match="could not be gathered: RuntimeError"):
        staged.poll()
    for _ in range(2):
        staged.release()
    assert len(pair.staging.ring) == 0
    assert not pair.fabric.writes
