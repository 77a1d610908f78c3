"""A synthetic forward: layers of real matrix products that leave KV in the cache, with the connector's hooks."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from bench.forward.draws import Draw
from bench.forward.end import Cache, settle
from bench.forward.kv import Noise

SIDE = {"cpu": 256, "cuda": 4096}
"""Side of the square matrices. A product takes less than a millisecond, as an operation of a model does."""
ATTENTION_SHARE = 1 / 3
"""Share of a layer's products before its KV is reported as ready. The others are its MLP."""
TRIES = 5


class Products:
    """Matrix products that take ``layer_s`` seconds a layer on this device."""

    def __init__(self, layer_s: float, device: torch.device) -> None:
        side = SIDE[device.type]
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        generator = torch.Generator(device).manual_seed(0)
        self._one, self._other = (
            torch.randn(side, side, generator=generator, device=device, dtype=dtype) for _ in range(2)
        )
        self._out = torch.empty_like(self._one)
        self._device = device
        self.count = max(2, round(layer_s / self._seconds()))
        self.before_hook = max(1, round(ATTENTION_SHARE * self.count))

    def attention(self) -> None:
        """The products of a layer before its hook."""
        self._multiply(self.before_hook)

    def mlp(self) -> None:
        """The products of a layer after its hook."""
        self._multiply(self.count - self.before_hook)

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._one, self._other, out=self._out)

    def _seconds(self) -> float:
        """Seconds of one warm product. The fastest try counts, because disturbances only make it slower."""
        tries = []
        for _ in range(TRIES + 1):
            start = time.perf_counter()
            self._multiply(20)
            settle(self._device)
            tries.append((time.perf_counter() - start) / 20)
        return min(tries[1:])


class Mark:
    """A place in the work of the device. A device that computes before its calls return is there at once."""

    def __init__(self, device: torch.device) -> None:
        self._event = _recorded() if device.type == "cuda" else None
        self._at = time.perf_counter()

    def reached(self) -> float:
        """The clock's time when the device came here. Waits for its work."""
        if self._event is None:
            return self._at
        now = _recorded()
        now.synchronize()
        return time.perf_counter() - float(self._event.elapsed_time(now)) / 1e3


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Prompts:
    """Writes the KV of all requests of a case into P's cache, step by step."""

    def __init__(self, cache: Cache, draws: Sequence[Draw], noise: Noise) -> None:
        self._slots = [slot.view(torch.int64) for slot in cache.slots]
        self._block_bytes = cache.slots[0].shape[1]
        self._noise = noise
        self._device = cache.slots[0].device
        self._sources = [torch.tensor(draw.sources, dtype=torch.int64) for draw in draws]

    def place(self, first: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """For blocks ``[first, end)`` of each request: the first one's index in a layer's KV, and all their ids."""
        return [(index * len(ids) + first, ids[first:end].to(self._device)) for index, ids in enumerate(self._sources)]

    def store(self, turn: int, layer: int, places: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Write a layer's KV as attention does: one operation for each request's blocks."""
        size = self._block_bytes
        whole = self._noise.layer(turn, layer, size * sum(map(len, self._sources)))
        for first, ids in places:
            rows = whole[first * size : (first + len(ids)) * size].view(torch.int64).view(len(ids), -1)
            self._slots[layer].index_copy_(0, ids, rows)
