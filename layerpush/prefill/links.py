"""The way from a push to its decode engine: the connection, the link, vLLM's whole push, the completion.

Writer thread only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from layerpush.core.wire import (
    Cancel,
    Completed,
    PrefixLanded,
    Registration,
    Unregister,
    WireError,
    encode,
    encode_completion,
)
from layerpush.prefill.coverage import check_blocks
from layerpush.prefill.samples import Sample
from layerpush.transport.base import TransportError
from layerpush.transport.connections import Connections, Then
from layerpush.transport.link import Link
from layerpush.transport.peers import Address

if TYPE_CHECKING:
    from layerpush.compat.push_worker import VllmPushWorker

logger = logging.getLogger(f"vllm.{__name__}")

NO_ANSWER = "the decode engine does not acknowledge WRITEs, and this NIXL backend needs that"
OLD_RELEASE = f"{NO_ANSWER}: it has an older release of layerpush"


class Links:
    """Knows where this rank writes on each connected decode engine."""

    def __init__(self, worker: VllmPushWorker, connections: Connections) -> None:
        self.worker = worker
        self._connections = connections

    def is_connected(self, registration: Registration) -> bool:
        """Whether an engine with the name of the registration's sender is connected."""
        return bool(self.worker.agents_of(registration.decode_engine_id))

    def connect(self, registration: Registration, then: Then) -> None:
        """Connect to the registration's sender unless it is connected, then call ``then``. That may be before the
        return.
        """
        self._connections.reach(address_of(registration), then, time.perf_counter())

    def refusal(self, registration: Registration) -> str | None:
        """The reason why nothing may be written to the connected engine for a registration; None if something may."""
        if self.worker.acknowledges and registration.layerpush and not registration.acknowledges:
            return OLD_RELEASE
        return self.worker.mismatch(registration.decode_engine_id)

    def to(self, registration: Registration) -> Link:
        """The link to the connected engine. Call it after ``refusal``."""
        engine_id = registration.decode_engine_id
        self.worker.touch_engine(engine_id)
        if self.worker.acknowledges and not registration.acknowledges:
            return Link(engine_id, (), (), refusal=NO_ANSWER)
        peer = self._connections.peers[engine_id]
        link = peer.link
        if link is None:
            link = peer.link = replace(self.worker.discover_link(engine_id), speed=peer.speed)
            if link.refusal is not None:
                logger.warning("layerpush pushes whole requests to decode engine %s: %s", engine_id, link.refusal)
        return link

    def has_equal_block_size(self, registration: Registration) -> bool:
        """Whether the connected engine's blocks have as many tokens as ours: vLLM can push whole requests to it."""
        return self.worker.has_equal_block_size(registration.decode_engine_id)

    def push_whole(self, request_id: str, blocks: Sequence[Sequence[int]], registration: Registration) -> None:
        """Have vLLM push a request whole to the connected engine; its WRITEs come back through ``Pushes.adopt``.

        Raises ``MismatchError`` if the registration names blocks that one side does not have, or vLLM's error.
        """
        engine_id, targets = registration.decode_engine_id, registration.local_block_ids
        self.worker.check_targets(engine_id, targets)
        if self.worker.counts_blocks_like(engine_id):
            check_blocks([len(group) for group in blocks], targets)
        self.worker.push_whole(request_id, blocks, msgspec.to_builtins(registration))

    def complete(self, link: Link, registration: Registration, sample: Sample | None = None) -> None:
        """Send this rank's completion to each rank of the decode engine, with the checksums of ``sample``.

        Raises ``TransportError``.
        """
        for route in link.routes:
            completion = encode_completion(registration.request_id, self.worker.world_size)
            if sample is not None and (sums := sample.sums(route.remote_rank, sample.tokens)):
                ours = Completed(registration.request_id, self.worker.world_size, sample.tokens, sums)
                completion = _encoded(ours, completion)
            self.worker.transport.notify(route.agent, completion)

    def report_prefix(self, link: Link, registration: Registration, tokens: int, sample: Sample | None = None) -> None:
        """Tell each rank of the decode engine that the prompt's first ``tokens`` tokens have landed, with the checksums
        of ``sample`` for them. It need not hear of it: a lost message costs a computation.
        """
        plain = PrefixLanded(registration.request_id, registration.number, tokens)
        for route in link.routes:
            message = encode(plain)
            if sample is not None and (sums := sample.sums(route.remote_rank, tokens)):
                message = _encoded(msgspec.structs.replace(plain, prompt_tokens=sample.tokens, sums=sums), message)
            with contextlib.suppress(TransportError):
                self.worker.transport.notify(route.agent, message)

    def lost(self, engine_id: str) -> None:
        """The connection to a decode engine turns out to be gone."""
        self._connections.lost(engine_id)


def _encoded(message: Completed | PrefixLanded, plain: bytes) -> bytes:
    """``message`` with its checksums, or ``plain`` if the layers have names that are too long."""
    try:
        return encode(message)
    except WireError as error:
        logger.warning("the checksums of %s are left out: %s", message.request_id, error)
        return plain


def address_of(message: Registration | Cancel | Unregister) -> Address:
    """The address of the engine that sent a message."""
    return Address(message.decode_engine_id, message.decode_host, message.decode_port, message.decode_tp_size)
