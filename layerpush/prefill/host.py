"""What a writer needs to know of, and to ask from, the worker that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from layerpush.core.push_protocol import ReportFailure
from layerpush.core.wire import Registration
from layerpush.transport.link import Link
from layerpush.transport.writes import Transfer

if TYPE_CHECKING:
    from layerpush.prefill.push import Push


class HandshakeError(RuntimeError):
    """A decode engine cannot be reached, or is not one that we can write to."""


class Host(Protocol):
    """What pushes need from the worker that they run in. Called on the writer thread."""

    def connect(self, push: Push, registration: Registration) -> Link | None:
        """The way to a decode engine, with the window that it offers this request, if we can write there; None while
        the handshake runs (``Push.reconnect`` follows).

        Raises ``HandshakeError``; whatever is raised ends the push.
        """

    def take_registration(self, request_id: str) -> Registration | None:
        """The registration that came before its request, if one did."""

    def is_unwanted(self, request_id: str) -> bool:
        """Whether the request's registration was cancelled before the request was there."""

    def delegate(self, push: Push, registration: Registration) -> None:
        """Push the request whole, as upstream does; its WRITEs come back through ``PushWriter.adopt``."""

    def report_failure(self, report: ReportFailure) -> None:
        """Tell the decode engine that no completion will come. Raises nothing."""

    def ended(self, request_id: str, failure: str | None) -> None:
        """A request's push is over here, or never began; ``failure`` says why no completion was sent."""

    def peer_lost(self, decode_engine_id: str) -> None:
        """The connection to a decode engine is gone. Raises nothing."""

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:
        """One of upstream's WRITEs is over; its handle is still valid."""

    def completion(self, registration: Registration) -> bytes:
        """The notification that tells a decode rank that this rank is done."""

    def release(self, request_id: str) -> None:
        """Report the request as sent, so that the scheduler frees its blocks."""


@dataclass(frozen=True)
class Identity:
    """Who writes: for records and log lines. ``mode`` is what the configuration asks for where a request does not
    choose, ``fallback`` why this engine cannot push by layer or chunk."""

    engine_id: str
    rank: int
    mode: str
    fallback: str | None = None
