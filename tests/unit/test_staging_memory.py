"""Copies between cache and ring: the double of the tests and the real one keep the same contract."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.layout import CacheLayout, LayerSlots, LayoutError, Region
from layerpush.transport.gather import tensor_memory
from layerpush.transport.gather.memory import Staging
from layerpush.transport.gather.tensor_memory import ALIGNED_BYTES, TensorStaging, staging_memory
from tests.support.fake_transport import Bytes
from tests.support.numpy_staging import NumpyStaging

BLOCKS, BLOCK_BYTES, RING = 12, 48, 16 << 10
SLOTS = ((0, 3), (1, 4), (2, 5))
"""Keys and values of a layer lie in regions of their own, far from each other."""
LAYOUT = CacheLayout(
    tuple(LayerSlots(f"layers.{index}", 0, slots) for index, slots in enumerate(SLOTS)),
    tuple(Region(slot * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, BLOCKS) for slot in range(6)),
)
Make = Callable[[Bytes], tuple[Staging, Bytes]]


def fake(cache: Bytes) -> tuple[Staging, Bytes]:
    staging = NumpyStaging(LAYOUT, cache, RING)
    return staging, staging.memory


def real(cache: Bytes) -> tuple[Staging, Bytes]:
    memory = staging_memory(RING, torch.device("cpu"))
    slots = torch.from_numpy(cache).view(6, BLOCKS, BLOCK_BYTES).unbind()
    return TensorStaging(LAYOUT, slots, memory), memory.numpy()


def cache_of(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, 6 * BLOCKS * BLOCK_BYTES, dtype=np.uint8)


cases = st.tuples(
    st.lists(st.integers(0, BLOCKS - 1), max_size=BLOCKS, unique=True),
    st.sampled_from([slice(0, 1), slice(1, 3), slice(0, 3), slice(2, 3)]),
    st.integers(0, 64).map(lambda steps: steps * 16),
)


def packed(cache: Bytes, blocks: list[int], layers: slice) -> Bytes:
    """The order of ``Staging``: block after block, region after region, layer after layer."""
    shaped = cache.reshape(6, BLOCKS, BLOCK_BYTES)
    parts = [shaped[slot, block] for pair in SLOTS[layers] for slot in pair for block in blocks]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


@pytest.mark.parametrize("made_by", [fake, real])
@given(case=cases)
def test_gather_copies_blocks_into_the_ring(made_by: Make, case: tuple[list[int], slice, int]) -> None:
    blocks, layers, offset = case
    cache = cache_of(1)
    before = cache.copy()
    staging, ring = made_by(cache)
    ring[:] = 0xEE
    assert staging.gather(layers, np.asarray(blocks, np.int32), offset).is_over()
    wanted = packed(before, blocks, layers)
    assert np.array_equal(ring[offset : offset + len(wanted)], wanted)
    assert (ring[:offset] == 0xEE).all()
    assert (ring[offset + len(wanted) :] == 0xEE).all()
    assert np.array_equal(cache, before)


class OpenEvent:
    """An event that the device has passed. Any two are ``MS`` ms apart."""

    MS = 3.0

    def __init__(self, enable_timing: bool = False) -> None:
        self._has_time = enable_timing

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: OpenEvent) -> float:
        assert self._has_time
        assert later._has_time
        return self.MS


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[TensorStaging, list[torch.Tensor]]:
    """Staging memory that takes the CPU for a full GPU; and the ids of its copies."""

    def unable(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    staging, _ = real(cache_of(5))
    assert isinstance(staging, TensorStaging)
    staging._ids._device = torch.empty_like(staging._ids._host)
    ids: list[torch.Tensor] = []
    monkeypatch.setattr(staging, "_stream", object())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", OpenEvent)
    monkeypatch.setattr(tensor_memory, "gather_blocks", lambda *args, **_: ids.append(args[1]))
    for allocating in ("pin_memory", "to", "clone"):
        monkeypatch.setattr(torch.Tensor, allocating, unable)
    return staging, ids


def test_copies_on_a_gpu_allocate_nothing(gpu: tuple[TensorStaging, list[torch.Tensor]]) -> None:
    staging, ids = gpu
    blocks = np.asarray([7, 1, 4], np.int32)
    assert staging.gather(slice(0, 1), blocks, 0).is_over()
    assert [one.tolist() for one in ids] == [[7, 1, 4]]


def test_copies_on_a_gpu_are_timed_by_the_device(gpu: tuple[TensorStaging, list[torch.Tensor]]) -> None:
    staging, _ = gpu
    blocks = np.asarray([7, 1, 4], np.int32)
    assert staging.gather(slice(0, 1), blocks, 0).device_s() == OpenEvent.MS / 1e3


def test_copies_on_a_gpu_have_priority_over_the_models_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of a higher priority, which is a lower number, than the model's."""
    streams = []
    gpu = SimpleNamespace(type="cuda")
    slots = [SimpleNamespace(shape=(BLOCKS, BLOCK_BYTES), stride=lambda: (BLOCK_BYTES, 1), device=gpu)] * 6
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, **options: streams.append((device, options)))
    monkeypatch.setattr(tensor_memory, "layer_table", lambda caches: caches)
    monkeypatch.setattr(tensor_memory, "BlockIdBuffer", lambda *_: None)
    TensorStaging(LAYOUT, slots, staging_memory(RING, torch.device("cpu")))
    assert streams == [(gpu, {"priority": -1})]


@pytest.mark.gpu
def test_blocks_go_into_the_ring_of_a_gpu() -> None:
    device, blocks, layers = torch.device("cuda"), [7, 1, 4], slice(0, 3)
    cache = torch.from_numpy(cache_of(6)).to(device)
    memory = staging_memory(RING, device)
    staging = TensorStaging(LAYOUT, cache.view(6, BLOCKS, BLOCK_BYTES).unbind(), memory)
    copy = staging.gather(layers, np.asarray(blocks, np.int32), 0)
    torch.cuda.synchronize()
    assert copy.is_over()
    assert copy.device_s() > 0
    expected = packed(cache_of(6), blocks, layers)
    assert np.array_equal(memory[: expected.size].cpu().numpy(), expected)


def test_running_copies_keep_their_block_ids(gpu: tuple[TensorStaging, list[torch.Tensor]]) -> None:
    """Their spans lie one behind the other; a span need not begin at a multiple of a block's size."""
    staging, ids = gpu
    begun = [np.arange(count, dtype=np.int32)[::-1] for count in (3, 12, 1, 5)]
    offset = 16
    for blocks in begun:
        staging.gather(slice(1, 2), blocks, offset)
        offset += len(blocks) * 2 * BLOCK_BYTES
    staging.gather(slice(0, 1), np.asarray([9], np.int32), RING - 2 * BLOCK_BYTES)
    assert [one.tolist() for one in ids] == [*[blocks.tolist() for blocks in begun], [9]]


def test_regions_that_differ_cannot_be_packed() -> None:
    memory = staging_memory(RING, torch.device("cpu"))
    slots = [torch.zeros(BLOCKS, BLOCK_BYTES + slot, dtype=torch.uint8) for slot in range(6)]
    with pytest.raises(LayoutError, match="differ"):
        TensorStaging(LAYOUT, slots, memory)


def test_the_ring_begins_at_an_aligned_address() -> None:
    memory = staging_memory(3 * ALIGNED_BYTES, torch.device("cpu"))
    assert memory.data_ptr() % ALIGNED_BYTES == 0
    assert memory.numel() == 3 * ALIGNED_BYTES


def test_a_rate_measurement_does_not_change_the_cache() -> None:
    cache = cache_of(4)
    before = cache.copy()
    staging, _ = real(cache)
    assert isinstance(staging, TensorStaging)
    copy_s, byte_s = staging.copy_costs()
    assert 0 <= copy_s < 1
    assert 0 <= byte_s < 1
    assert np.array_equal(cache, before)
