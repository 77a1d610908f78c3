"""A worker's staging memory, with a NIXL that only notes its calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from bench.forward.models import MODELS
from layerpush.compat.cache_layout import layer_bytes
from layerpush.core.config import LayerPushConfig
from layerpush.core.wire import Window
from layerpush.engine.worker import packing
from layerpush.engine.worker.packing import ALLOCATED_BYTES, WorkerPacking, default_bytes
from layerpush.transport.base import Route, WriteState
from layerpush.transport.link import Link
from layerpush.transport.packing import tensor_memory
from layerpush.transport.packing.memory import PIECE_BYTES
from layerpush.transport.packing.tensor_memory import TensorStaging
from tests.unit.builders import layout_of

BLOCKS, BLOCK_BYTES = 64, 256
LAYOUT = layout_of([0, 0], BLOCKS, BLOCK_BYTES)
OFFER = Window(
    rank=0, ring=1 << 40, ring_size=256 * PIECE_BYTES, device=0, offset=0, size=PIECE_BYTES, layout=LAYOUT.digest
)


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


class Wire:
    """WRITEs that do not end."""

    def __init__(self, nixl: Nixl) -> None:
        self.nixl = nixl

    def post_write(self, *_: Any) -> str:
        return "a WRITE"

    def poll(self, _: Any) -> WriteState:
        return WriteState.PENDING

    def release(self, handle: Any) -> None:
        self.nixl.released.append(handle)


class Place:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.nixl = Nixl()
        self.worker = SimpleNamespace(
            nixl_wrapper=self.nixl,
            nixl_memory_type="DRAM",
            nixl_backends=["UCX"],
            device_id=0,
            tp_rank=0,
            use_host_buffer=False,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[], transfer_groups=[]),
            _registered_descs=[],
            transport=Wire(self.nixl),
        )
        self.caches = {name: torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8) for name in ("0", "1")}
        monkeypatch.setattr(packing, "has_states", lambda _: False)
        monkeypatch.setattr(packing, "layer_bytes", lambda _: BLOCKS * BLOCK_BYTES)
        monkeypatch.setattr(packing, "slot_views", lambda _, caches: list(caches.values()))
        self.staging = WorkerPacking(self.worker, LayerPushConfig(**config))  # type: ignore[arg-type]

    def start(self) -> WorkerPacking:
        self.staging.allocate(torch.device("cpu"))
        self.staging.build(LAYOUT, self.caches)
        return self.staging

    def packs(self) -> bool:
        return self.staging.strategy is not None


def test_memory_is_registered_and_windows_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    staging = place.start()
    assert place.packs()
    assert len(place.worker._registered_descs) == 1
    assert place.nixl.prepared == ["NIXL_INIT_AGENT"] * 2
    assert staging.unpacker is not None
    offer = staging.unpacker.offer("d-1")
    assert offer is not None
    for ((base, length, device, stride, count),), size in zip(place.nixl.rows, (BLOCK_BYTES, PIECE_BYTES), strict=True):
        assert (base, length, device, stride) == (offer.ring, size, 0, size)
        assert count * size == offer.ring_size
    assert offer.offset >= 128 * PIECE_BYTES, "peers time their WRITEs there"
    (ring,) = staging.rings
    assert offer.offset + offer.size <= offer.ring_size == ring.capacity_bytes


@pytest.mark.parametrize(
    ("layer", "size", "window"),
    [(1000, 64 << 20, 63 << 17), (32 << 20, 257 << 20, 32 << 20), (1 << 30, 512 << 20, 511 << 17)],
    ids=["at least", "a layer in each window", "at most"],
)
def test_a_ring_of_default_size(layer: int, size: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    monkeypatch.setattr(packing, "layer_bytes", lambda _: layer)
    unpacker = place.start().unpacker
    assert unpacker is not None
    offer = unpacker.offer("d-1")
    assert offer is not None
    assert (offer.ring_size, offer.size) == (size, window)


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
    place, made = Place(monkeypatch, staging_bytes=staging_bytes), packing.staging_memory
    monkeypatch.setattr(packing, "staging_memory", lambda size, _: made(size, torch.device("cpu")))
    with caplog.at_level(logging.INFO, packing.logger.name):
        place.staging.allocate(torch.device(device))
    lines = [record.getMessage() for record in caplog.records if "--kv-cache-memory" in record.getMessage()]
    assert [line.split()[1] for line in lines] == ([] if taken is None else [str(taken)])


def test_layer_bytes_is_the_kv_size_of_the_largest_step(engine: Callable[..., Any]) -> None:
    from tests.connector.engine import HEAD_SIZE, HEADS

    p = engine("kv_producer")
    tokens = p.config.scheduler_config.max_num_batched_tokens
    assert layer_bytes(p.worker.connector_worker) == tokens * 2 * HEADS * HEAD_SIZE * 4, "keys and values, float32"


@pytest.mark.parametrize(
    "config", [{"packing": "off"}, {"layerwise": False}, {"staging_bytes": 0}, {"staging_bytes": PIECE_BYTES}]
)
def test_nothing_is_packed_if_disabled_or_without_enough_memory(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(monkeypatch, **config)
    place.start()
    assert not place.packs()
    assert place.staging.unpacker is None
    assert place.staging.rings == ()
    assert place.staging.ring_of("D", "d-0", OFFER) is None
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
    """No staging memory, blocks that do not fit, several ranks."""
    routes = tuple(Route(f"d-{rank}", rank, "cache", "their cache") for rank in range(2))
    for config, link in (
        ({"packing": "off"}, Link("D", routes[:1], (BLOCKS, BLOCKS))),
        ({}, Link("D", (), (), refusal="another block size")),
        ({}, Link("D", routes, (BLOCKS, BLOCKS), share=0.5)),
    ):
        assert Place(monkeypatch, **config).start().with_gathering(link) is link


def test_a_ring_too_small_for_windows_offers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registering engine must not suffer from it."""
    place = Place(monkeypatch, staging_bytes=130 * PIECE_BYTES)
    staging = place.start()
    assert place.packs()
    assert staging.unpacker is not None
    assert staging.unpacker.offer("d-1") is None


def test_a_connection_has_one_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """WRITEs may be on their way to the first ring while D offers a second one."""
    place = Place(monkeypatch)
    staging = place.start()
    first = staging.ring_of("D", "d-0", OFFER)
    assert first is not None
    assert staging.ring_of("D", "d-0", msgspec.structs.replace(OFFER, offset=PIECE_BYTES)) == first
    for change in ({"ring": 1 << 41}, {"ring_size": PIECE_BYTES}, {"device": 1}):
        assert staging.ring_of("D", "d-0", msgspec.structs.replace(OFFER, **change)) is None
    assert staging.ring_of("D", "d-0", OFFER) == first
    assert place.nixl.released == []
    staging.disconnected("D")
    assert place.nixl.released == [first.remote_descriptors]
    again = staging.ring_of("D", "d-0", msgspec.structs.replace(OFFER, ring=1 << 41))
    assert again is not None
    assert again.remote_descriptors != first.remote_descriptors


def test_an_unavailable_ring_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    staging = place.start()
    place.nixl.broken.add("prep_xfer_dlist")
    before = place.nixl.calls.count("prep_xfer_dlist")
    for _ in range(3):
        assert staging.ring_of("D", "d-0", OFFER) is None
    assert place.nixl.calls.count("prep_xfer_dlist") == before + 1


def test_a_disconnect_during_timed_writes_releases_their_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker releases the WRITE's handle first, then its descriptor list."""
    place = Place(monkeypatch)
    staging = place.start()
    ring = staging.ring_of("D", "d-0", OFFER)
    assert ring is not None
    assert staging.strategy is not None
    staging.strategy.turn()
    assert staging.engines_to_measure == {"D"}
    place.nixl.broken.add("release_dlist_handle")
    staging.disconnected("D")
    assert place.nixl.released == ["a WRITE", ring.remote_descriptors]
    assert staging.engines_to_measure == set()
    staging.close()
    staging.close()
    assert len(place.nixl.released) == 4


def test_the_ring_is_registered_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's ``device_id`` is 0 until vLLM has registered the KV cache."""
    place = Place(monkeypatch)
    monkeypatch.setattr(
        "layerpush.engine.worker.packing.staging_memory", lambda size, _: torch.zeros(size, dtype=torch.uint8)
    )
    place.staging.allocate(torch.device("cuda", 3))
    assert place.nixl.devices == {3}


@pytest.mark.parametrize("reason", ["a host buffer", "states"])
def test_no_staging_memory_without_layerwise_pushes(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    if reason == "states":
        monkeypatch.setattr(packing, "has_states", lambda _: True)
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
        monkeypatch.setattr("layerpush.engine.worker.packing.staging_memory", unable)
    place.start()
    assert not place.packs()
    assert place.staging.unpacker is None
    assert place.staging.rings == ()
    place.staging.close()
