"""The KV cache of vLLM's push worker by layer, for checksums."""

from __future__ import annotations

from itertools import groupby

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from layerpush.compat.kinds import kind_of
from layerpush.compat.pieces import content_of
from layerpush.core.layout import CacheLayout
from layerpush.transport.kv_parts import Field, KvParts, LayerKv

DEVICES = ("cpu", "cuda")


def kv_parts(worker: NixlPushConnectorWorker, layout: CacheLayout) -> KvParts | None:
    """The layers of ``layout`` with attention. None: there is none, or the ranks of this engine split its tokens."""
    topology = worker.transfer_topo
    assert topology is not None
    layers, content = {}, content_of(worker, worker.block_size)
    for layer in layout.layers if topology.dcp_size == 1 else ():
        spec, cache = worker._layer_specs.get(layer.name), worker.device_kv_caches.get(layer.name)
        ranks = None if spec is None else kind_of(spec).ranks
        if (
            ranks is None
            or cache is None
            or cache.ndim != 4
            or cache.stride(3) != 1
            or cache.device.type not in DEVICES
        ):
            continue
        strips = () if content is None else content(cache.shape[3] * cache.element_size(), cache)
        layers[layer.name] = LayerKv(
            cache,
            layer.group,
            layer.kernel_blocks,
            None if ranks == "same" else cache.shape[1] * min(topology.tp_size, topology.total_num_kv_heads),
            tuple(Field(len(list(same)), size) for size, same in groupby(strips)),
        )
    return KvParts(layers, topology.tp_rank, topology.tp_size) if layers else None
