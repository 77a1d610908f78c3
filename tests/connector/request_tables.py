"""The tables by request id in the scheduler of an engine core."""

from __future__ import annotations

from typing import Any

OWNERS = ("layerpush.engine.scheduler.", "layerpush.compat.first_tokens")
"""Modules whose objects have such tables."""


def leftovers(scheduler: Any) -> dict[str, Any]:
    """The tables of a ``LayerwisePushScheduler`` and of its parts that are not empty, vLLM's own among them."""
    found: dict[str, Any] = {}
    for name, value in vars(scheduler).items():
        if isinstance(value, dict | set):
            found |= {name: value} if value else {}
        elif type(value).__module__.startswith(OWNERS):
            found |= {f"{name}.{each}": table for each, table in leftovers(value).items()}
    return found
