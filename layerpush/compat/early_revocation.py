"""Reports lost blocks to P's worker before vLLM's V2 model runner overwrites them.

A step that preempts a request gives its blocks to others. The V2 runner starts kernels that zero new blocks, or copy
into them, in ``update_requests``; it calls ``handle_preemptions`` only after that. In between a WRITE could read such a
block and land, and P could send the completion. So the connector gets the step's metadata in ``finish_requests``, which
comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from layerpush.compat.patches import our_connectors


def revoking(plain: Callable[..., None]) -> Callable[..., None]:
    """``finish_requests`` of the V2 model runner."""

    @functools.wraps(plain)
    def finish_requests(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
        revoke(scheduler_output.kv_connector_metadata)
        plain(self, scheduler_output, *args, **kwargs)

    return finish_requests


def revoke(metadata: Any) -> None:
    """The step of ``metadata`` takes blocks away from requests. Main thread. A second call for a step is harmless."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if metadata is not None and has_kv_transfer_group():
        for connector, ours in our_connectors(get_kv_transfer_group(), metadata):
            connector.handle_preemptions(ours)
