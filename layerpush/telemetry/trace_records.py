"""The trace records of pushes on P, and of loads and first tokens on D, written as JSON lines.

The writer thread fills a ``PushRecord`` per push and a ``LoadRecord`` per load, and passes it to a ``TraceFile``. D's
scheduler does the same with a ``FirstTokenRecord`` per load.
All times (``t``, ``t_*``) are ``time.perf_counter()`` seconds; a file's first line names their clock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import ClassVar

import msgspec

from layerpush.core.push_mode import PushMode

SCHEDULER_RANK = -1
"""The rank in the records of an engine's scheduler."""


class ProcessRecord(msgspec.Struct, kw_only=True):
    """The first line of a file: its process, and two clocks read at one moment, ``t`` and ``unix`` (``time.time()``).

    Processes with equal ``clock`` use the same clock, so their times can be compared directly.
    """

    kind: str = "process"
    engine_id: str
    rank: int
    pid: int
    host: str
    clock: str
    t: float
    unix: float


class DropRecord(msgspec.Struct, kw_only=True):
    """``records`` is the number of records that this file has lost so far."""

    kind: str = "dropped"
    records: int
    t: float


class ChunkRecord(msgspec.Struct):
    """Prompt blocks ``start_block`` to ``end_block``, exclusive. ``cached``: P's prefix cache had the chunk already."""

    start_block: int
    end_block: int
    t_planned: float
    cached: bool = False


class WriteRecord(msgspec.Struct):
    """One posted WRITE. ``layers`` and ``chunks`` are the first and the last index; ``bytes`` went to ``remote_rank``.

    ``plan`` is "direct" or "gathered". NIXL merges its descriptors into ``runs`` contiguous ones.
    ``estimate_s`` is the estimated time in seconds, from ``t_planned`` on. Without staging memory, ``runs``,
    ``estimate_s`` and ``t_planned`` are None.
    """

    remote_rank: int
    layers: tuple[int, int]
    chunks: tuple[int, int]
    descriptors: int
    bytes: int
    t_post: float
    t_posted: float
    t_landed: float | None = None
    plan: str = "direct"
    runs: int | None = None
    estimate_s: float | None = None
    t_planned: float | None = None


class WriteSums(msgspec.Struct):
    """The landed WRITEs of a push by layer: their bytes, their descriptors, the seconds that posting them took."""

    bytes: int = 0
    descriptors: int = 0
    post_s: float = 0.0

    def write_landed(self, write: WriteRecord) -> None:
        """One more has landed."""
        self.bytes += write.bytes
        self.descriptors += write.descriptors
        self.post_s += write.t_posted - write.t_post


class PushRecord(msgspec.Struct, kw_only=True):
    """One push on one prefill rank. ``ready`` rows are ``(chunk, layer, time, hooked)``."""

    kind: str = "push"
    request_id: str
    decode_request_id: str | None = None
    engine_id: str
    decode_engine_id: str | None = None
    rank: int
    mode: PushMode
    fallback: str | None = None
    outcome: str = "pending"
    reason: str | None = None
    epoch: int = 0
    tokens: int = 0
    chunks: list[ChunkRecord] = []
    ready: list[tuple[int, int, float, bool]] = []
    writes: list[WriteRecord] = []
    hooked_layers: int = 0
    swept_layers: int = 0
    t_registered: float | None = None
    t_first_planned: float | None = None
    t_last_ready: float | None = None
    t_last_landed: float | None = None
    t_notified: float | None = None

    def exposed_s(self, ready: float | None) -> float | None:
        """Seconds from ``ready``, the last layer being ready, until the last WRITE has landed. None if either is
        unknown. The wait for a decode engine that registers late counts: the request waits as well.
        """
        if ready is None or self.t_last_landed is None:
            return None
        return max(0.0, self.t_last_landed - ready)

    def ready_at(self, chunk: int, layer: int, at: float, hooked: bool | None, *, keep: bool = True) -> None:
        """Count a layer of a chunk as ready at ``at``. ``keep``: add its row, too. ``hooked`` None: a cached chunk."""
        if keep:
            self.ready.append((chunk, layer, at, bool(hooked)))
        self.t_last_ready = at
        if hooked:
            self.hooked_layers += 1
        elif hooked is not None:
            self.swept_layers += 1

    @property
    def rows(self) -> int:
        """Its size, in rows of the trace queue."""
        return 1 + len(self.chunks) + len(self.ready) + len(self.writes)

    def restart(self, epoch: int) -> None:
        """Begin an epoch after a preemption: layers ready so far no longer count. Posted WRITEs stay recorded."""
        self.epoch = epoch
        self.chunks, self.ready = [], []
        self.hooked_layers = self.swept_layers = 0


class LoadRecord(msgspec.Struct, kw_only=True):
    """One load on one decode rank. ``clock_offset`` is P's clock minus D's (seconds), measured by their handshake.
    ``kept_tokens``: the prompt's first tokens whose KV has landed, if the load has failed. ``verified_parts`` of KV
    were compared with P's, which took ``verify_s`` seconds.
    """

    rows: ClassVar[int] = 1
    """Its size, in rows of the trace queue."""
    kind: str = "load"
    request_id: str
    prefill_request_id: str | None = None
    engine_id: str
    prefill_engine_id: str | None = None
    rank: int = 0
    outcome: str = "pending"
    reason: str | None = None
    blocks: int = 0
    kept_tokens: int = 0
    verified_parts: int = 0
    verify_s: float = 0.0
    clock_offset: float | None = None
    t_awaited: float | None = None
    t_registered: float | None = None
    t_accepted: float | None = None
    t_settled: float | None = None
    t_reported: float | None = None
    t_parked: float | None = None
    t_cleared: float | None = None

    def settle(self, outcome: str, reason: str | None, at: float) -> None:
        """D has the final status of the push, or no longer waits for it."""
        self.outcome, self.reason, self.t_settled = outcome, reason, at


class FirstTokenRecord(msgspec.Struct, kw_only=True):
    """One request's first token on D. Times are on the scheduler's clock.

    ``t_all_reported`` is the time at which the scheduler had the report of all ranks that the load is over.
    ``t_scheduled`` is None if the token came without a step.
    """

    rows: ClassVar[int] = 1
    """Its size, in rows of the trace queue."""
    kind: str = "first_token"
    request_id: str
    engine_id: str
    t_all_reported: float
    t_scheduled: float | None = None
    t_first_token: float | None = None


Record = PushRecord | LoadRecord | FirstTokenRecord


def this_process(engine_id: str, rank: int) -> ProcessRecord:
    """The record of the calling process and its clock."""
    return ProcessRecord(
        engine_id=engine_id,
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        clock=clock_name(),
        t=time.perf_counter(),
        unix=time.time(),
    )


def clock_name() -> str:
    """A name of the clock of ``time.perf_counter()``: the boot that it belongs to, and its time namespace."""
    boot, namespace = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/time")
    return f"{boot}/{namespace}"
