"""Packer and unpacker wired together over the fake network, with notifications that are lost, late and doubled."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerpush.core.wire import MAX_PARTS, Part, Registration, Unpack, Unpacked, Window, encode, read
from layerpush.core.write import Segment, Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import PeerLostError, Route, TransportError, WriteState
from layerpush.transport.packing import unpacker
from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.packer import UNPACK_RETRY_S, Packer, PushWindow, Stage, StagedWrite
from layerpush.transport.packing.unpacker import Unpacker, UnpackError, UnpackReply
from layerpush.transport.packing.windows import Windows
from tests.support.fake_transport import Bytes, FakeFabric, Faults
from tests.unit.builders import layout_of, registration
from tests.unit.staging_rig import BrokenCopy, NumpyStaging

LAYERS, BLOCKS, BLOCK_BYTES, PIECES = 3, 16, 1024, 8
SOURCE, TARGET = (7, 2, 9, 4), (3, 8, 1, 6)


def part(**changes: int) -> Part:
    fields = {"first_layer": 0, "end_layer": LAYERS, "group": 0, "first": 0, "end": 4} | changes
    return Part(**fields)


class Pair:
    """A prefill rank that packs and a decode rank that unpacks."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.layout = layout_of([0] * LAYERS, BLOCKS, BLOCK_BYTES)
        self.fabric = FakeFabric(faults)
        self.p, self.d = self.fabric.endpoint("P"), self.fabric.endpoint("D")
        random = np.random.default_rng(7)
        self.p_cache: Bytes = random.integers(0, 256, LAYERS * BLOCKS * BLOCK_BYTES, dtype=np.uint8)
        self.d_cache: Bytes = np.full(LAYERS * BLOCKS * BLOCK_BYTES, 0xEE, np.uint8)
        self.ours = NumpyStaging(self.layout, self.p_cache, PIECES * PIECE_BYTES)
        self.theirs = NumpyStaging(self.layout, self.d_cache, PIECES * PIECE_BYTES)
        pieces = range(0, PIECES * PIECE_BYTES, PIECE_BYTES)
        self.p.describe("pieces", self.ours.memory, pieces, PIECE_BYTES)
        self.p.describe("blocks", self.ours.memory, range(0, PIECES * PIECE_BYTES, BLOCK_BYTES), BLOCK_BYTES)
        self.d.describe("ring", self.theirs.memory, pieces, PIECE_BYTES)
        self.d.describe("kv", self.d_cache, range(0, len(self.d_cache), BLOCK_BYTES), BLOCK_BYTES)
        self.now = 100.0
        self.packer = Packer(self.p, self.layout, self.ours, BLOCK_BYTES, lambda: self.now)
        self.windows = Windows(self.theirs.ring, 4 * PIECE_BYTES)
        self.unpacker = Unpacker(self.theirs, self.windows, self.layout, 0, 0, 0)
        self.registration = registration(TARGET)
        self.refusals: list[str] = []
        self.offered: dict[str, Window] = {}

    def window(self, request_id: str = "d-1") -> PushWindow:
        offer = self.unpacker.offer(request_id)
        assert offer is not None
        self.offered[request_id] = offer
        return PushWindow(offer, Route("D", 0, "pieces", "ring"), request_id)

    def write(self, layers: slice = slice(0, LAYERS), first: int = 0, end: int = 4) -> Write:
        segment = Segment(layers, 0, first, end, SOURCE[first:end], TARGET[first:end])
        return Write(0, 0, 0, (end - first) * BLOCK_BYTES * (layers.stop - layers.start), (segment,))

    def record(self) -> WriteRecord:
        return WriteRecord(0, (0, 0), (0, 0), 0, 0, 0.0, 0.0)

    def pack(self, write: Write | None = None, window: PushWindow | None = None) -> StagedWrite | None:
        write = write or self.write()
        return self.packer.pack(write, window or self.window(), write.size, self.record())

    def packed(self, write: Write | None = None, window: PushWindow | None = None) -> StagedWrite:
        staged = self.pack(write, window)
        assert staged is not None
        return staged

    def until_unpacking(self, staged: StagedWrite) -> None:
        while staged.stage is not Stage.UNPACKING:
            self.prefill_turn(staged)

    def asks(self, *parts: Part, offset: int = 0, number: int = 1, wanted: Registration | None = None) -> None:
        """P reports these blocks as packed; ``offset`` is from the start of the window of "d-1"."""
        start = self.offered["d-1"].offset
        self.unpacker.unpack("P", Unpack("d-1", number, start + offset, parts), wanted or self.registration)

    def decode_turn(self) -> None:
        """Handles messages as a decode rank's loads do."""
        for agent, payload in self.d.notifications():
            message = read(payload)
            assert isinstance(message, Unpack)
            answer = self.unpacker.on_message(agent, message, self.registration)
            if answer.error is not None:
                self.refusals.append(answer.error)
            if answer.message is not None:
                self.d.notify(answer.agent, encode(answer.message))
        for answer in self.unpacker.ended():
            assert answer.message is not None
            self.d.notify(answer.agent, encode(answer.message))

    def prefill_turn(self, staged: StagedWrite) -> WriteState:
        for agent, payload in self.p.notifications():
            message = read(payload)
            assert isinstance(message, Unpacked)
            self.packer.unpacked(agent, message.number, message.done)
        return staged.poll()

    def run(self, staged: StagedWrite, turns: int = 30) -> WriteState:
        for _ in range(turns):
            state = self.prefill_turn(staged)
            if state is not WriteState.PENDING:
                return state
            self.decode_turn()
        return WriteState.PENDING

    def has_landed(self, layers: slice = slice(0, LAYERS)) -> bool:
        ours, theirs = (cache.reshape(LAYERS, BLOCKS, BLOCK_BYTES) for cache in (self.p_cache, self.d_cache))
        return all(
            np.array_equal(ours[layer, source], theirs[layer, target])
            for layer in range(LAYERS)[layers]
            for source, target in zip(SOURCE, TARGET, strict=True)
        )


def test_packed_blocks_land_in_their_target_blocks() -> None:
    pair = Pair()
    staged = pair.packed()
    assert pair.run(staged) is WriteState.LANDED
    assert pair.has_landed()
    others = [block for block in range(BLOCKS) if block not in TARGET]
    assert (pair.d_cache.reshape(LAYERS, BLOCKS, BLOCK_BYTES)[:, others] == 0xEE).all()


def test_a_write_starts_after_its_gather_and_lands_after_its_scatter() -> None:
    pair = Pair()
    pair.ours.looks.append(4)
    pair.theirs.looks.append(3)
    staged = pair.packed()
    for _ in range(3):
        assert pair.prefill_turn(staged) is WriteState.PENDING
        assert not pair.fabric.writes
    pair.until_unpacking(staged)
    for _ in range(3):
        pair.decode_turn()
        assert pair.prefill_turn(staged) is WriteState.PENDING
        assert not pair.has_landed()
    assert pair.run(staged) is WriteState.LANDED
    assert pair.has_landed()


def test_a_write_starts_at_once_after_an_instant_gather() -> None:
    pair = Pair()
    staged = pair.packed()
    assert staged.stage is Stage.WRITING
    assert len(pair.fabric.writes) == 1


def test_the_cost_of_a_copy_is_its_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's kernels and the writer's other work delay it: neither makes another plan faster."""
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr("layerpush.transport.packing.packer.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    pair = Pair()
    pair.ours.looks.append(50)
    pair.ours.device_s = 0.25
    staged = pair.packed()
    for _ in range(50):
        next(clock)
        staged.poll()
    assert staged.stage is not Stage.GATHERING
    assert staged.copy_s == 1.25, "between two looks at this clock a second passes"


def test_a_failed_post_keeps_no_ring_space() -> None:
    pair = Pair()
    window = pair.window()
    pair.fabric.kill("D")
    with pytest.raises(PeerLostError):
        pair.pack(window=window)
    assert len(pair.ours.ring) == len(window.spans) == 0


def test_the_local_ring_is_free_before_the_unpack_ends() -> None:
    pair = Pair()
    staged = pair.packed()
    while staged.stage is not Stage.UNPACKING:
        assert len(pair.ours.ring) == 1
        pair.prefill_turn(staged)
    assert len(pair.ours.ring) == 0
    assert staged.window is not None
    assert len(staged.window.spans) == 1


@pytest.mark.parametrize("full", ["ours", "theirs"])
def test_a_full_ring_refuses_a_write_and_keeps_no_space_for_it(full: str) -> None:
    pair = Pair()
    window = pair.window()
    ring = pair.ours.ring if full == "ours" else window.spans
    assert ring.take(ring.capacity_bytes) == 0
    assert pair.pack(window=window) is None
    assert (len(pair.ours.ring), len(window.spans)) == ((1, 0) if full == "ours" else (0, 1))


def test_windows_do_not_overlap() -> None:
    """The second request writes behind the first one's window."""
    pair = Pair()
    first, second = pair.window("d-1"), pair.window("d-2")
    assert abs(first.offer.offset - second.offer.offset) >= first.offer.size
    assert pair.unpacker.offer("d-3") is None


@pytest.mark.parametrize("faults", [Faults(drop_notifications={0}), Faults(drop_notifications={1})])
def test_a_lost_message_is_sent_again(faults: Faults) -> None:
    """The first notification is the question, the second one the answer."""
    pair = Pair(faults)
    staged = pair.packed()
    assert pair.run(staged) is WriteState.PENDING
    pair.now += UNPACK_RETRY_S
    assert pair.run(staged) is WriteState.LANDED
    assert pair.has_landed()


def test_duplicate_messages_change_nothing() -> None:
    pair = Pair(Faults(duplicate_notifications={0, 1, 2, 3}))
    window = pair.window()
    for layers in (slice(0, 2), slice(2, 3)):
        staged = pair.packed(pair.write(layers), window)
        assert pair.run(staged) is WriteState.LANDED
        staged.release()
    for _ in range(3):
        pair.decode_turn()
        for agent, payload in pair.p.notifications():
            message = read(payload)
            assert isinstance(message, Unpacked)
            pair.packer.unpacked(agent, message.number, message.done)
    assert pair.has_landed()


def test_an_answer_counts_once() -> None:
    pair = Pair()
    staged = pair.packed()
    pair.until_unpacking(staged)
    assert pair.packer.unpacked("P", staged.number, True) is None
    assert pair.packer.unpacked("D", staged.number, True) is staged
    assert pair.packer.unpacked("D", staged.number, False) is None
    assert staged.poll() is WriteState.LANDED


def test_a_window_is_not_reused_during_an_unpack() -> None:
    pair = Pair()
    pair.theirs.looks.append(5)
    staged = pair.packed()
    assert pair.unpacker.offer("d-2") is not None
    pair.until_unpacking(staged)
    pair.decode_turn()
    pair.unpacker.close("d-1")
    assert pair.unpacker.is_unpacking("d-1")
    assert pair.unpacker.offer("d-3") is None
    for _ in range(6):
        pair.decode_turn()
    assert not pair.unpacker.is_unpacking("d-1")
    assert pair.unpacker.offer("d-3") is not None


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (part(end_layer=LAYERS + 1), "layers"),
        (part(first_layer=2, end_layer=2), "layers"),
        (part(first_layer=2, end_layer=1), "layers"),
        (part(group=1), "group"),
        (part(end=5), "blocks"),
        (part(first=4, end=4), "blocks"),
        (part(first=3, end=2), "blocks"),
    ],
)
def test_unregistered_parts_are_not_scattered(bad: Part, why: str) -> None:
    pair = Pair()
    pair.window()
    before = pair.d_cache.copy()
    for parts in ((bad,), (part(end_layer=1), bad)):
        with pytest.raises(UnpackError, match=why):
            pair.asks(*parts)
    assert np.array_equal(pair.d_cache, before)
    assert not pair.unpacker.is_busy


@pytest.mark.parametrize("shift", [-PIECE_BYTES, 3 * PIECE_BYTES, 4 * PIECE_BYTES, 10 * PIECE_BYTES, 1 << 62])
def test_nothing_outside_of_the_window_is_scattered(shift: int) -> None:
    pair = Pair()
    pair.window("d-0")
    pair.window("d-1")
    with pytest.raises(UnpackError, match="window"):
        pair.asks(part(), offset=shift)


def test_parts_with_null_blocks_are_not_scattered() -> None:
    pair = Pair()
    pair.window()
    with pytest.raises(UnpackError, match="not all this request's"):
        pair.asks(part(), wanted=registration((0, *TARGET[1:])))


@pytest.mark.parametrize("shift", [-1, 1, BLOCK_BYTES])
def test_nothing_is_scattered_from_the_middle_of_a_piece(shift: int) -> None:
    """Kernels are fast, or work at all, only from aligned addresses."""
    pair = Pair()
    pair.window()
    with pytest.raises(UnpackError, match="piece"):
        pair.asks(part(end_layer=1, end=1), offset=PIECE_BYTES + shift)


def test_a_closed_window_takes_no_new_unpack() -> None:
    pair = Pair()
    pair.theirs.looks.append(50)
    pair.window()
    pair.asks(part())
    pair.unpacker.close("d-1")
    with pytest.raises(UnpackError, match="window"):
        pair.asks(part(), number=2)


def test_oversized_parts_are_refused_without_much_memory() -> None:
    """The most parts of a message, each with the most blocks of a registration, would not fit into memory."""
    pair = Pair()
    pair.window()
    wanted = registration(range(1, 1 << 16))
    parts = (part(first=1, end=(1 << 16) - 1),) * MAX_PARTS
    tracemalloc.start()
    try:
        with pytest.raises(UnpackError, match="window"):
            pair.asks(*parts, wanted=wanted)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_repeated_message_is_not_refused_during_its_scatter() -> None:
    """The request may be over on D while the same message comes again."""
    pair = Pair()
    pair.theirs.looks.append(2)
    message = Unpack("d-1", 1, pair.window().offer.offset, (part(),))
    pair.unpacker.unpack("P", message, pair.registration)
    assert pair.unpacker.on_message("P", message, None) == UnpackReply("P", None)
    answers = [answer for _ in range(4) for answer in pair.unpacker.ended()]
    assert [answer.message for answer in answers] == [Unpacked(1, True)]
    assert pair.unpacker.on_message("P", message, None) == UnpackReply("P", Unpacked(1, True))


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
def test_a_failed_scatter_is_answered_after_the_other_copies_end(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.theirs.looks.append(3)
    monkeypatch.setattr(pair.theirs, "scatter", fails_second(pair.theirs.scatter, fails))
    pair.window()
    pair.asks(part(end_layer=1), part(first_layer=1))
    pair.unpacker.close("d-1")
    assert [pair.unpacker.ended() for _ in range(3)] == [[], [], []]
    assert len(pair.theirs.ring) == 1
    (answer,) = pair.unpacker.ended()
    assert answer.message == Unpacked(1, False)
    assert len(pair.theirs.ring) == 0


@pytest.mark.parametrize("fails", ["at once", "later"])
def test_a_failed_gather_frees_its_span_after_the_other_copies_end(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.ours.looks.append(3)
    monkeypatch.setattr(pair.ours, "gather", fails_second(pair.ours.gather, fails))
    segments = (*pair.write(slice(0, 1)).segments, *pair.write(slice(1, 3)).segments)
    window = pair.window()
    staged = pair.packed(Write(0, 0, 0, 12 * BLOCK_BYTES, segments), window)
    assert [staged.poll() for _ in range(2)] == [WriteState.PENDING] * 2
    assert len(pair.ours.ring) == 1
    with pytest.raises(TransportError, match="could not be gathered: RuntimeError"):
        staged.poll()
    for _ in range(2):
        staged.release()
    assert len(pair.ours.ring) == len(window.spans) == 0
    assert not pair.fabric.writes


def test_messages_of_one_agent_evict_no_answers_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten number would be scattered again, from bytes of another request."""
    monkeypatch.setattr(unpacker, "ANSWERS_KEPT", 4)
    pair = Pair()
    first = Unpack("d-1", 1, 0, ())
    assert pair.unpacker.on_message("P", first, None) == UnpackReply("P", Unpacked(1, False))
    for number in range(100):
        pair.unpacker.on_message("another", Unpack("d-1", number, 0, ()), None)
    assert pair.unpacker.again("P", first) == UnpackReply("P", Unpacked(1, False))
    assert pair.unpacker.again("another", Unpack("d-1", 0, 0, ())) is None
    assert pair.unpacker.again("another", Unpack("d-1", 99, 0, ())) is not None
