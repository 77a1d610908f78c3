"""Reports lost blocks to P's worker before vLLM's V2 model runner overwrites them.

A step that preempts a request gives its blocks to others. The V2 runner starts kernels that zero new blocks, or copy
into them, in ``update_requests``; it calls ``handle_preemptions`` only after that. In between a WRITE could read such a
block and land, and P could send the completion. So the connector gets the step's metadata in ``finish_requests``, which
comes first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from layerpush.compat.import_hook import ImportHook

logger = logging.getLogger(f"vllm.{__name__}")


class EarlyRevocation(ImportHook):
    """Patches the V2 model runner of this process, if it uses one."""

    names = frozenset({"vllm.v1.worker.gpu.model_runner"})

    def patch(self, module: ModuleType) -> None:
        runner: Any = module.GPUModelRunner
        plain = getattr(runner, "finish_requests", None)
        if plain is None:
            logger.warning("GPUModelRunner.finish_requests does not exist in this vLLM: preemptions are known later")
            return

        def finish_requests(self: Any, scheduler_output: Any) -> None:
            revoke(scheduler_output.kv_connector_metadata)
            plain(self, scheduler_output)

        runner.finish_requests = finish_requests


def revoke(metadata: Any) -> None:
    """The step of ``metadata`` takes blocks away from requests. Main thread. A second call for a step is harmless."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if metadata is None or not has_kv_transfer_group():
        return
    for connector, ours in _ours(get_kv_transfer_group(), metadata):
        connector.handle_preemptions(ours)


def _ours(connector: Any, metadata: Any) -> Iterator[tuple[Any, Any]]:
    """Our connectors, alone or in a ``MultiConnector``, each with its metadata."""
    from layerpush.compat.metadata import LayerwiseMetadata

    if isinstance(metadata, LayerwiseMetadata):
        yield connector, metadata
    for each, its in zip(getattr(connector, "_connectors", ()), getattr(metadata, "metadata", ()), strict=False):
        yield from _ours(each, its)
