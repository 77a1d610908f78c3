"""Messages beside NIXL: from the command to P, and between P and D."""

from __future__ import annotations

from dataclasses import dataclass

from bench.forward.cases import Case


class WrongBytesError(Exception):
    """D's memory has wrong bytes, so the figures mean nothing."""


@dataclass(frozen=True)
class Introduction:
    """From each side to the other: its NIXL metadata and its addresses. ``digest`` is of P's bytes."""

    metadata: bytes
    memory: int
    ring: int
    device_id: int
    digest: bytes


@dataclass(frozen=True)
class Measure:
    """To P: so many rounds of every mode in a case. ``CaseSamples`` or a ``WrongBytesError`` comes back."""

    case: Case
    modes: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class UseCache:
    """To D: from now on its memory is a cache of ``layers`` layers with blocks of ``block_bytes`` bytes.

    Or it is as many caches as D has ``ranks``, one after the other, with an equal part of each block in each of them.
    """

    block_bytes: int
    layers: int
    ranks: int = 1


@dataclass(frozen=True)
class RegisterBlocks:
    """To D: expect these blocks, and register them with P as a decode engine does, by a notification."""

    request_id: str
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Check:
    """To D: check that these requests were completed, and that their blocks hold the KV of forward ``turn``.

    The KV is that of one request after the other. D then poisons the blocks. ``Checked`` comes back.
    """

    turn: int
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """``problem`` is None if all is right. D had all completions at ``completed_at``, by ``time.perf_counter()``, and
    had compared ``verified`` parts with their checksums.
    """

    problem: str | None
    completed_at: float
    verified: int


@dataclass(frozen=True)
class CheckCeiling:
    """To D: check that the ring begins with the first ``size`` bytes of the noise. D then poisons these bytes."""

    size: int


@dataclass(frozen=True)
class CheckRest:
    """To D, after the last check of blocks: check the rest of the memory. The problem or None comes back."""
