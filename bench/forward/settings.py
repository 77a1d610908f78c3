"""The settings of both processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.forward.cores import Cores

Progress = Literal["calm", "spin"]
Packing = Literal["auto", "off", "gather"]

POISON = 0xEE
"""No byte of P's blocks has this value."""


@dataclass(frozen=True)
class ForwardSettings:
    """``cache_bytes`` are those of each side's KV cache.

    ``progress`` chooses NIXL's progress thread: one turn a millisecond, or a busy loop. ``packing`` is the
    connector's setting. ``layer_s`` seconds of matrix products on one thread make one layer of one step. The KV of
    every case is a slice of ``noise_bytes`` bytes. ``cores`` is None if no thread is bound to a core. ``corrupt``
    damages D before it is checked.
    """

    seed: int = 0
    cache_bytes: int = 128 << 20
    staging_bytes: int = 64 << 20
    device: str = "cpu"
    progress: Progress = "calm"
    packing: Packing = "auto"
    layer_s: float = 5e-3
    noise_bytes: int = 64 << 20
    cores: Cores | None = None
    corrupt: bool = False
