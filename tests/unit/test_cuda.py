"""Calls of the CUDA runtime, on a runtime without a device."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from layerpush.transport.cuda import CudaError, allow_captures, rdma_flush, runtime
from tests.support.cudart import FakeRuntime

GPU = torch.device("cuda", 0)
OWNER, TO_OWNER, ALL_DEVICES = 100, 100, 200
RELAXED = 2


def test_a_cpu_has_no_cuda_runtime() -> None:
    assert runtime(torch.device("cpu")) is None
    rdma_flush(None, torch.device("cpu"))()


def test_a_missing_cuda_runtime_is_logged_and_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    assert runtime(GPU) is None
    assert "libcudart.so.0" in caplog.text


def test_writes_into_a_gpu_without_write_ordering_are_flushed() -> None:
    library = FakeRuntime(ordering=OWNER - 1)
    flush = rdma_flush(library, GPU)
    assert library.flushes == []
    flush()
    flush()
    assert library.flushes == [(0, TO_OWNER)] * 2


@pytest.mark.parametrize(
    "library",
    [FakeRuntime(ordering=OWNER), FakeRuntime(ordering=ALL_DEVICES), FakeRuntime(supported=0), FakeRuntime(options=2)],
    ids=["ordered for its owner", "ordered for all", "no GPUDirect RDMA", "no flush by the host"],
)
def test_writes_are_not_flushed_if_it_is_needless_or_impossible(
    library: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rdma_flush(library, GPU)()
    assert library.flushes == []
    assert bool(caplog.records) == (library._attributes[117] == 2), "the log names a GPU that may be read too early"


def test_a_flush_that_fails_is_an_error() -> None:
    library = FakeRuntime()
    flush = rdma_flush(library, GPU)
    library.error = 700
    with pytest.raises(CudaError, match="cudaDeviceFlushGPUDirectRDMAWrites failed with error 700"):
        flush()
    assert library.pending == 0, "torch would find it after its next kernel"


def test_nothing_is_flushed_if_the_driver_does_not_know_the_attributes(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeRuntime()
    library.error = 1
    rdma_flush(library, GPU)()
    assert library.flushes == []
    assert "does not flush the writes of a NIC into cuda:0: cudaDeviceGetAttribute failed with error 1" in caplog.text
    assert library.pending == 0


def test_a_thread_allows_captures_for_itself_only() -> None:
    library = FakeRuntime()
    allow_captures(None)
    with ThreadPoolExecutor(1, "writer") as other:
        other.submit(allow_captures, library).result()
    assert library.modes == {"writer_0": RELAXED}


def test_a_failure_to_set_the_capture_mode_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeRuntime()
    library.error = 1
    allow_captures(library)
    assert "cudaThreadExchangeStreamCaptureMode failed with error 1" in caplog.text
    assert library.pending == 0
