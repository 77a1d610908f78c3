"""WRITEs on the wire: posted for a push, polled by it, and released when they have ended. Writer thread only.

A session asks for a ``Write``: some layers and blocks, for every decode rank. ``Writes.post`` makes of it one
``Transfer`` for each rank, which is on the wire from then on. Its ``WriteRecord`` has its times and its plan.

A push owns its transfers. It polls each until it has landed or failed, and then hands it to ``Writes.release``.
``Writes`` keeps only the transfers whose release failed, and tries again.

A ``Transfer`` goes straight from cache to cache. A ``StagedWrite`` (``transport.gather.gatherer``) is a transfer that
goes through staging memory. Both have ``poll``, ``cancel_unposted`` and ``release``: a push treats them alike.

A worker with staging memory has a ``GatherStrategy``. It decides whether a WRITE is staged. It never makes a WRITE
wait.

Rules:

- A transfer's memory, on both sides, is in use until ``poll`` has returned ``LANDED`` or has raised ``TransportError``.
  Nothing else ends a WRITE: neither ``cancel_unposted`` nor ``release`` is a cancel.
- ``release`` comes after that, once. Only a shutdown that has waited long enough releases earlier.
- A transfer moves on when it is polled. One that is staged does nothing in between (``needs_polling``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator

from layerpush.core.layout import CacheLayout
from layerpush.core.write import Write
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.base import Transport, TransportError
from layerpush.transport.gather.strategy import GatherStrategy
from layerpush.transport.link import DirectPlanner, Link
from layerpush.transport.transfer import Transfer

logger = logging.getLogger(f"vllm.{__name__}")


class Writes:
    """All WRITEs of one prefill rank. Without ``strategy`` none is staged. One that is on the wire for more than
    ``timeout_s`` seconds is overdue: its push fails.
    """

    def __init__(
        self,
        transport: Transport,
        layout: CacheLayout,
        strategy: GatherStrategy | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        self.timeout_s = timeout_s
        self.layout = layout
        self._transport = transport
        self._strategy = strategy
        self._planner = DirectPlanner(layout)
        self._unreleased: list[Transfer] = []
        self._next_release = 0.0

    @property
    def has_leftovers(self) -> bool:
        """Whether ended WRITEs wait for another try to release them."""
        return bool(self._unreleased)

    def post(self, write: Write, link: Link) -> Iterator[Transfer]:
        """Post ``write`` to one rank of ``link`` after the other; a WRITE that moves no blocks is posted to none.

        After an exception nothing of the transfer whose turn it was is on the wire. Raises ``LookupError`` for a block
        that one side does not have, ``TransportError``, or another error.
        """
        local, remote = self._planner.descriptors(write, link)
        for route in link.routes if len(local) else ():
            record = _record(write, route.remote_rank, len(local), int(write.size * link.share))
            transfer: Transfer | None = None
            if self._strategy is not None and link.gathered is not None:
                transfer = self._strategy.begin(write, link.gathered, (local, remote), record, link.speed)
            if transfer is None:
                handle = self._transport.post_write(route, local, remote)
                record.t_posted = time.perf_counter()
                transfer = Transfer(self._transport, record, handle)
            transfer.write = write.id
            yield transfer

    def release(self, transfer: Transfer) -> None:
        """Release a WRITE that has ended, now or with ``release_leftovers``."""
        if not _released(transfer):
            self._unreleased.append(transfer)

    def release_leftovers(self, now: float, every: float) -> None:
        """Try again to release WRITEs that ``release`` could not, at most once in ``every`` seconds."""
        if self._unreleased and now >= self._next_release:
            self._next_release = now + every
            self._unreleased = [transfer for transfer in self._unreleased if not _released(transfer)]


def _released(transfer: Transfer) -> bool:
    try:
        transfer.release()
    except TransportError as error:
        logger.warning("a WRITE's handle is kept until it can be released: %s", error)
        return False
    return True


def _record(write: Write, rank: int, descriptors: int, size: int) -> WriteRecord:
    layers = [part.layers for part in write.segments]
    now = time.perf_counter()
    return WriteRecord(
        remote_rank=rank,
        layers=(min(part.start for part in layers), max(part.stop for part in layers) - 1),
        chunks=(write.chunk, write.chunk),
        descriptors=descriptors,
        bytes=size,
        t_post=now,
        t_posted=now,
    )
