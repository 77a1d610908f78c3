"""Fences for devices that compute after the call has returned."""

from __future__ import annotations

from collections import deque

import torch

from layerpush.prefill.step_events import FenceSource


class StreamFence:
    """A pooled device event."""

    def __init__(self, pool: deque[StreamFence], device: torch.device) -> None:
        self._pool = pool
        self._event = torch.Event(device)

    def record(self) -> None:
        self._event.record()

    def passed(self) -> bool:
        return bool(self._event.query())

    def recycle(self) -> None:
        self._pool.append(self)


class FencePool:
    """Records fences on the current stream of ``device``; events are made once and used again."""

    def __init__(self, device: torch.device, size: int = 256) -> None:
        self._device = device
        self._pool: deque[StreamFence] = deque()
        self._pool.extend(StreamFence(self._pool, device) for _ in range(size))

    def record(self) -> StreamFence:
        """Mark this point of the current stream. The thread of ``StepEvents.arm`` and ``layer_saved``."""
        fence = self._pool.popleft() if self._pool else StreamFence(self._pool, self._device)
        fence.record()
        return fence


def fences_for(device: torch.device) -> FenceSource | None:
    """The source of fences for a forward pass on ``device``; None if it computes before it returns."""
    return None if device.type == "cpu" else FencePool(device)
