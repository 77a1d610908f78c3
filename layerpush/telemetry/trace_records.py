"""What happened to each push on P and to each load on D, as JSON lines that a person or a plot can read.

The writer thread fills a ``PushRecord`` per push and a ``LoadRecord`` per load and hands it to a ``TraceFile``.
All times are ``time.perf_counter()`` seconds; a file's first line names the clock that they were read from.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import msgspec


class ProcessRecord(msgspec.Struct, kw_only=True):
    """The first line of a file: who wrote it, and two readings of one moment, ``t`` and ``unix`` (``time.time()``).

    Processes with equal ``clock`` read the same clock, so their times can be compared as they are.
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
    """``records`` that should stand in this file, counted from its beginning, are lost."""

    kind: str = "dropped"
    records: int
    t: float


class ChunkRecord(msgspec.Struct):
    start_block: int
    end_block: int
    t_planned: float


class WriteRecord(msgspec.Struct):
    """One posted WRITE. ``layers`` and ``chunks`` are first and last; ``bytes`` counts what went to this rank.

    ``plan`` is "direct", "gathered" or "packed"; its descriptors merge into ``runs``, and ``estimate_s`` is how many
    seconds it was estimated to take from ``t_planned`` on. None where nothing is packed.
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


class PushRecord(msgspec.Struct, kw_only=True):
    """One push on one prefill rank. ``ready`` rows are ``(chunk, layer, time, hooked)``."""

    kind: str = "push"
    request_id: str
    decode_request_id: str | None = None
    engine_id: str
    decode_engine_id: str | None = None
    rank: int
    mode: str
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

    def ready_at(self, chunk: int, layer: int, at: float, hooked: bool, *, keep: bool = True) -> None:
        """Count a layer of a chunk as ready; ``keep`` its row too."""
        if keep:
            self.ready.append((chunk, layer, at, hooked))
        self.t_last_ready = at
        if hooked:
            self.hooked_layers += 1
        else:
            self.swept_layers += 1

    @property
    def rows(self) -> int:
        """What it takes of a queue."""
        return 1 + len(self.chunks) + len(self.ready) + len(self.writes)

    def restart(self, epoch: int) -> None:
        """A preempted prompt is computed again: what was ready is not. WRITEs stay, they were real."""
        self.epoch = epoch
        self.chunks, self.ready = [], []
        self.hooked_layers = self.swept_layers = 0


class LoadRecord(msgspec.Struct, kw_only=True):
    """One awaited push on one decode rank. ``clock_offset`` is what P's clock is ahead of D's, in seconds, as the
    handshake between them measured it.
    """

    kind: str = "load"
    request_id: str
    prefill_request_id: str | None = None
    engine_id: str
    prefill_engine_id: str | None = None
    rank: int = 0
    outcome: str = "pending"
    reason: str | None = None
    blocks: int = 0
    clock_offset: float | None = None
    t_awaited: float | None = None
    t_registered: float | None = None
    t_accepted: float | None = None
    t_settled: float | None = None
    t_reported: float | None = None
    t_parked: float | None = None
    t_cleared: float | None = None

    def settled(self, outcome: str, reason: str | None, at: float) -> None:
        """The last word was heard, or nobody waits for it any more."""
        self.outcome, self.reason, self.t_settled = outcome, reason, at

    @property
    def rows(self) -> int:
        """What it takes of a queue."""
        return 1


Record = PushRecord | LoadRecord


def this_process(engine_id: str, rank: int) -> ProcessRecord:
    """What is known of the calling process and its clock."""
    return ProcessRecord(
        engine_id=engine_id,
        rank=rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        clock=_clock(),
        t=time.perf_counter(),
        unix=time.time(),
    )


def _clock() -> str:
    """Names the clock behind ``time.perf_counter()``: that of a boot, as a time namespace shifts it."""
    boot, namespace = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/time")
    return f"{boot}/{namespace}"
