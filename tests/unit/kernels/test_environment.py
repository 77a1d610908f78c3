"""TRITON_INTERPRET=1 in the environment: CPU tensors go through the kernel, for a debugger."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import torch, triton
from layerpush_kernels import gather, gather_blocks
assert not isinstance(gather.copy_blocks, triton.JITFunction)
cache = torch.randn(5, 2, 16, 4, 8, dtype=torch.bfloat16)
ids, part = torch.tensor([4, 1]), cache[..., 1:3, :]
packed = torch.empty(2, 2, 16, 2, 8, dtype=torch.bfloat16)
gather_blocks(part, ids, packed)
assert torch.equal(packed, part[ids])
"""


def test_triton_interpret_runs_the_kernel_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == 0, result.stderr
