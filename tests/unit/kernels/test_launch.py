"""The launch of the kernel: once, with as many programs as the caller allows, on its stream, with no wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from layerpush_kernels import FULL_DEVICE_PROGRAMS, checksums, gather, gather_blocks, layer_table
from layerpush_kernels.layers import single_layer
from tests.unit.kernels.places import running_at

BLOCK = 48 * 1024  # bytes; three tiles


class Launches:
    """Stands in for the kernel: keeps the launch arguments, and copies nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.arguments: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Launches:
        self.grids.append(grid)
        return self

    def __call__(self, *values: object, **options: object) -> None:
        names = [name for name in NAMES if name not in options]
        self.arguments.append(dict(zip(names, values, strict=True)) | options)


class Operations(TorchDispatchMode):
    """Names of the torch operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


NAMES = list(triton.JITFunction(gather.copy_blocks.fn).arg_names)


@pytest.fixture
def launches() -> Iterator[Launches]:
    recorder = Launches()
    with mock.patch.object(gather, "copy_blocks", recorder):
        yield recorder


def caches(layers: int, blocks: int = 8, block_bytes: int = BLOCK) -> list[torch.Tensor]:
    return [torch.empty((blocks, block_bytes), dtype=torch.uint8) for _ in range(layers)]


@pytest.mark.parametrize(
    ("blocks", "most", "programs"), [(1, 100, 3), (2, 100, 6), (8, 24, 24), (8, 23, 23), (8, 1, 1)]
)
def test_the_grid_has_one_program_per_tile_up_to_the_cap(
    launches: Launches, blocks: int, most: int, programs: int
) -> None:
    cache, ids = caches(1)[0], torch.arange(blocks)
    gather_blocks(cache, ids, torch.empty(blocks * BLOCK, dtype=torch.uint8), max_programs=most)
    assert launches.grids == [(programs,)]
    assert launches.arguments[0]["tasks"] == 3 * blocks


def test_many_layers_need_one_launch_and_the_default_cap_is_a_full_device(launches: Launches) -> None:
    layers = 90
    gather_blocks(layer_table(caches(layers)), torch.arange(8), torch.empty((layers, 8, BLOCK), dtype=torch.uint8))
    assert launches.grids == [(FULL_DEVICE_PROGRAMS,)]
    assert launches.arguments[0]["tasks"] == layers * 8 * 3 > FULL_DEVICE_PROGRAMS


def test_without_ids_no_kernel_is_launched(launches: Launches) -> None:
    none = torch.empty(0, dtype=torch.int64)
    gather_blocks(caches(1)[0], none, torch.empty(0, dtype=torch.uint8))
    gather_blocks(layer_table(caches(2)), none, torch.empty(0, dtype=torch.uint8))
    assert launches.grids == []


def test_a_gather_allocates_nothing_and_reads_only_the_bounds_of_ids(launches: Launches) -> None:
    table, ids, packed = layer_table(caches(3)), torch.arange(2), torch.empty((3, 2, BLOCK), dtype=torch.uint8)
    with Operations() as operations:
        gather_blocks(table, ids, packed)
        gather_blocks(table.caches[0], ids, packed[0])
        gather_blocks(table[1:], ids, packed[1:])
    assert len(launches.grids) == 3
    views = {"view", "slice", "alias", "detach", "select"}
    assert operations.names - views == {"aminmax", "_local_scalar_dense"}


@pytest.mark.parametrize(
    ("block_bytes", "tile", "tiles"),
    [
        (64, 256, 1),
        (4096, 256, 1),
        (8192, 512, 1),
        (16384, 1024, 1),
        (18432, 256, 5),
        (65536, 1024, 4),
        (131088, 256, 33),
    ],
)
def test_tiles_leave_few_threads_idle(launches: Launches, block_bytes: int, tile: int, tiles: int) -> None:
    gather_blocks(caches(1, 2, block_bytes)[0], torch.tensor([1]), torch.empty(block_bytes, dtype=torch.uint8))
    (got,) = launches.arguments
    assert (got["UNIT"], got["TILE"], got["tiles"]) == (16, tile, tiles)
    assert got["num_warps"] * 32 * 4 == tile


@pytest.mark.parametrize(("shift", "unit"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1), (32, 16)])
@pytest.mark.parametrize("moved", ["cache", "packed"])
def test_the_access_is_as_wide_as_addresses_allow(launches: Launches, shift: int, unit: int, moved: str) -> None:
    memory = {name: torch.empty(4 * 64 + 64, dtype=torch.uint8) for name in ("cache", "packed")}
    memory[moved] = memory[moved][shift:]
    gather_blocks(memory["cache"][:256].view(4, 64), torch.tensor([1, 2]), memory["packed"][:128])
    (got,) = launches.arguments
    assert got["UNIT"] == unit
    assert (got["block_units"], got["block_stride"]) == (64 // unit, 64 // unit)


def test_more_tiles_than_a_launch_can_count_are_refused(launches: Launches) -> None:
    cache, ids, packed = caches(1)[0], torch.arange(1), torch.empty(BLOCK, dtype=torch.uint8)
    gather_blocks(cache, ids, packed, max_programs=2**31 - 4)
    with pytest.raises(ValueError, match="more than a launch can count"):
        gather_blocks(cache, ids, packed, max_programs=2**31 - 3)
    assert launches.grids == [(3,)]


def test_the_kernel_skips_ids_outside_the_cache() -> None:
    with running_at("interpreter"):
        cache = torch.arange(6 * 64).to(torch.uint8).view(6, 64)[2:4]
        ids = torch.tensor([-1, 1, 2, 2**40])
        out = torch.full((4, 64), 0xFF, dtype=torch.uint8)
        gather._launch(single_layer(cache), ids, out, 3)
        assert torch.equal(out[1], cache[1])
        assert bool((out[[0, 2, 3]] == 0xFF).all())


@pytest.mark.parametrize(
    ("kernel", "tensors"),
    [(gather.copy_blocks, ["pointers", "ids"]), (checksums.sum_parts, ["parts", "out"])],
    ids=["copy", "checksums"],
)
def test_no_argument_makes_a_kernel_compile_again(kernel: Any, tensors: list[str]) -> None:
    if not isinstance(kernel, triton.JITFunction):
        pytest.skip("TRITON_INTERPRET is set: nothing is compiled")
    run_time = [parameter for parameter in kernel.params if not parameter.is_constexpr]
    assert [each.name for each in run_time if not each.do_not_specialize] == []
    assert [each.name for each in run_time if not each.annotation_type] == tensors


@pytest.mark.gpu
def test_a_gather_neither_waits_nor_allocates_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    table = layer_table([cache.to(device) for cache in caches(3)])
    ids, packed = torch.arange(2, device=device), torch.empty((3, 2, BLOCK), dtype=torch.uint8, device=device)
    gather_blocks(table, ids, packed)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        gather_blocks(table, ids, packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_the_copy_runs_on_the_given_stream() -> None:
    side = torch.cuda.Stream()
    cache = torch.arange(8 * 64, device="cuda").to(torch.uint8).view(8, 64)
    ids, out = torch.tensor([5, 2], device="cuda"), torch.full((2, 64), 0xFF, dtype=torch.uint8, device="cuda")
    poison = torch.full_like(out, 0xFF)
    gather_blocks(cache, ids, torch.empty_like(out))  # compiles
    assert torch.equal(out, poison)  # loads the kernels of the comparison: CUDA loads them when all streams are idle
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)
    gather_blocks(cache, ids, out, stream=side)
    assert torch.equal(out, poison), "the kernel did not wait for earlier work of the side stream"
    assert not side.query(), "the side stream ended before the comparison"
    side.synchronize()
    assert torch.equal(out, cache[ids])
