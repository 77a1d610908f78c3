"""vLLM resets D's prefix cache although turns are kept, and they end.

vLLM resets the cache only if no block has an owner. Otherwise `pause_generation`, which clears caches before new
weights come, and a reset with `reset_running_requests` raise ``RuntimeError``. So the blocks of kept turns count as
free meanwhile. Nobody gets one before the workers have ended its turn: a WRITE may read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layerpush.compat.patches import our_connectors

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def lending(plain: Callable[..., bool]) -> Callable[..., bool]:
    """``Scheduler.reset_prefix_cache``."""

    @functools.wraps(plain)
    def reset_prefix_cache(self: Scheduler, *args: Any, **kwargs: Any) -> bool:
        reset = functools.partial(plain, self, *args, **kwargs)
        for each, _ in our_connectors(self.connector):
            reset = functools.partial(each.connector_scheduler.reset_cache, reset)
        return reset()

    return reset_prefix_cache
