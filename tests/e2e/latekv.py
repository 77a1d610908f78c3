"""A connector in whose engine KV becomes visible late behind the host, as on a GPU."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from layerpush.connector import LayerwisePushConnector
from layerpush.engine.worker import worker
from layerpush.prefill import fences
from layerpush.prefill.fences import FencePool
from tests.support.simulated_stream import SimulatedEvent, SimulatedStream
from tests.support.writer_turns import WriterTurns


class Late(LayerwisePushConnector):
    """A layer's KV is in the cache when its attention runs, and then not until ``_stream`` has done the layer's work.

    The stream goes on only after the writer thread has made whole turns, and after each WRITE of these turns has left
    the memory. It does a step's last work after the next step has begun: the engine has two steps in flight. The pushes
    wait for the stream, until a test takes the fences away.
    """

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        patch.object(fences, "torch", SimpleNamespace(Event=SimulatedEvent)).start()  # for as long as the engine lives
        with patch.object(worker, "fences_for", FencePool):
            super().register_kv_caches(kv_caches)
        assert self.connector_worker is not None
        # vLLM turns it off on a CPU. The scheduler and the queue of steps are built next, and read it.
        self._vllm_config.scheduler_config.async_scheduling = True
        self._stream, self._draw = SimulatedStream(), random.Random(0)
        self._turns = WriterTurns(self.connector_worker)
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        SimulatedStream.current = self._stream
        layers = self._vllm_config.compilation_config.static_forward_context
        for name in kv_caches:
            layers[name].impl.do_kv_cache_update = partial(self._updated, name, layers[name].impl.do_kv_cache_update)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._turns.let_pass()
        self._stream.run()

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        blocks, old = self._before.pop(layer_name)
        new = kv_layer[blocks]
        kv_layer[blocks] = old
        self._stream.put(partial(kv_layer.__setitem__, blocks, new))
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        self._turns.let_pass()
        self._stream.run(self._draw.randrange(2))

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._turns.let_pass()

    def _updated(
        self,
        name: str,
        update: Any,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        blocks = (slots[slots >= 0] // self._vllm_config.cache_config.block_size).unique()
        self._before[name] = blocks, cache[blocks]
        update(layer, key, value, cache, slots)
