"""News of loads, from D's ranks to D's scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from layerpush.core.first_token import Missing


@dataclass(frozen=True, slots=True)
class LoadParked:
    """A load failed on this rank while a prefill engine may still write into its blocks."""

    request_id: str
    rank: int


@dataclass(frozen=True, slots=True)
class LoadKept:
    """A load is over on a rank without all of its KV. That of the prompt's first ``tokens`` tokens has landed there.

    It comes before the rank reports the load to vLLM. A rank that has all of the KV sends none.
    """

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class LoadCleared:
    """No prefill rank may write any more into the blocks of a parked load of this rank."""

    request_id: str
    rank: int


@dataclass(frozen=True, slots=True)
class LoadCompleted:
    """A rank read the last completion of a load at ``at`` seconds of ``clock``. See ``trace_records.clock_name``."""

    request_id: str
    at: float
    clock: str


@dataclass(frozen=True, slots=True)
class LoadToken:
    """P's first token for a complete load that has asked for one, or the reason that there is none."""

    request_id: str
    token: int | Missing


@dataclass(frozen=True, slots=True)
class LoadQueued:
    """P cannot begin a load for want of blocks. ``computed``: names of the prompts that P holds."""

    request_id: str
    computed: frozenset[str]


@dataclass(frozen=True, slots=True)
class LoadUnregistered:
    """This rank has unregistered a load that is to be registered again."""

    request_id: str
    rank: int


BlockNews = LoadParked | LoadKept | LoadCleared
"""The subject is a load's blocks. They outlive its request."""
RequestNews = LoadCompleted | LoadToken | LoadQueued | LoadUnregistered
"""The subject is a request. News of one that the engine has finished means nothing."""
LoadNews = BlockNews | RequestNews
