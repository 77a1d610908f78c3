"""A CUDA runtime without a device. It gives a test's answers, and notes the calls."""

from __future__ import annotations

import threading
from ctypes import c_int
from typing import Any

from layerpush.transport.cuda import FLUSH_OPTIONS, RDMA_SUPPORTED, WRITES_ORDERING


class FakeRuntime:
    """``cudart`` of a GPU with these attributes of GPUDirect RDMA. ``error`` is the result of every later call."""

    def __init__(self, supported: int = 1, options: int = 1, ordering: int = 0) -> None:
        self._attributes = {RDMA_SUPPORTED: supported, FLUSH_OPTIONS: options, WRITES_ORDERING: ordering}
        self.error = 0
        self.flushes: list[tuple[int, int]] = []
        self.threads: list[str] = []
        self.modes: dict[str, int] = {}
        """By thread: its mode while other threads capture."""
        self.pending = 0
        """The error that the next check of a kernel would find."""

    def cudaDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert device == 0
        _int_of(value).value = self._attributes[attribute]
        return self._ended()

    def cudaDeviceFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        self.flushes.append((target, scope))
        self.threads.append(threading.current_thread().name)
        return self._ended()

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.modes[threading.current_thread().name] = _int_of(mode).value
        return self._ended()

    def cudaGetLastError(self) -> int:
        error, self.pending = self.pending, 0
        return error

    def _ended(self) -> int:
        self.pending = self.error or self.pending
        return self.error


def _int_of(reference: Any) -> c_int:
    found: c_int = reference._obj
    return found
