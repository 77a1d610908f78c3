"""A writer's host without a worker: D is connected, and a whole request is one WRITE."""

from __future__ import annotations

import threading

from bench.forward.reach import DECODE, Reach
from layerpush.core.wire import Registration, encode_completion
from layerpush.core.write import WHOLE, Segment, Write
from layerpush.prefill.push import Push
from layerpush.prefill.push_protocol import ReportFailure, SendFirstToken
from layerpush.telemetry.trace_records import WriteSums
from layerpush.transport.base import Transport
from layerpush.transport.link import Link
from layerpush.transport.link_speed import LinkSpeed
from layerpush.transport.transfer import Transfer
from layerpush.transport.writes import Writes


class PairHost:
    """A ``Host``. The writer thread calls ``registered``.

    P's main thread calls ``expects`` and waits for ``all_known`` and ``all_over``.
    """

    def __init__(self, reach: Reach, transport: Transport) -> None:
        self._reach = reach
        self._transport = transport
        self._writes = Writes(transport, reach.cache.layout)
        self._pending: dict[str, Registration] = {}
        self._delegated: dict[str, Registration] = {}
        self._unknown: set[str] = set()
        self._running: set[str] = set()
        self.all_known = threading.Event()
        self.all_over = threading.Event()
        self.problems: list[str] = []

    def expects(self, request_ids: tuple[str, ...]) -> None:
        """Expect the registrations and the ends of these requests. Main thread, while no push runs."""
        self._unknown, self._running = set(request_ids), set(request_ids)
        for event in (self.all_known, self.all_over) if request_ids else ():
            event.clear()

    def registered(self, registration: Registration) -> None:
        self._pending[registration.request_id] = registration
        self._unknown.discard(registration.request_id)
        if not self._unknown:
            self.all_known.set()

    def connect(self, push: Push, registration: Registration) -> Link:  # noqa: ARG002
        return self._reach.link

    def take_registration(self, request_id: str) -> Registration | None:
        return self._pending.pop(request_id, None)

    def is_unwanted(self, request_id: str) -> bool:  # noqa: ARG002
        return False

    def delegate(self, push: Push, registration: Registration) -> None:
        """As a stock connector does after prefill: one WRITE of all blocks in all layers, from cache to cache."""
        layout = self._reach.cache.layout
        (sources,), (targets,) = push.blocks, registration.local_block_ids
        every = slice(0, len(layout.layers))
        part = Segment(every, 0, 0, len(targets), tuple(sources), targets)
        whole = Write(WHOLE.id, 0, 0, len(targets) * sum(layout.layer_bytes), (part,))
        self._delegated[push.request_id] = registration
        for transfer in self._writes.post(whole, self._reach.link, LinkSpeed()):
            push.adopt(transfer, DECODE, registration.request_id)

    def report_failure(self, report: ReportFailure) -> None:
        self.problems.append(f"{report.registration.request_id}: {report.reason}")

    def send_first_token(self, action: SendFirstToken) -> None:
        """Does nothing: no request asks for P's token."""

    def ended(self, request_id: str, failure: str | None) -> None:
        if failure is not None:
            self.problems.append(f"{request_id}: {failure}")
        self._delegated.pop(request_id, None)
        self._running.discard(request_id)
        if not self._running:
            self.all_over.set()

    def peer_lost(self, decode_engine_id: str) -> None:
        self.problems.append(f"the connection to {decode_engine_id} is lost")

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:  # noqa: ARG002
        if landed:  # each of D's ranks gets a completion of its own
            self._transport.notify(DECODE, self.completion(self._delegated[request_id]))

    def pushed_by_layer(self, written: WriteSums, transfer_s: float) -> None:
        """Does nothing: no vLLM counts transfers."""

    def failed_by_layer(self) -> None:
        """Does nothing, for the same reason."""

    def completion(self, registration: Registration) -> bytes:
        return encode_completion(registration.request_id, 1)

    def release(self, request_id: str) -> None:
        """Does nothing: no scheduler holds the blocks."""
