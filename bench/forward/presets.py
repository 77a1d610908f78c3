"""Values of all options that have no value on the command line."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.forward.cases import CHUNK_TOKENS
from bench.forward.models import SMALL, WHOLE


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
    most_mib=5120,
    growth=False,
    file="long.json",
)
