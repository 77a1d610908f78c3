"""The settings of both processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Progress = Literal["calm", "spin", "off"]
Polls = Literal["engine", "spin"]

POISON = 0xEE
"""No byte of P's blocks has this value."""


@dataclass(frozen=True)
class Settings:
    """``cache_bytes`` are those of each side's KV cache, ``agent_threads`` those of NIXL's pool.

    ``progress`` chooses NIXL's progress thread: one turn a millisecond, a busy loop, or none. ``polls``: both sides
    poll as often as an engine's writer thread, or without a pause. ``corrupt`` damages D before it is checked.
    """

    seed: int = 0
    cache_bytes: int = 128 << 20
    staging_bytes: int = 64 << 20
    device: str = "cpu"
    agent_threads: int = 4
    progress: Progress = "calm"
    polls: Polls = "engine"
    corrupt: bool = False
