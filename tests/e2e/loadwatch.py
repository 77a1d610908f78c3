"""What LMCache's connector behind a MultiConnector loads. All functions run on the engine's thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.e2e.hostmain import HostedEngine

_loads: list[int] = []


def watch(engine: HostedEngine) -> None:
    """Begin: `new_loads` tells from now on what the connector loads."""
    (other,) = [one for one in engine.scheduler.connector._connectors if "LMCache" in type(one).__name__]
    if "update_state_after_alloc" in vars(other):
        return  # this engine is watched already
    allocated = other.update_state_after_alloc

    def watched(request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            _loads.append(num_external_tokens)
        allocated(request, blocks, num_external_tokens)

    other.update_state_after_alloc = watched


def new_loads(_engine: HostedEngine) -> list[int]:
    """Tokens of each load since the last call."""
    loads = _loads.copy()
    _loads.clear()
    return loads
