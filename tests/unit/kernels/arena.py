"""Tensors amid guard bytes: a comparison of the whole memory shows each stray byte of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

GUARD = 256
POISON = 0xFF  # NaN in every floating dtype


def noise(count: int, seed: int) -> torch.Tensor:
    """Random bytes: all bit patterns of every dtype, NaN payloads and negative zeros too."""
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Guarded:
    """A strided tensor in ``memory`` (uint8), ``offset`` bytes after the guard in front."""

    memory: torch.Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype
    offset: int = 0

    @property
    def tensor(self) -> torch.Tensor:
        start = (GUARD + self.offset) // self.dtype.itemsize
        view = torch.empty(0, dtype=self.dtype, device=self.memory.device)
        return view.set_(self.memory.untyped_storage(), start, tuple(self.shape), tuple(self.strides))

    def clone(self) -> Guarded:
        return replace(self, memory=self.memory.clone())


def guarded(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    offset: int = 0,
    seed: int | None = None,
) -> Guarded:
    """A strided tensor between two guards. All memory is noise, or poison without a seed."""
    reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + 1
    count = 2 * GUARD + offset + max(reach, 0) * dtype.itemsize
    count += -count % dtype.itemsize
    memory = torch.full((count,), POISON, dtype=torch.uint8) if seed is None else noise(count, seed)
    return Guarded(memory.to(device), shape, strides, dtype, offset)


def poisoned_bytes(count: int, device: torch.device, offset: int = 0) -> Guarded:
    """A contiguous uint8 tensor of ``count`` poisoned bytes."""
    return guarded((count,), (1,), torch.uint8, device, offset=offset)
