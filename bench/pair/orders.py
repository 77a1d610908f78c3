"""What the processes of every benchmark tell each other beside NIXL."""

from __future__ import annotations

from dataclasses import dataclass


class WrongBytesError(Exception):
    """D's memory is not what it must be. What was measured means nothing."""


@dataclass(frozen=True)
class Introduction:
    """From D, and from P: what the other side needs to reach it. ``digest`` is that of P's bytes."""

    metadata: bytes
    memory: int
    ring: int
    device_id: int
    digest: bytes = b""


@dataclass(frozen=True)
class UseCache:
    """To D: its memory is the cache of so many layers now, with blocks of so many bytes."""

    block_bytes: int
    layers: int


@dataclass(frozen=True)
class Expect:
    """To D: the blocks of a request, as a registration names them. The ``Registration`` comes back."""

    request_id: str
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Forget:
    """To D: nothing is written for this request any more."""

    request_id: str


@dataclass(frozen=True)
class Poison:
    """To D: no byte of the ring is as it was. The blocks are poisoned after each check."""


@dataclass(frozen=True)
class CheckRest:
    """To D, after the last check of blocks: what is wrong with the rest of the memory, if anything, comes back."""
