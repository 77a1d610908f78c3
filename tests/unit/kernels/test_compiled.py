"""The kernels, compiled without a GPU: 16 bytes per access wherever alignment allows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from layerpush_kernels import checksums, gather

CAPABILITIES = {"A100": 80, "H100": 90, "B200": 100}
QUICK = {"A100": [True], "H100": [False, True], "B200": [False]}
"""The copies whose machine code `make test` reads: of split blocks, of whole ones."""
TILE = 1024
ACCESSES = 4  # of each thread, per tile

pytestmark = [
    pytest.mark.skipif("nvidia" not in triton.backends.backends, reason="this Triton cannot compile for NVIDIA"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: nothing is compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(*, table: bool, ids: str = "i64", gpu: str = "H100", **constants: object) -> CompiledKernel:
    kernel = gather.copy_blocks
    signature = {each.name: "constexpr" if each.is_constexpr else each.annotation_type for each in kernel.params}
    signature |= {"ids": f"*{ids}", "pointers": "*i64" if table else "constexpr"}
    constants |= {"TILE": TILE} | ({} if table else {"pointers": None})
    return assembled(kernel, signature, constants, gpu, TILE // gather.UNITS_PER_WARP)


def assembled(kernel: Any, signature: Any, constants: dict[str, Any], gpu: str, warps: int) -> CompiledKernel:
    source, target = ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", CAPABILITIES[gpu], 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


def accesses(kernel: CompiledKernel, instruction: str) -> list[int]:
    """Bytes of each global load (``ld``) or store (``st``) in the PTX."""
    found = re.findall(rf"{instruction}\.global\S*?(?:\.v(\d))?\.b(\d+)\b", kernel.asm["ptx"])
    return [int(lanes or 1) * int(bits) // 8 for lanes, bits in found]


def rows(*every: list[Any], quick: Callable[..., bool]) -> list[Any]:
    """All combinations. `make test` runs those for which ``quick`` is true."""
    return [
        pytest.param(*row, marks=() if quick(*row) else pytest.mark.exhaustive) for row in itertools.product(*every)
    ]


@pytest.mark.parametrize(
    ("unit", "split"), rows([16, 8, 4, 2, 1], [False, True], quick=lambda unit, split: unit == 16 or split)
)
def test_every_access_is_one_unit(unit: int, split: bool) -> None:
    kernel = compiled(table=True, SPLIT=split, UNIT=unit)
    assert accesses(kernel, "st") == [unit] * ACCESSES
    id_and_pointer = [8, 8]
    assert sorted(accesses(kernel, "ld")) == sorted([unit] * ACCESSES + id_and_pointer)


@pytest.mark.parametrize("ids", ["i32", "i64"])
def test_a_single_cache_needs_no_pointer(ids: str) -> None:
    kernel = compiled(table=False, ids=ids, SPLIT=False, UNIT=16)
    assert sorted(accesses(kernel, "ld")) == [int(ids[1:]) // 8] + [16] * ACCESSES


@pytest.mark.parametrize(
    ("gpu", "split"), rows(list(CAPABILITIES), [False, True], quick=lambda gpu, split: split in QUICK[gpu])
)
def test_all_loads_of_a_tile_are_in_flight_together(split: bool, gpu: str) -> None:
    """In the machine code too: four loads of 128 bits, then four stores, nothing spilled, no shared memory."""
    kernel = compiled(table=True, gpu=gpu, SPLIT=split, UNIT=16)
    assert f"sm_{CAPABILITIES[gpu]}" in kernel.asm["ptx"]
    assert kernel.metadata.shared == 0
    found = re.findall(r"\b(?:LDG|STG|LDL|STL)\b\S*", kernel.asm["sass"])
    wide = [each[:3] for each in found if "128" in each]
    assert wide == ["LDG"] * ACCESSES + ["STG"] * ACCESSES
    assert not [each for each in found if each.startswith(("LDL", "STL"))]


@pytest.mark.parametrize(("gpu", "unit"), rows(list(CAPABILITIES), [16, 4, 1], quick=lambda _, unit: unit == 16))
def test_a_checksum_loads_one_unit_at_a_time(unit: int, gpu: str) -> None:
    """And keeps its sums in registers until the end of a part."""
    kernel = checksums.sum_parts
    signature = {each.name: "constexpr" if each.is_constexpr else each.annotation_type for each in kernel.params}
    signature |= {"parts": "*i32", "out": "*i64"}
    made = assembled(kernel, signature, {"UNIT": unit, "TILE": checksums.TILE}, gpu, checksums.WARPS)
    assert f"sm_{CAPABILITIES[gpu]}" in made.asm["ptx"]
    block_first_and_tokens = [4, 4, 4]
    assert sorted(accesses(made, "ld")) == sorted([unit] * ACCESSES + block_first_and_tokens)
    assert not re.findall(r"\b(?:LDL|STL)\b", made.asm["sass"])
