"""The settings of both processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.pair.settings import Settings

Packing = Literal["auto", "off", "gather", "packed"]


@dataclass(frozen=True)
class ForwardSettings(Settings):
    """``layer_s`` seconds of matrix products make one layer of one step, on ``forward_threads`` threads.

    ``noise_bytes`` are those that the KV of every case is cut from, ``min_write_bytes`` and ``packing`` the
    connector's settings.
    """

    layer_s: float = 5e-3
    forward_threads: int = 1
    noise_bytes: int = 64 << 20
    min_write_bytes: int = 256 << 10
    packing: Packing = "auto"
