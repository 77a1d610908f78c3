"""The interface of pushes to the worker that they run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from layerpush.core.push_protocol import ReportFailure, SendFirstToken
from layerpush.core.wire import Registration
from layerpush.telemetry.trace_records import WriteSums
from layerpush.transport.link import Link
from layerpush.transport.writes import Transfer

if TYPE_CHECKING:
    from layerpush.prefill.push import Push


class PeerRefusedError(RuntimeError):
    """Nothing may be written to the connected decode engine. The text has the reason."""


class Host(Protocol):
    """The worker, as far as pushes use it. Writer thread."""

    def connect(self, push: Push, registration: Registration) -> Link | None:
        """The link to a decode engine, with its window for this request, if it offers one. None while a handshake
        runs: ``Push.handshake_ended`` follows. If the handshake has just ended, it is called before the return.

        Raises ``PeerRefusedError``. Any exception ends the push.
        """

    def take_registration(self, request_id: str) -> Registration | None:
        """The registration that came before its request, if one did."""

    def is_unwanted(self, request_id: str) -> bool:
        """Whether D cancelled or declined the request, or P refused its registration, before the request was there."""

    def delegate(self, push: Push, registration: Registration) -> None:
        """Have upstream push the request whole; its WRITEs come back through ``PushWriter.adopt``."""

    def report_failure(self, report: ReportFailure) -> None:
        """Report to the decode engine that no completion will come. Raises nothing."""

    def send_first_token(self, action: SendFirstToken) -> None:
        """Send the decode engine the first token, or None if no token fits its request. Raises nothing."""

    def ended(self, request_id: str, failure: str | None) -> None:
        """A push is over, or never began. ``failure`` is the reason if no completion was sent. Raises nothing."""

    def peer_lost(self, decode_engine_id: str) -> None:
        """The connection to a decode engine is gone. Raises nothing."""

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:
        """One of upstream's WRITEs is over; its handle is still valid."""

    def pushed_by_layer(self, written: WriteSums, transfer_s: float) -> None:
        """A push by layer is complete. ``transfer_s``: seconds with at least one WRITE on the wire. Raises nothing."""

    def failed_by_layer(self) -> None:
        """A push by layer has failed. Raises nothing."""

    def completion(self, registration: Registration) -> bytes:
        """This rank's completion, as a notification."""

    def release(self, request_id: str) -> None:
        """Report the request as sent, so that the scheduler frees its blocks."""


@dataclass(frozen=True)
class Identity:
    """The rank that writes, for records. ``fallback`` is the reason why this engine cannot push by layer or chunk.
    ``model`` is the model's name. A step of at most ``captured_tokens`` tokens may replay a CUDA graph.
    """

    engine_id: str
    rank: int
    fallback: str | None = None
    model: str = ""
    captured_tokens: int = 0
