"""Messages between the processes of every benchmark, beside NIXL."""

from __future__ import annotations

from dataclasses import dataclass


class WrongBytesError(Exception):
    """D's memory has wrong bytes, so the figures mean nothing."""


@dataclass(frozen=True)
class Introduction:
    """From each side to the other: its NIXL metadata and its addresses. ``digest`` is of P's bytes."""

    metadata: bytes
    memory: int
    ring: int
    device_id: int
    digest: bytes = b""


@dataclass(frozen=True)
class UseCache:
    """To D: from now on its memory is a cache of ``layers`` layers with blocks of ``block_bytes`` bytes.

    Or it is as many caches as D has ``ranks``, one after the other, with an equal part of each block in each of them.
    """

    block_bytes: int
    layers: int
    ranks: int = 1


@dataclass(frozen=True)
class Expect:
    """To D: the blocks of a request, as a registration names them. The ``Registration`` comes back."""

    request_id: str
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Forget:
    """To D: no further WRITE comes for this request."""

    request_id: str


@dataclass(frozen=True)
class Poison:
    """To D: poison the ring. D poisons the blocks after each check."""


@dataclass(frozen=True)
class CheckRest:
    """To D, after the last check of blocks: check the rest of the memory. The problem or None comes back."""
