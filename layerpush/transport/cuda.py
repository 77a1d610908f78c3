"""Calls of NVIDIA's CUDA runtime that torch does not offer. On other devices they do nothing."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(f"vllm.{__name__}")

RDMA_SUPPORTED, FLUSH_OPTIONS, WRITES_ORDERING = 116, 117, 118
"""Numbers of ``cudaDeviceAttr``, for GPUDirect RDMA."""
FLUSH_BY_HOST = 1
ORDERED_FOR_OWNER = 100
CURRENT_DEVICE, TO_OWNER = 0, 100
"""The target and the scope of a flush."""
RELAXED = 2
"""The mode of a thread that does not mind the captures of others: ``cudaStreamCaptureModeRelaxed``."""


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed. The text names the call and the error's number."""


def runtime(device: torch.device) -> Any | None:
    """The CUDA runtime that torch uses; None for another device, or if it is not found."""
    version = torch.version.cuda
    if device.type != "cuda" or version is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")
    except OSError as error:
        logger.warning("layerpush cannot call the CUDA runtime: %s", error)
        return None


def rdma_flush(library: Any | None, device: torch.device) -> Callable[[], None]:
    """A call that makes a NIC's earlier writes into the memory of ``device`` visible to its kernels and copies.

    A notification may overtake them on the way into a GPU that does not order them itself. The call takes microseconds.
    It does nothing on a GPU that orders writes, or without GPUDirect RDMA. ``library`` is ``runtime(device)``. A driver
    that does not know GPUDirect RDMA is logged, and nothing is flushed.

    Call the result on a thread whose current device is ``device``. The result raises ``CudaError``.
    """
    if library is None:
        return _nothing
    try:
        if not _attribute(library, RDMA_SUPPORTED, device):
            return _nothing
        if _attribute(library, WRITES_ORDERING, device) >= ORDERED_FOR_OWNER:
            return _nothing
        options = _attribute(library, FLUSH_OPTIONS, device)
    except CudaError as error:
        logger.warning("layerpush does not flush the writes of a NIC into %s: %s", device, error)
        return _nothing
    if not options & FLUSH_BY_HOST:
        logger.warning("%s does not order the writes of a NIC, and its driver cannot flush them", device)
        return _nothing
    logger.info("layerpush flushes the writes of a NIC into %s before it reads them", device)

    def flush() -> None:
        error = library.cudaDeviceFlushGPUDirectRDMAWrites(CURRENT_DEVICE, TO_OWNER)
        _check(library, "cudaDeviceFlushGPUDirectRDMAWrites", error)

    return flush


def allow_captures(library: Any | None) -> None:
    """Let this thread query events while another thread captures a CUDA graph; otherwise such a query is an error that
    ends the capture. ``library`` is ``runtime`` of this thread's device. A failure is logged.
    """
    if library is None:
        return
    mode = ctypes.c_int(RELAXED)
    error = library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        _check(library, "cudaThreadExchangeStreamCaptureMode", error)
    except CudaError as failure:
        logger.warning("layerpush may end the capture of a CUDA graph that begins while it serves: %s", failure)


def _attribute(library: Any, attribute: int, device: torch.device) -> int:
    value = ctypes.c_int()
    error = library.cudaDeviceGetAttribute(ctypes.byref(value), attribute, device.index or 0)
    _check(library, "cudaDeviceGetAttribute", error)
    return value.value


def _check(library: Any, call: str, error: int) -> None:
    if error:
        library.cudaGetLastError()  # else this thread's next check, torch's after a kernel, finds the error of our call
        raise CudaError(f"{call} failed with error {error}")


def _nothing() -> None:
    return
