"""Loads of a rank that unpacks: windows go out with registrations, and come back when the requests are over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from layerpush.core.liveness import ReportGone
from layerpush.core.wire import Accepted, Cancelled, Completion, Fail, Part, Registration, Unpack, Unpacked, WireError
from layerpush.transport.connections import Address
from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.unpacker import Unpacker
from layerpush.transport.packing.windows import Windows
from tests.unit.builders import layout_of
from tests.unit.staging_rig import NumpyStaging
from tests.unit.test_loads import EXTRA, P, World, registration

BLOCKS, BLOCK_BYTES = 8, 64
DONE = Completion("r", 1)


class Unpacking(World):
    """Room for two windows. Blocks 1 and 2 of one layer are registered."""

    def __init__(self, ranks: int = 1, windows: int = 2) -> None:
        layout = layout_of([0], BLOCKS, BLOCK_BYTES)
        self.cache = np.zeros(BLOCKS * BLOCK_BYTES, np.uint8)
        self.staging = NumpyStaging(layout, self.cache, windows * PIECE_BYTES)
        self.windows = Windows(self.staging.ring, PIECE_BYTES)
        self.unpacker = Unpacker(self.staging, self.windows, layout, rank=0, ring=0, device=0)
        super().__init__(ranks, unpacking=self.unpacker)

    def packed(self, number: int = 1, request_id: str = "r", end: int = 2) -> Unpack:
        """P's message after it has filled the request's window."""
        window = self.windows._windows.get(request_id)
        offset = 0 if window is None else window.offset
        self.staging.memory[offset : offset + 2 * BLOCK_BYTES] = number
        return Unpack(request_id, number, offset, (Part(0, 1, 0, 0, end),))

    def answers(self) -> list[Unpacked]:
        return [message for _, message in self.sent() if isinstance(message, Unpacked)]

    def unpacks(self, message: Unpack, agent: str = "p-0") -> None:
        self.receives(message, agent)
        self.tick()

    @property
    def unpacked(self) -> list[int]:
        """The number that each block was last filled with."""
        return [int(block[0]) for block in self.cache.reshape(BLOCKS, BLOCK_BYTES)]


def test_a_registration_carries_a_window() -> None:
    world = Unpacking()
    world.awaits()
    world.awaits("s")
    world.awaits("t")
    asked = [message for _, message in world.sent() if isinstance(message, Registration)]
    assert [message.window is None for message in asked] == [False, False, True]
    offers = [message.window for message in asked if message.window is not None]
    assert [(offer.offset, offer.size) for offer in offers] == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES)]


@pytest.mark.parametrize("odd", [{"tp_size": 2}, {"pp_size": 2}])
def test_ranks_with_other_parts_of_a_block_get_no_window(odd: dict[str, int]) -> None:
    world = Unpacking()
    address = Address("P", "10.0.0.5", 5600, **{"tp_size": 1, **odd}, notify_only=True)
    world.loads.register(registration(), address, EXTRA, world.now)
    assert len(world.windows) == 0


def _gone(world: Unpacking) -> None:
    world.orders(ReportGone("P", "p-0", "it has ended"))


def _refused(world: Unpacking) -> None:
    world.loads.abort("r", "aborted", world.now)
    world.hears(Cancelled("r"))


ENDINGS: dict[str, Callable[[Unpacking], None]] = {
    "completed": lambda world: world.hears(DONE),
    "failed": lambda world: world.hears(Fail("r", 0, "it broke", True)),
    "cancelled": _refused,
    "gone": _gone,
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("speaks", [True, False], ids=["layerpush", "stock"])
def test_a_window_is_freed_at_the_end_of_the_request(ending: str, speaks: bool) -> None:
    world = Unpacking()
    world.awaiting(*["p-0"] * speaks)
    assert len(world.windows) == 1
    ENDINGS[ending](world)
    world.tick()
    assert len(world.windows) == len(world.staging.ring) == 0
    assert world.is_over()


def test_a_window_is_freed_if_the_prefill_engine_is_unreachable() -> None:
    world = Unpacking()
    world.network.broken = ConnectionError("refused")
    world.awaits()
    for _ in range(8):
        world.tick(1.0)
    assert world.told == ["failed"]
    assert len(world.windows) == 0


def test_a_window_is_freed_if_the_registration_cannot_be_sent() -> None:
    world = Unpacking()
    with pytest.raises(WireError):
        world.loads.register(registration(blocks=(1, 1)), P, EXTRA, world.now)
    assert len(world.windows) == len(world.staging.ring) == 0


def test_a_window_is_kept_while_a_prefill_rank_may_write() -> None:
    world = Unpacking()
    world.awaiting("p-0")
    world.loads.time_out("r", "late", world.now)
    world.tick(1000.0)
    world.tick()
    assert world.told == ["parked", "failed"]
    assert len(world.windows) == 1
    world.hears(Cancelled("r"))
    assert world.told == ["parked", "failed", "cleared"]
    assert len(world.windows) == 0


def test_an_unpack_message_scatters_the_blocks_and_gets_an_answer() -> None:
    world = Unpacking()
    world.awaiting("p-0")
    world.unpacks(world.packed(7))
    assert world.unpacked == [0, 7, 7, 0, 0, 0, 0, 0]
    assert world.answers() == [Unpacked(7, True)]


def test_an_unpack_message_for_an_unknown_request_is_refused_at_once() -> None:
    world = Unpacking()
    world.awaiting("p-0")
    world.unpacks(world.packed(7, request_id="unknown"))
    assert set(world.unpacked) == {0}
    assert world.answers() == [Unpacked(7, False)]


def test_blocks_that_the_device_may_not_see_are_not_scattered() -> None:
    world = Unpacking()
    world.awaiting()
    message = world.packed()
    world.loads.on_invisible("p-0", message, b"", "no flush", world.now)
    world.tick()
    assert world.answers() == [Unpacked(1, done=False)]
    assert not any(world.unpacked)


def test_an_unpack_message_from_an_unknown_agent_is_ignored() -> None:
    world = Unpacking()
    world.awaiting("p-0")
    world.unpacks(world.packed(7), "somebody")
    assert set(world.unpacked) == {0}
    assert world.answers() == []


def test_a_packing_error_is_counted() -> None:
    world = Unpacking()
    world.awaiting("p-0")
    world.unpacks(world.packed(7, end=3))
    assert world.answers() == [Unpacked(7, False)]
    assert world.peer_errors.counts == {"unpack": 1}


def test_an_unpack_message_after_the_failure_of_its_rank_is_refused() -> None:
    """An unpack message comes late or twice, while another rank still writes."""
    world = Unpacking(ranks=2)
    world.loads.register(registration(), P, EXTRA, world.now)
    world.settle()
    world.hears(Accepted("r"), "p-0")
    message = world.packed(7)
    world.hears(Fail("r", 0, "it broke", True), "p-0")
    world.unpacks(message)
    assert set(world.unpacked) == {0}
    assert Unpacked(7, False) in world.answers()


def test_the_outcome_waits_for_the_end_of_the_scatter() -> None:
    world = Unpacking()
    world.awaiting("p-0")
    world.staging.looks.append(3)
    world.unpacks(world.packed(7))
    _gone(world)
    assert world.told == []
    assert world.loads.is_waiting
    assert len(world.windows) == 1
    for _ in range(4):
        world.tick()
    assert world.told == ["failed"]
    assert world.unpacked[1:3] == [7, 7]
    assert len(world.windows) == 0
    assert world.is_over()


def test_parked_blocks_are_cleared_after_the_scatter() -> None:
    world = Unpacking()
    world.awaiting("p-0")
    world.loads.time_out("r", "late", world.now)
    world.tick(1000.0)
    world.tick()
    assert world.told == ["parked", "failed"]
    world.staging.looks.append(3)
    world.unpacks(world.packed(7))
    world.hears(Cancelled("r"))
    assert world.told == ["parked", "failed"]
    for _ in range(4):
        world.tick()
    assert world.told == ["parked", "failed", "cleared"]


def test_an_unpack_message_during_the_handshake_is_kept() -> None:
    world = Unpacking()
    world.engine.known.add("r")
    world.loads.register(registration(), P, EXTRA, world.now)
    world.receives(world.packed(7), "p-0")
    assert set(world.unpacked) == {0}
    world.tick()
    world.tick()
    assert world.unpacked[1:3] == [7, 7]


def test_an_unpack_message_whose_scatter_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An early message behind the scatter is still handled."""
    world = Unpacking()
    world.engine.known.add("r")

    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(world.staging, "scatter", broken)
    world.loads.register(registration(), P, EXTRA, world.now)
    world.receives(world.packed(7), "p-0")
    world.receives(Fail("r", 0, "it broke", True), "p-0")
    world.tick()
    world.tick()
    assert world.answers() == [Unpacked(7, False)]
    assert world.told == ["failed"]
    assert len(world.windows) == 0
