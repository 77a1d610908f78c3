"""The cost of gathering for other work of a GPU: matrix products with and without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from bench.bootstrap import Ratio, ratio_of_medians
from layerpush_kernels import gather_blocks

SIDE, PRODUCTS = 8192, 20  # bf16 products of square matrices, in a row
BLOCK_BYTES, BLOCKS = 16384, 8192


@dataclass(frozen=True)
class Contention:
    """Seconds of the products alone and beside gathering, round by round, and GB/s of payload gathered meanwhile."""

    max_programs: int
    alone_s: Sequence[float]
    beside_s: Sequence[float]
    gathered_gb_s: Sequence[float]

    @property
    def slowdown(self) -> Ratio:
        """Median time of the products beside gathering over that alone."""
        return ratio_of_medians(self.beside_s, self.alone_s)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"slowdown": asdict(self.slowdown)}

    def __str__(self) -> str:
        gathered = float(np.median(self.gathered_gb_s))
        return f"{self.max_programs} programs: {gathered:.0f} GB/s, products {self.slowdown.ratio - 1:+.1%} slower"


class Rival:
    """A GPU with large matrix products on one stream and gathering on another. Waits for the device; one thread."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)
        shuffled = torch.randperm(2 * BLOCKS, generator=torch.Generator().manual_seed(seed))
        self.ids = shuffled[:BLOCKS].to(device)
        self.cache = torch.zeros((2 * BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=device)
        self.out = torch.empty((BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=device)
        factors = torch.randn((3, SIDE, SIDE), dtype=torch.bfloat16, device=device)
        self.one, self.other, self.product = factors.unbind()

    def measure(self, max_programs: int, rounds: int) -> Contention:
        """Time the products alone and beside gathering, in turn, ``rounds`` times."""
        self._products(2, max_programs)  # compiles and warms up
        seconds, _ = self._products(0, max_programs)
        took = self._gathering_s(max_programs)
        enough = math.ceil(2 * seconds / took) + 1
        alone, beside = [], []
        for _ in range(rounds):
            alone.append(self._products(0, max_programs)[0])
            beside.append(self._products(enough, max_programs))
        return Contention(max_programs, alone, *(list(each) for each in zip(*beside, strict=True)))

    def _gather(self, max_programs: int) -> None:
        gather_blocks(self.cache, self.ids, self.out, stream=self.side, max_programs=max_programs)

    def _gathering_s(self, max_programs: int) -> float:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(self.side)
        self._gather(max_programs)
        after.record(self.side)
        torch.cuda.synchronize(self.device)
        return float(before.elapsed_time(after)) / 1e3

    def _products(self, gathers: int, max_programs: int) -> tuple[float, float]:
        """Seconds of ``PRODUCTS`` products, and GB/s gathered meanwhile. As many run first, during the launches."""
        start, end, *done = (torch.cuda.Event(enable_timing=True) for _ in range(2 + gathers))
        for turn in range(2 * PRODUCTS):
            if turn == PRODUCTS:
                start.record()
            torch.mm(self.one, self.other, out=self.product)
        end.record()
        self.side.wait_event(start)
        for event in done:
            self._gather(max_programs)
            event.record(self.side)
        torch.cuda.synchronize(self.device)
        took_ms = float(start.elapsed_time(end))
        moved = sum(start.elapsed_time(event) <= took_ms for event in done) * self.out.nbytes
        return took_ms / 1e3, moved / took_ms / 1e6
