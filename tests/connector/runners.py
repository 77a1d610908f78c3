"""vLLM's model runners, without a model: they call a connector in the runners' order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

Forward = Callable[[Iterable[str]], None]
"""Computes these layers, and calls ``attended`` for each."""


class Runner(Protocol):
    """Runs the steps of one engine. The constructor registers ``caches``."""

    def run(self, output: SchedulerOutput, forward: Forward | None) -> KVConnectorOutput: ...

    def attended(self, name: str) -> None: ...


class V1Runner:
    """The part of ``GPUModelRunner`` in ``vllm/v1/worker/gpu_model_runner.py`` that runs on a CPU.

    A drafter computes the layers of ``drafted`` after the results of the step have been taken.
    """

    def __init__(
        self,
        connector: Any,
        config: VllmConfig,
        caches: dict[str, torch.Tensor],
        *,
        drafted: Collection[str] = (),
    ) -> None:
        self._connector, self._caches, self._drafted = connector, caches, drafted
        connector.register_kv_caches(caches)

    def run(self, output: SchedulerOutput, forward: Forward | None) -> KVConnectorOutput:
        connector = self._connector
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        if forward is not None:
            forward(name for name in self._caches if name not in self._drafted)
        connector.start_load_kv(None)
        if not self._drafted:
            connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        result = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        if self._drafted:
            if forward is not None:
                forward(self._drafted)
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return result

    def attended(self, name: str) -> None:
        self._connector.save_kv_layer(name, self._caches[name], None)


class V2Runner:
    """``GPUModelRunner`` of ``vllm/v1/worker/gpu``, the default on GPUs. Its connector driver is vLLM's own.

    After the forward of the other layers, a drafter computes the layers of ``drafted``, once for each of its tokens.
    ``saves_last``: the step ends as in vLLM 0.33 with a drafter. The step's results are taken before drafting, and
    ``wait_for_save`` is the last call but one.
    """

    DRAFT_TOKENS = 2

    def __init__(
        self,
        connector: Any,
        config: VllmConfig,
        caches: dict[str, torch.Tensor],
        *,
        drafted: tuple[str, ...] = (),
        saves_last: bool = False,
    ) -> None:
        self._connector, self._config, self._caches = connector, config, caches
        self._drafted, self._saves_last = drafted, saves_last
        self.after_forward: Callable[[], None] = lambda: None
        layers = config.compilation_config.static_forward_context
        layers.update({name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()})
        with self._as_group():
            self.driver = ActiveKVConnector(config, caches)

    def run(self, output: SchedulerOutput, forward: Forward | None) -> KVConnectorOutput:
        with self._as_group():
            if forward is None:
                return self.driver.no_forward(output).kv_connector_output or KVConnectorOutput()
            batch = SimpleNamespace(
                idx_mapping=None,
                req_ids=list(output.num_scheduled_tokens),
                num_tokens=output.total_num_scheduled_tokens,
            )
            with self._forward_context():
                self.driver.pre_forward(output, batch)
                forward(name for name in self._caches if name not in self._drafted)
            self.driver.finish_forward()
            self.after_forward()
            if self._saves_last:
                return self._draft_after_results(output, forward)
            self._draft(forward)
            return self._after(output)

    def dummy_run(self) -> None:
        """A forward for warm-up, profiling or for other data parallel ranks: it belongs to no request."""
        with self._as_group():
            self.driver.set_disabled(True)
            self.driver.pre_forward(SchedulerOutput.make_empty())
            with self._forward_context():
                for name in self._caches:
                    self.attended(name)
            self.driver.finish_forward()
            assert self.driver.post_forward(set()) is None
            self.driver.set_disabled(False)

    def attended(self, name: str) -> None:
        _attend(self._config, name)

    def _after(self, output: SchedulerOutput) -> KVConnectorOutput:
        result = self.driver.post_forward(output.finished_req_ids)
        assert result is not None
        return result

    def _draft(self, forward: Forward) -> None:
        for _ in range(self.DRAFT_TOKENS if self._drafted else 0):
            with self._forward_context():
                forward(self._drafted)

    def _draft_after_results(self, output: SchedulerOutput, forward: Forward) -> KVConnectorOutput:
        connector = self._connector
        with ExitStack() as put_off:
            for call in ("wait_for_save", "clear_connector_metadata"):
                put_off.enter_context(patch.object(connector, call))
            result = self._after(output)
        self._draft(forward)
        connector.wait_for_save()
        connector.clear_connector_metadata()
        return result

    def _forward_context(self) -> Any:
        return set_forward_context({name: object() for name in self._caches}, self._config, slot_mapping={})

    def _as_group(self) -> Any:
        return patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self._connector)


@maybe_transfer_kv_layer
def _attend(config: VllmConfig, layer_name: str) -> None:
    """An attention layer's operation, which vLLM's decorator surrounds with the connector's hooks."""
