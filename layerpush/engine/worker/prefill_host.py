"""P's side of a worker: makes the writer and the claims, and connects pushes to vLLM's worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from layerpush.core.wire import Registration, encode_completion
from layerpush.engine.worker.guard import Guard
from layerpush.prefill.claims import Claims
from layerpush.prefill.coverage import check_blocks
from layerpush.prefill.decode_peers import address_of
from layerpush.prefill.push import Host, PeerRefusedError, Push
from layerpush.prefill.push_protocol import ReportFailure, SendFirstToken
from layerpush.prefill.writer import PushWriter
from layerpush.transport.connections import Connections
from layerpush.transport.link import Link

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker
    from layerpush.engine.worker.packing import WorkerPacking

logger = logging.getLogger(f"vllm.{__name__}")

RESTARTED = "the decode engine was restarted after it had registered"
NO_ANSWER = "the decode engine does not acknowledge WRITEs, and this NIXL backend needs that"
OLD_RELEASE = f"{NO_ANSWER}: it has an older release of layerpush"


class WorkerHost:
    """Makes the writer and the claims, and is the host of their pushes. ``Host`` documents the methods. Writer
    thread only.

    ``on_lost`` gets the id of a decode engine whose connection is gone.
    """

    def __init__(
        self,
        worker: VllmPushWorker,
        connections: Connections,
        packing: WorkerPacking,
        on_lost: Callable[[str], None],
        make_writer: Callable[[Host], PushWriter],
        make_claims: Callable[[PushWriter], Claims],
    ) -> None:
        self._worker = worker
        self._connections = connections
        self._packing = packing
        self.peer_lost = on_lost
        self.release = worker.report_sent
        self.whole_write_ended = worker.whole_write_ended
        self.pushed_by_layer = worker.transfer_stats.pushed
        self.failed_by_layer = worker.transfer_stats.failed
        self._links: dict[str, Link] = {}
        self.writer = make_writer(self)
        self.claims = make_claims(self.writer)
        self.guard = Guard(self.writer.fail)

    def connect(self, push: Push, registration: Registration) -> Link | None:
        engine_id = registration.decode_engine_id
        if not self._worker.agents_of(engine_id):
            self._connections.reach(
                address_of(registration), lambda error, _: push.handshake_ended(error), time.perf_counter()
            )
            return None
        refusal = self._refusal(registration)
        if refusal is not None:
            raise PeerRefusedError(refusal)
        self._worker.touch_engine(engine_id)
        if self._worker.acknowledges and not registration.acknowledges:
            return Link(engine_id, (), (), refusal=NO_ANSWER)
        link = self._links.get(engine_id)
        if link is None:
            link = self._links[engine_id] = self._packing.with_gathering(self._worker.discover_link(engine_id))
            if link.refusal is not None:
                logger.warning("layerpush pushes whole requests to decode engine %s: %s", engine_id, link.refusal)
        return link

    def disconnected(self, engine_id: str) -> None:
        """Forget the link to a decode engine."""
        self._links.pop(engine_id, None)

    def take_registration(self, request_id: str) -> Registration | None:
        return self.claims.take(request_id, time.perf_counter())

    def is_unwanted(self, request_id: str) -> bool:
        return self.claims.is_unwanted(request_id, time.perf_counter())

    def delegate(self, push: Push, registration: Registration) -> None:
        def connected(error: str | None, _: float) -> None:
            if not push.is_delegated:
                return
            reason = error or self._refusal(registration)
            if reason is not None:
                push.fail(reason)
                return
            self.guard("a push", push.request_id, partial(self._push_whole, push, registration))

        self._connections.reach(address_of(registration), connected, time.perf_counter())

    def report_failure(self, report: ReportFailure) -> None:
        self.guard("a failure report", None, partial(self.claims.report_failure, report, time.perf_counter()))

    def send_first_token(self, action: SendFirstToken) -> None:
        self.guard("a first token", None, partial(self.claims.send_first_token, action, time.perf_counter()))

    def ended(self, request_id: str, failure: str | None) -> None:
        self.guard("an ending", None, partial(self.claims.ended, request_id, failure, time.perf_counter()))

    def completion(self, registration: Registration) -> bytes:
        return encode_completion(registration.request_id, self._worker.world_size)

    def _refusal(self, registration: Registration) -> str | None:
        """The reason why nothing may be written to the engine that is connected under the registration's name."""
        closing = self.claims.peers.closing(registration.decode_engine_id)
        if closing is not None:
            return closing
        if not self.claims.is_current(registration):
            return RESTARTED
        if self._worker.acknowledges and registration.layerpush and not registration.acknowledges:
            return OLD_RELEASE
        return self._worker.mismatch(registration.decode_engine_id)

    def _push_whole(self, push: Push, registration: Registration) -> None:
        targets = registration.local_block_ids
        self._worker.check_targets(registration.decode_engine_id, targets)
        if self._worker.counts_blocks_like(registration.decode_engine_id):
            check_blocks([len(group) for group in push.blocks], targets)
        self._worker.push_whole(push.request_id, push.blocks, msgspec.to_builtins(registration))
