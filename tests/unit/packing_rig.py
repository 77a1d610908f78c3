"""The writer's rig with staging memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from layerpush.core.layout import BlockIds
from layerpush.transport.base import Route
from layerpush.transport.gather.cost import CopyCost
from layerpush.transport.gather.gatherer import Gatherer, Stage, StagedWrite
from layerpush.transport.gather.memory import Copy
from layerpush.transport.gather.strategy import GatherStrategy
from tests.support.fake_transport import Faults
from tests.unit.staging_rig import BrokenCopy, NumpyStaging
from tests.unit.writer_rig import BLOCK_BYTES, Decoder, Rig


class FallibleStaging(NumpyStaging):
    """``fates`` of the next copies: None succeeds, "refused" and "broken" fail."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fates: list[str | None] = []

    def gather(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:  # type: ignore[override]
        fate = self.fates.pop(0) if self.fates else None
        if fate == "refused":
            raise RuntimeError("no memory for block ids")
        return BrokenCopy() if fate == "broken" else super().gather(layers, blocks, offset)


class PackingRig(Rig):
    """P's ring has room for ``blocks`` blocks."""

    def __init__(
        self,
        packing: Literal["auto", "gather"] = "gather",
        faults: Faults | None = None,
        blocks: int = 4096,
        **details: Any,
    ) -> None:
        self._packing, self._ring_bytes = packing, blocks * BLOCK_BYTES
        super().__init__(faults, strategy=PackingRig._strategy, **details)

    def _strategy(self: Rig) -> GatherStrategy:
        assert isinstance(self, PackingRig)
        self.staging = FallibleStaging(self.layout, self.p_memory, self._ring_bytes)
        self.p.describe("blocks", self.staging.memory, range(0, self._ring_bytes, BLOCK_BYTES), BLOCK_BYTES)
        gatherer = Gatherer(self.p, self.layout, self.staging, BLOCK_BYTES)
        self.strategy = GatherStrategy(gatherer, self._packing, CopyCost(1e-9, 0.0))
        return self.strategy

    def decoder(self, name: str = "D", ranks: int = 1) -> Decoder:
        decoder = super().decoder(name, ranks)
        decoder.link = replace(decoder.link, gathered=Route(f"{name}-0", 0, "blocks", "kv"))
        return decoder

    def until(self, stage: Stage, turns: int = 60) -> StagedWrite:
        """Turns of the writer, until a WRITE is at ``stage``."""
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
