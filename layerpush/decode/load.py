"""Requests that await a push, and the engine that is told how that ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from layerpush.core.load_session import DecodeSession
from layerpush.core.wire import Registration
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.connections import Address, Rank


class LoadHost(Protocol):
    """Where the outcome of an awaited push goes. Writer thread."""

    def knows(self, request_id: str) -> bool:
        """Whether the engine's main thread tracks the request: an outcome before that would be lost."""

    def loaded(self, completions: list[bytes]) -> None:
        """Every byte is there; ``completions`` are the notifications that say so."""

    def failed(self, request_id: str) -> None:
        """The load failed: ``kv_load_failure_policy`` decides what becomes of the request."""

    def parked(self, request_id: str) -> None:
        """Somebody may still write: the blocks must not be used until ``cleared``. Comes before ``failed``."""

    def cleared(self, request_id: str) -> None:
        """Nobody writes any more into what was parked."""


@dataclass(slots=True)
class Awaited:
    """One request's session, the prefill engine that is to fill its blocks, and what that engine's ranks have sent."""

    session: DecodeSession
    address: Address
    registration: Registration
    payload: bytes
    since: float
    record: LoadRecord
    completions: list[bytes] = field(default_factory=list)
    ranks: dict[str, Rank] = field(default_factory=dict)
    dropped: bool = False
