"""A WRITE of KV blocks from P to D. Pure."""

from __future__ import annotations

from dataclasses import dataclass


class MismatchError(ValueError):
    """The registered blocks cannot be the last blocks of the prompt. The text has the reason."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt blocks ``[first, end)`` of layers ``[layers.start, layers.stop)``, all of one KV cache group.

    The decode engine has the prompt's first ``skipped`` blocks already, and registered the others.
    """

    layers: slice
    group: int
    first: int
    end: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Write:
    """One WRITE, to be posted to every decode rank. ``size`` is in bytes of this engine's memory."""

    id: int
    epoch: int
    chunk: int
    size: int
    segments: tuple[Segment, ...]


WHOLE = Write(-1, 0, 0, 0, ())
"""Stands for vLLM's WRITEs of a whole request: a session knows only whether they are on the wire."""
