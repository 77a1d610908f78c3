"""Values of all options that have no value on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from bench.forward.cases import CHUNK_TOKENS, POOL_FACTOR
from bench.forward.models import SMALL, WHOLE

MEMORY_SHARE = 0.7
"""Share of this machine's memory for the caches and the KV of a layer, on both sides."""
LAYER_SHARE = 0.05
"""A layer's KV, beside the cache on each side, as a share of a prompt's KV; each model has 20 layers or more."""


@dataclass(frozen=True)
class Preset:
    """``most_mib``: prompts with more KV are left out. ``points``: cases of each line of the growth.

    ``file`` is the result's name; None: no file.
    """

    models: tuple[str, ...]
    tokens: tuple[int, ...]
    ids: tuple[str, ...]
    chunk_tokens: int
    rounds: int
    most_mib: int
    growth: bool
    points: int
    file: str | None


def fitting_mib(memory: int) -> int:
    """MiB of KV of the longest prompt that fits on both sides into ``MEMORY_SHARE`` of ``memory`` bytes."""
    return int(MEMORY_SHARE * memory / (2 * (POOL_FACTOR + LAYER_SHARE))) >> 20


def memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


DEFAULT = Preset(
    models=WHOLE,
    tokens=(4096, 16384, 32768, 131072),
    ids=("contiguous", "random"),
    chunk_tokens=CHUNK_TOKENS,
    rounds=6,
    most_mib=640,
    growth=True,
    points=5,
    file="forward.json",
)
QUICK = replace(DEFAULT, tokens=(1024, 4096), ids=("random",), rounds=3, most_mib=160, points=3, file=None)
LONG = replace(
    DEFAULT,
    models=SMALL,
    tokens=(4096, 16384, 32768, 65536, 131072),
    ids=("random",),
    chunk_tokens=8192,
    rounds=3,
    most_mib=fitting_mib(memory_bytes()),
    growth=False,
    file="long.json",
)
