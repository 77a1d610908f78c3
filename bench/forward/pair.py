"""The surroundings of a writer without an engine: D is connected, and a whole request is one WRITE."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from bench.forward.reach import DECODE, Reach
from layerpush.core.wire import Completed, Registration, encode, encode_completion
from layerpush.core.write import WHOLE, Segment, Write
from layerpush.prefill.push import BlockIds
from layerpush.prefill.push_protocol import ReportFailure, SendFirstToken
from layerpush.prefill.pushes import Pushes
from layerpush.prefill.samples import Sample
from layerpush.telemetry.trace_records import WriteSums
from layerpush.transport.base import Transport
from layerpush.transport.connections import Then
from layerpush.transport.link import Link
from layerpush.transport.link_speed import LinkSpeed
from layerpush.transport.transfer import Transfer
from layerpush.transport.writes import Writes


class WorkerStub:
    """Plays ``Links``, ``Claims`` and vLLM's worker. The writer thread calls ``registered``.

    P's main thread calls ``expects`` and waits for ``all_known`` and ``all_over``.
    """

    pushes: Pushes

    def __init__(self, reach: Reach, transport: Transport) -> None:
        self.worker = self.transfer_stats = self
        self._reach = reach
        self._transport = transport
        self._writes = Writes(transport, reach.cache.layout)
        self._pending: dict[str, Registration] = {}
        self._whole: dict[str, Registration] = {}
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

    # layerpush.prefill.links.Links

    def is_connected(self, registration: Registration) -> bool:  # noqa: ARG002
        return True

    def connect(self, registration: Registration, then: Then) -> None:  # noqa: ARG002
        then(None, time.perf_counter())

    def refusal(self, registration: Registration) -> None:
        """D takes every WRITE."""

    def to(self, registration: Registration) -> Link:  # noqa: ARG002
        return self._reach.link

    def has_equal_block_size(self, registration: Registration) -> bool:  # noqa: ARG002
        return True

    def push_whole(self, request_id: str, blocks: BlockIds, registration: Registration) -> None:
        """As a stock connector does after prefill: one WRITE of all blocks in all layers, from cache to cache."""
        layout = self._reach.cache.layout
        (sources,), (targets,) = blocks, registration.local_block_ids
        every = slice(0, len(layout.layers))
        part = Segment(every, 0, 0, len(targets), tuple(sources), targets)
        whole = Write(WHOLE.id, 0, 0, len(targets) * sum(layout.layer_bytes), (part,))
        self._whole[request_id] = registration
        for transfer in self._writes.post(whole, replace(self._reach.link, speed=LinkSpeed())):
            self.pushes.adopt(request_id, transfer, DECODE, registration.request_id)

    def complete(self, link: Link, registration: Registration, sample: Sample | None = None) -> None:
        for route in link.routes:
            message = encode_completion(registration.request_id, 1)
            if sample is not None:
                sums = sample.sums(route.remote_rank, sample.tokens)
                message = encode(Completed(registration.request_id, 1, sample.tokens, sums))
            self._transport.notify(route.agent, message)

    def lost(self, engine_id: str) -> None:
        self.problems.append(f"the connection to {engine_id} is lost")

    # layerpush.prefill.push.Registry

    def take_registration(self, request_id: str, now: float) -> Registration | None:  # noqa: ARG002
        return self._pending.pop(request_id, None)

    def is_unwanted(self, request_id: str, now: float) -> bool:  # noqa: ARG002
        return False

    def report_failure(self, report: ReportFailure, now: float) -> None:  # noqa: ARG002
        self.problems.append(f"{report.registration.request_id}: {report.reason}")

    def send_first_token(self, action: SendFirstToken, now: float) -> None:
        """Does nothing: no request asks for P's token."""

    def push_ended(self, request_id: str, failure: str | None, now: float) -> None:  # noqa: ARG002
        if failure is not None:
            self.problems.append(f"{request_id}: {failure}")
        self._whole.pop(request_id, None)
        self._running.discard(request_id)
        if not self._running:
            self.all_over.set()

    # layerpush.compat.push_worker.VllmPushWorker

    def whole_write_ended(self, request_id: str, transfer: Transfer, landed: bool) -> None:  # noqa: ARG002
        if landed:  # each of D's ranks gets a completion of its own
            self._transport.notify(DECODE, encode_completion(self._whole[request_id].request_id, 1))

    def pushed(self, written: WriteSums, transfer_s: float) -> None:
        """Does nothing: no vLLM counts transfers."""

    def failed(self) -> None:
        """Does nothing, for the same reason."""

    def report_sent(self, request_id: str) -> None:
        """Does nothing: no scheduler holds the blocks."""
