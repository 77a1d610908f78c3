"""A worker's staging memory, with a NIXL that only notes its calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from bench.forward.models import MODELS
from layerpush.compat.cache_layout import layer_bytes
from layerpush.core.config import LayerPushConfig
from layerpush.core.pieces import Pieces
from layerpush.engine.worker import gathering
from layerpush.engine.worker.gathering import ALLOCATED_BYTES, WorkerGathering, default_bytes
from layerpush.transport.base import Route
from layerpush.transport.gather import tensor_memory
from layerpush.transport.gather.tensor_memory import TensorStaging
from layerpush.transport.link import Link
from tests.unit.builders import layout_of

BLOCKS, BLOCK_BYTES = 64, 256
LAYOUT = layout_of([0, 0], BLOCKS, BLOCK_BYTES)


class Nixl:
    """``broken`` names the calls that fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.prepared: list[str] = []
        self.rows: list[list[list[int]]] = []
        """Rows of the prepared lists: address, bytes, device, stride and count of blocks."""
        self.released: list[Any] = []
        self.broken: set[str] = set()
        self.devices: set[int] = set()
        """The devices with registered memory."""

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise RuntimeError(f"{name} fails")

    def get_reg_descs(self, rows: Any, memory: str) -> Any:
        self.devices |= {int(row[2]) for row in rows}
        return rows, memory

    def register_memory(self, *_: Any, **__: Any) -> None:
        self._called("register_memory")

    def prep_xfer_dlist(self, agent: str, rows: Any, memory: str) -> str:
        self._called("prep_xfer_dlist")
        assert memory == "DRAM"
        assert rows.dtype == np.uint64
        self.rows.append(rows.tolist())
        self.prepared.append(agent)
        return f"list {len(self.prepared)}"

    def release_dlist_handle(self, handle: Any) -> None:
        self.released.append(handle)
        self._called("release_dlist_handle")


class Place:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, prefills: bool = True, **config: Any) -> None:
        self.nixl = Nixl()
        self.worker = SimpleNamespace(
            nixl_wrapper=self.nixl,
            nixl_memory_type="DRAM",
            nixl_backends=["UCX"],
            device_id=0,
            tp_rank=0,
            use_host_buffer=False,
            has_copies=False,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[], transfer_groups=[]),
            _registered_descs=[],
            transport=None,
            vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=prefills)),
        )
        self.caches = {name: torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8) for name in ("0", "1")}
        monkeypatch.setattr(gathering, "layer_bytes", lambda _: BLOCKS * BLOCK_BYTES)
        monkeypatch.setattr(gathering, "slot_views", lambda _, caches: list(caches.values()))
        self.staging = WorkerGathering(self.worker, LayerPushConfig(**config))

    def start(self) -> WorkerGathering:
        self.staging.allocate(torch.device("cpu"))
        self.staging.build(LAYOUT, self.caches)
        return self.staging

    def packs(self) -> bool:
        return self.staging.strategy is not None


def test_memory_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    staging = place.start()
    assert place.packs()
    assert len(place.worker._registered_descs) == 1
    assert place.nixl.prepared == ["NIXL_INIT_AGENT"]
    [[(_, length, device, stride, count)]] = place.nixl.rows
    assert (length, device, stride) == (BLOCK_BYTES, 0, BLOCK_BYTES)
    (ring,) = staging.rings
    assert count * BLOCK_BYTES == ring.capacity_bytes
    place.nixl.broken.add("release_dlist_handle")
    staging.close()
    staging.close()
    assert place.nixl.released == ["list 1"]


@pytest.mark.parametrize(
    ("layer", "size"),
    [(1000, 64 << 20), (32 << 20, 256 << 20), (1 << 30, 512 << 20)],
    ids=["at least", "eight layers", "at most"],
)
def test_a_ring_of_default_size(layer: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    monkeypatch.setattr(gathering, "layer_bytes", lambda _: layer)
    (ring,) = place.start().rings
    assert ring.capacity_bytes == size


VLLM_LEAVES_FREE = 150 << 20
"""``redundancy_buffer_memory`` in vLLM's ``gpu_worker.py``: all memory that it leaves to others."""


@pytest.mark.parametrize("tokens", [2048, 8192, 32768])
@pytest.mark.parametrize("model", MODELS)
def test_a_gpus_ring_of_default_size_fits_beside_vllms_plan(model: str, tokens: int) -> None:
    size = default_bytes(tokens * MODELS[model].token_bytes, torch.device("cuda"))
    assert size == 64 << 20
    assert size + ALLOCATED_BYTES < VLLM_LEAVES_FREE / 2


@pytest.mark.parametrize(
    ("device", "staging_bytes", "taken"),
    [("cuda", None, 66 << 20), ("cuda", 257 << 20, 258 << 20), ("cuda", 0, None), ("cpu", None, None)],
)
def test_memory_outside_vllms_plan_is_logged(
    device: str,
    staging_bytes: int | None,
    taken: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place, made = Place(monkeypatch, staging_bytes=staging_bytes), gathering.staging_memory
    monkeypatch.setattr(gathering, "staging_memory", lambda size, _: made(size, torch.device("cpu")))
    with caplog.at_level(logging.INFO, gathering.logger.name):
        place.staging.allocate(torch.device(device))
    lines = [record.getMessage() for record in caplog.records if "--kv-cache-memory" in record.getMessage()]
    assert [line.split()[1] for line in lines] == ([] if taken is None else [str(taken)])


def test_layer_bytes_is_the_kv_size_of_the_largest_step(engine: Callable[..., Any]) -> None:
    from tests.connector.engine import HEAD_SIZE, HEADS

    p = engine("kv_producer")
    tokens = p.config.scheduler_config.max_num_batched_tokens
    assert layer_bytes(p.worker.connector_worker) == tokens * 2 * HEADS * HEAD_SIZE * 4, "keys and values, float32"


@pytest.mark.parametrize(
    "config",
    [
        {"packing": "off"},
        {"layerwise": False},
        {"staging_bytes": 0},
        {"staging_bytes": BLOCK_BYTES},
        {"prefills": False},
    ],
)
def test_nothing_is_packed_if_disabled_or_without_enough_memory_or_by_a_d(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(monkeypatch, **config)
    place.start()
    assert not place.packs()
    assert place.staging.rings == ()
    place.staging.close()


@pytest.mark.parametrize(
    ("theirs", "use_mla", "gathers"), [(2, False, True), (1, False, False), (4, False, False), (1, True, True)]
)
def test_only_whole_blocks_are_gathered(
    theirs: int, use_mla: bool, gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our heads of two blocks are never adjacent on D, for any block ids: heads of other ranks lie between them."""
    place = Place(monkeypatch)
    place.worker.use_mla = use_mla
    place.worker.transfer_topo = SimpleNamespace(
        get_engine_info=lambda _: SimpleNamespace(remote_tp_size=theirs),
        tp_ratio=lambda size: {1: 2, 2: 1, 4: -2}[size],  # we are two ranks
    )
    link = Link("D", (Route("d-0", 0, "cache", "their cache"),), (BLOCKS, BLOCKS))
    gathered = place.start().with_gathering(link).gathered
    assert gathered == (Route("d-0", 0, "list 1", "their cache") if gathers else None)


def test_a_link_without_gathering_stays_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No staging memory, blocks that do not fit, several ranks, pieces of blocks."""
    routes = tuple(Route(f"d-{rank}", rank, "cache", "their cache") for rank in range(2))
    for config, link in (
        ({"packing": "off"}, Link("D", routes[:1], (BLOCKS, BLOCKS))),
        ({}, Link("D", (), (), refusal="another block size")),
        ({}, Link("D", routes, (BLOCKS, BLOCKS), share=0.5)),
        ({}, Link("D", routes[:1], (BLOCKS, BLOCKS), pieces=Pieces(16, 2, 1, 2, 1, (1, 1)))),
    ):
        assert Place(monkeypatch, **config).start().with_gathering(link) is link


def test_the_ring_is_registered_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's ``device_id`` is 0 until vLLM has registered the KV cache."""
    place = Place(monkeypatch)
    monkeypatch.setattr(
        "layerpush.engine.worker.gathering.staging_memory", lambda size, _: torch.zeros(size, dtype=torch.uint8)
    )
    place.staging.allocate(torch.device("cuda", 3))
    assert place.nixl.devices == {3}


@pytest.mark.parametrize("reason", ["a host buffer", "copies", "states"])
def test_no_staging_memory_without_layerwise_pushes(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    if reason == "states":
        group = SimpleNamespace(kv_cache_spec=MambaSpec(block_size=512, shapes=((4, 4),), dtypes=(torch.float16,)))
        place.worker.kv_cache_config.transfer_groups.append(group)
    elif reason == "copies":
        place.worker.has_copies = True
    else:
        place.worker.use_host_buffer = True
    place.start()
    assert place.nixl.calls == []
    assert not place.packs()


@pytest.mark.parametrize("lacks", ["registration", "descriptors", "a compiler", "memory", "pinned memory"])
def test_packing_is_off_when_a_resource_is_missing(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> Any:
        raise RuntimeError(f"no {lacks}")

    place = Place(monkeypatch)
    if lacks == "registration":
        place.nixl.broken.add("register_memory")
    elif lacks == "descriptors":
        place.nixl.broken.add("prep_xfer_dlist")
    elif lacks == "a compiler":
        monkeypatch.setattr(TensorStaging, "copy_costs", unable)
    elif lacks == "pinned memory":
        monkeypatch.setattr(tensor_memory, "BlockIdBuffer", unable)
    else:  # on a CPU torch has no such error of its own
        monkeypatch.setattr("layerpush.engine.worker.gathering.staging_memory", unable)
    place.start()
    assert not place.packs()
    assert place.staging.rings == ()
    place.staging.close()
