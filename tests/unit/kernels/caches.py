"""Any cache that the kernels accept, for properties: dtypes, shapes, gaps, order of dimensions, alignment, ids."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.unit.kernels.arena import Guarded, guarded

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
)
LONGEST_RUN = 700  # elements; several tiles of a program from 257 units on


@dataclass(frozen=True)
class Layout:
    """Shape and strides (elements) of a cache ``[num_blocks, ...]``, and bytes from aligned memory to its start."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    def place(self, device: torch.device, seed: int) -> Guarded:
        return guarded(self.shape, self.strides, self.dtype, device, offset=self.offset, seed=seed)


@dataclass(frozen=True)
class Case:
    """Layers of one layout, the ids of some of their blocks, and a caller's choices."""

    layout: Layout
    layers: int
    ids: torch.Tensor
    packed_offset: int
    max_programs: int
    seed: int

    @property
    def bytes(self) -> int:
        return int(self.layers * len(self.ids) * math.prod(self.layout.shape[1:]) * self.layout.dtype.itemsize)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Strides grow from the innermost dimension out, with gaps or without; those within a block come in any order."""
    dtype = draw(st.sampled_from(DTYPES))
    run = draw(st.one_of(st.integers(1, 40), st.sampled_from([16, 64, 256, 257, 512]), st.integers(1, LONGEST_RUN)))
    within = [run, draw(st.integers(1, 4)), draw(st.integers(1, 3))]
    names = ["run", "inner", "outer"]
    blocks = draw(st.integers(1, 7))
    order = [*names, "block"] if draw(st.booleans()) else ["run", "inner", "block", "outer"]  # K and V in halves
    sizes = dict(zip(names, within, strict=True)) | {"block": blocks}
    element = draw(st.sampled_from([1, 1, 1, 2]))  # every second element only: runs of one element
    if element > 1:
        sizes["inner"], sizes["outer"] = 1, draw(st.integers(1, 3))
    strides: dict[str, int] = {}
    reach = element
    for name in order:
        strides[name] = reach + draw(st.sampled_from([0, 0, 1, 8, 16]) if name != "run" else st.just(0))
        reach = strides[name] * sizes[name]
    logical = draw(st.permutations(names))
    shape = (blocks, *(sizes[name] for name in logical))
    offset = draw(st.integers(0, 16)) * dtype.itemsize
    return Layout(shape, (strides["block"], *(strides[name] for name in logical)), dtype, offset)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(layouts())
    ids = draw(st.lists(st.integers(0, layout.shape[0] - 1), unique=True, max_size=layout.shape[0]))
    return Case(
        layout,
        draw(st.integers(1, 3)),
        torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64]))),
        draw(st.one_of(st.just(0), st.integers(0, 17))),
        draw(st.integers(1, 9)),
        draw(st.integers(0, 2**31)),
    )
