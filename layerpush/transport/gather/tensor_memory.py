"""Staging memory for a KV cache of tensors, on a CPU or a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from layerpush.core.layout import BlockIds, CacheLayout, LayoutError
from layerpush.transport.gather.memory import Copy, cool
from layerpush.transport.gather.ring import Ring
from layerpush_kernels import LayerTable, gather_blocks, layer_table

ALIGNED_BYTES = 8192
MAX_PROGRAMS = 64
"""Limits a copy to a part of a GPU's multiprocessors: prefill and decode need the others."""
RATE_BYTES = 4 << 20
RATE_TRIES = 5


def staging_memory(size: int, device: torch.device) -> torch.Tensor:
    """``uint8 [size]``, aligned to ``ALIGNED_BYTES``, with resident pages. Raises ``torch.OutOfMemoryError``."""
    memory = torch.zeros(size + ALIGNED_BYTES, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % ALIGNED_BYTES :][:size]


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies of its own, above the model's: a WRITE waits for a copy, and a copy must not wait behind the
    model's kernels. None for a device that computes before its calls return.
    """
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None


class TensorStaging:
    """A `Staging`. ``slots`` are the cache's regions in descriptor order, each ``uint8 [blocks, block_bytes]``.

    ``memory`` comes from ``staging_memory``. Raises ``LayoutError`` if regions differ in shape, or if it is too small.
    """

    def __init__(self, layout: CacheLayout, slots: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        order = [slot for layer in layout.layers for slot in layer.slots]
        if len({(slots[slot].shape, slots[slot].stride()) for slot in order}) > 1:
            raise LayoutError("the regions of the KV cache differ in the size or the number of their blocks")
        if memory.numel() < 2 * slots[order[0]].shape[1]:
            raise LayoutError(f"staging memory of {memory.numel()} bytes has no room for two blocks")
        device = slots[order[0]].device
        self._memory = memory
        self.ring = Ring(memory.numel())
        self.block_bytes: int = slots[order[0]].shape[1]
        """Bytes of a kernel block, the same in every region."""
        self.base: int = memory.data_ptr()
        """The address of the ring."""
        self._table: LayerTable = layer_table([slots[slot] for slot in order])
        ends = np.cumsum([0, *(len(layer.slots) for layer in layout.layers)]).tolist()
        self._rows = [slice(start, end) for start, end in pairwise(ends)]
        self._stream = copy_stream(device)
        self._ids = BlockIdBuffer(memory.numel() // self.block_bytes, device)

    def gather(self, layers: slice, blocks: BlockIds, offset: int) -> Copy:
        table, ids, packed = self._operands(layers, blocks, offset)
        begun = self._event()
        gather_blocks(table, ids, packed, stream=self._stream, max_programs=MAX_PROGRAMS)
        return self._started(begun)

    def copy_costs(self) -> tuple[float, float]:
        """Measure the cost of a copy between cache and ring: seconds for any size, and seconds per byte.

        It gathers scattered blocks that are in no processor cache, as they will be in operation. The KV cache does not
        change.
        """
        count = max(2, min(self.ring.capacity_bytes, RATE_BYTES) // self.block_bytes)
        blocks = np.random.default_rng(0).permutation(self._table.geometry.num_blocks).astype(np.int32)
        tries = np.resize(blocks, (RATE_TRIES, count))
        single = min(self._seconds(turn, ids[:1]) for turn, ids in enumerate(tries))
        many = min(self._seconds(turn, ids[1:]) for turn, ids in enumerate(tries))
        byte_s = max(many - single, 0.0) / max(count - 2, 1) / self.block_bytes
        return max(single - self.block_bytes * byte_s, 0.0), byte_s

    def _seconds(self, turn: int, ids: BlockIds) -> float:
        """Time a gather of these blocks; each turn writes to another place of the ring."""
        wanted, size = torch.from_numpy(ids).to(self._table.device), len(ids) * self.block_bytes
        offset = turn % max(1, self.ring.capacity_bytes // size) * size
        packed = self._memory[offset : offset + size]
        cool()
        start, begun = time.perf_counter(), self._event()
        gather_blocks(self._table[0:1], wanted, packed, stream=self._stream, max_programs=MAX_PROGRAMS)
        copy = self._started(begun)
        while not copy.is_over():
            time.sleep(0)
        return time.perf_counter() - start

    def _operands(self, layers: slice, blocks: BlockIds, offset: int) -> tuple[LayerTable, torch.Tensor, torch.Tensor]:
        rows = slice(self._rows[layers.start].start, self._rows[layers.stop - 1].stop)
        table = self._table[rows]
        packed = self._memory[offset:][: len(table) * len(blocks) * self.block_bytes]
        # A copy holds its span of the ring until it is over, so the span's place in the buffer is free as well.
        return table, self._ids.put(blocks, offset // self.block_bytes, self._stream), packed

    def _event(self) -> torch.cuda.Event | None:
        """An event at the end of our stream, with its time; None on a CPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _started(self, begun: torch.cuda.Event | None) -> Copy:
        ended = self._event()
        return _FinishedCopy() if begun is None or ended is None else _StreamCopy(begun, ended)


class BlockIdBuffer:
    """Memory for the block ids of copies, on the host and on ``device``, made once: a copy allocates nothing.

    It holds ``size`` ids. Raises ``RuntimeError`` or ``torch.OutOfMemoryError`` if there is no memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=not on_host)
        self._device = self._host if on_host else torch.empty(size, dtype=torch.int32, device=device)

    def put(self, ids: BlockIds, at: int, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Copy ids into the buffer from place ``at`` on. Returns them on the device, once ``stream`` has come so far.

        They must stay until the copy that reads them is over.
        """
        place = slice(at, at + len(ids))
        self._host[place].numpy()[:] = ids
        if stream is not None:
            with torch.cuda.stream(stream):
                self._device[place].copy_(self._host[place], non_blocking=True)
        return self._device[place]


class _FinishedCopy:
    def is_over(self) -> bool:
        return True

    def device_s(self) -> float:
        return 0.0


class _StreamCopy:
    """A copy on a stream, between two events. The first passes when all earlier copies are over."""

    def __init__(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._begun = begun
        self._ended = ended

    def is_over(self) -> bool:
        return bool(self._ended.query())

    def device_s(self) -> float:
        return float(self._begun.elapsed_time(self._ended)) / 1e3
