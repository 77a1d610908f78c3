"""Where a kernel runs: in Triton's interpreter or on a GPU. A copy also runs in torch's operators on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from layerpush_kernels import checksums, gather

PLACES = ["host", "interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
KERNEL_PLACES = PLACES[1:]


class Interpreted(interpreter.InterpretedFunction):
    """Triton leaves its language patched after a call by another kernel, and could compile nothing in this process."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scope = interpreter._patch_lang(self.fn)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            scope.restore()


@contextmanager
def running_at(place: str) -> Iterator[torch.device]:
    """The device for tensors. The interpreter gets the same kernel source, whether or not TRITON_INTERPRET is set."""
    if place == "cuda":
        yield torch.device("cuda", torch.cuda.current_device())
        return
    make = Interpreted if place == "interpreter" else triton.JITFunction
    kernels = ((gather, "copy_blocks"), (checksums, "sum_parts"), (tl, "sum"))
    with ExitStack() as stack:
        for module, name in kernels:
            stack.enter_context(mock.patch.object(module, name, make(getattr(module, name).fn)))
        yield torch.device("cpu")
