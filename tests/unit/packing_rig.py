"""The writer's rig with staging memory on both sides: a decode rank offers windows and unpacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import msgspec

from layerpush.core.layout import BlockIds
from layerpush.core.wire import Registration, Unpack, Unpacked, encode, read
from layerpush.transport.base import Route, WriteState
from layerpush.transport.link import Link
from layerpush.transport.packing.cost_model import Costs
from layerpush.transport.packing.memory import PIECE_BYTES, Copy
from layerpush.transport.packing.packer import Packer, PushWindow, Stage, StagedWrite
from layerpush.transport.packing.strategy import PackingStrategy
from layerpush.transport.packing.unpacker import Unpacker, UnpackReply
from layerpush.transport.packing.windows import Windows
from tests.support.fake_transport import Faults
from tests.unit.builders import layout_of
from tests.unit.staging_rig import BrokenCopy, NumpyStaging
from tests.unit.writer_rig import BLOCK_BYTES, D_BLOCKS, Decoder, Prompt, Rig

WINDOW_PIECES = 4


class FallibleStaging(NumpyStaging):
    """``fates`` of the next copies: None succeeds, "refused" and "broken" fail."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fates: list[str | None] = []

    def gather(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:  # type: ignore[override]
        return self._fated(lambda: super(FallibleStaging, self).gather(layers, blocks, offset))

    def scatter(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:  # type: ignore[override]
        return self._fated(lambda: super(FallibleStaging, self).scatter(layers, blocks, offset))

    def _fated(self, start: Callable[[], Copy]) -> Copy:
        fate = self.fates.pop(0) if self.fates else None
        if fate == "refused":
            raise RuntimeError("no memory for block ids")
        return BrokenCopy() if fate == "broken" else start()


class UnpackingDecoder(Decoder):
    """One rank, with a ring of ``windows`` windows."""

    def __init__(self, rig: PackingRig, name: str, windows: int) -> None:
        super().__init__(rig, name, 1)
        end, memory, size = self.ends[0], self.memories[0], windows * WINDOW_PIECES * PIECE_BYTES
        layout = layout_of([0] * rig.layers, D_BLOCKS, BLOCK_BYTES)
        self.staging = FallibleStaging(layout, memory, size)
        end.describe("ring", self.staging.memory, range(0, size, PIECE_BYTES), PIECE_BYTES)
        self.windows = Windows(self.staging.ring, WINDOW_PIECES * PIECE_BYTES)
        self.unpacker = Unpacker(self.staging, self.windows, layout, rank=0, ring=0, device=0)
        self.link = replace(self.link, gathered=Route(f"{name}-0", 0, "blocks", "kv"))
        self.awaited: dict[str, Registration] = {}
        self.answers = True
        self._told: list[bytes] = []

    def turn(self) -> None:
        """Handles messages as a decode rank's loads do; ``answers``: whether it answers."""
        end = self.ends[0]
        if not end.alive:
            return
        for sender, payload in end.notifications():
            message = read(payload)
            if not isinstance(message, Unpack):
                self._told.append(payload)
                continue
            self._answer(self.unpacker.on_message(sender, message, self.awaited.get(message.request_id)))
        for answer in self.unpacker.ended():
            self._answer(answer)

    def _answer(self, answer: UnpackReply) -> None:
        if answer.message is not None and self.answers:
            self.ends[0].notify(answer.agent, encode(answer.message))

    def told(self) -> list[list[bytes]]:
        self.turn()
        told, self._told = self._told, []
        return [told]

    def reuse(self, wanted: Registration) -> None:
        super().reuse(wanted)
        self.awaited.pop(wanted.request_id, None)
        self.unpacker.close(wanted.request_id)

    def is_written(self, wanted: Registration) -> bool:
        ids = set(self._ids(wanted))
        pending = [write for write in self.ends[0].fabric.writes if write.state is WriteState.PENDING]
        into = [write for write in pending if write.target is self.ends[0] and write.route.remote_descriptors == "kv"]
        return self.ends[0].alive and any(ids & set(write.remote.tolist()) for write in into)


class PackingRig(Rig):
    """``now`` is the packer's time."""

    def __init__(
        self,
        packing: Literal["auto", "gather", "packed"] = "packed",
        faults: Faults | None = None,
        pieces: int = 8,
        **details: Any,
    ) -> None:
        self.now = 100.0
        self._packing, self._pieces = packing, pieces
        super().__init__(faults, strategy=PackingRig._strategy, **details)

    def _strategy(self: Rig) -> PackingStrategy:
        assert isinstance(self, PackingRig)
        size = self._pieces * PIECE_BYTES
        self.staging = FallibleStaging(self.layout, self.p_memory, size)
        self.p.describe("pieces", self.staging.memory, range(0, size, PIECE_BYTES), PIECE_BYTES)
        self.p.describe("blocks", self.staging.memory, range(0, size, BLOCK_BYTES), BLOCK_BYTES)
        self.packer = Packer(self.p, self.layout, self.staging, BLOCK_BYTES, lambda: self.now)
        self.strategy = PackingStrategy(self.packer, self.layout, self._packing, Costs())
        return self.strategy

    def unpacking(self, name: str = "D", windows: int = 1) -> UnpackingDecoder:
        decoder = self.decoders[name] = UnpackingDecoder(self, name, windows)
        return decoder

    def window(self, link: Link, registration: Registration) -> PushWindow | None:
        if registration.window is None:
            return None
        return PushWindow(
            registration.window, Route(link.routes[0].agent, 0, "pieces", "ring"), registration.request_id
        )

    def asks(self, prompt: Prompt, decoder: Decoder, first: int = 10, wanted: int | None = None) -> Registration:
        asked = super().asks(prompt, decoder, first, wanted)
        assert isinstance(decoder, UnpackingDecoder)
        offer = decoder.unpacker.offer(asked.request_id)
        asked = decoder.awaited[asked.request_id] = msgspec.structs.replace(asked, window=offer)
        return asked

    def hear(self) -> None:
        for agent, payload in self.p.notifications():
            message = read(payload)
            assert isinstance(message, Unpacked)
            self.packer.unpacked(agent, message.number, message.done)

    def round(self) -> None:
        """A turn of the writer and of each decoder."""
        self.hear()
        self.writer.turn()
        for decoder in self.decoders.values():
            assert isinstance(decoder, UnpackingDecoder)
            decoder.turn()

    def settle(self, turns: int = 60) -> None:
        for _ in range(turns):
            self.round()

    def until(self, stage: Stage, turns: int = 60) -> StagedWrite:
        """Turns of the writer alone, until a WRITE is at ``stage``."""
        for _ in range(turns):
            for staged in self.staged:
                if staged.stage is stage:
                    return staged
            self.writer.turn()
        raise AssertionError(f"no WRITE came to {stage}")

    @property
    def staged(self) -> list[StagedWrite]:
        """WRITEs of all pushes that go by way of P's ring."""
        transfers = [transfer for push in self.writer._pushes.values() for transfer in push.transfers]
        return [transfer for transfer in transfers if isinstance(transfer, StagedWrite)]

    def assert_clean(self) -> None:
        super().assert_clean()
        assert len(self.staging.ring) == 0
        assert not self.packer.unpacking

    def assert_unpacked(self, decoder: UnpackingDecoder) -> None:
        assert not decoder.unpacker.is_busy
        assert len(decoder.windows) == len(decoder.staging.ring) == 0
