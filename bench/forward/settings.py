"""The settings of both processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.forward.cores import Cores
from bench.pair.settings import Settings

Packing = Literal["auto", "off", "gather", "packed"]


@dataclass(frozen=True)
class ForwardSettings(Settings):
    """``layer_s`` seconds of matrix products make one layer of one step, on ``forward_threads`` threads.

    The KV of every case is a slice of ``noise_bytes`` bytes. ``packing`` is the connector's setting.
    ``cores`` is None if no thread is bound to a core.
    """

    layer_s: float = 5e-3
    forward_threads: int = 1
    noise_bytes: int = 64 << 20
    packing: Packing = "auto"
    cores: Cores | None = None
