"""Where a copy runs: torch's operators on the CPU, the kernel in Triton's interpreter, or the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from layerpush_kernels import packing

PLACES = ["host", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
KERNEL_PLACES = PLACES[1:]


@contextmanager
def running_at(place: str) -> Iterator[torch.device]:
    """The device for tensors. The interpreter gets the same kernel source, whether or not TRITON_INTERPRET is set."""
    source = packing.copy_blocks.fn
    if place == "cuda":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    kernel = InterpretedFunction(source) if place == "interpreter" else triton.JITFunction(source)
    with mock.patch.object(packing, "copy_blocks", kernel):
        yield torch.device("cpu")
