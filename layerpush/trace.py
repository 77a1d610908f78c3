"""What happened to each push on P and to each load on D, as JSON lines that a person or a plot can read.

The writer thread fills a ``PushRecord`` per push and a ``LoadRecord`` per load and hands it to ``TraceFile``, whose own
thread writes it: neither the forward pass nor the transport ever waits for a disk. What cannot be written is counted.
All times are ``time.perf_counter()`` seconds; a file's first line names the clock that they were read from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from io import FileIO
from pathlib import Path

import msgspec

from layerpush.complaints import Complaints

logger = logging.getLogger("vllm.layerpush.trace")

QUEUE_LIMIT = 1024
QUIET_S = 60.0
CLOSE_S = 2.0


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
    """One posted WRITE. ``layers`` and ``chunks`` are first and last; ``bytes`` counts what went to this rank."""

    remote_rank: int
    layers: tuple[int, int]
    chunks: tuple[int, int]
    descriptors: int
    bytes: int
    t_post: float
    t_posted: float
    t_landed: float | None = None


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


Record = PushRecord | LoadRecord


class TraceFile:
    """Appends records to ``<directory>/<engine>-rank<rank>-<pid>.jsonl``. ``directory`` None keeps nothing.

    ``dropped`` counts records that were lost: the queue was full, the disk took nothing, or the thread has died, which
    ``death`` then tells. All three are logged, at most once a minute.
    """

    def __init__(self, directory: str | None, engine_id: str, rank: int) -> None:
        self.death: str | None = None
        self._crowded_out = 0  # each counter has one thread that changes it
        self._unwritten = 0
        self._queue: queue.Queue[Record | ProcessRecord | None] = queue.Queue(QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        self._complaints = Complaints(logger, QUIET_S)
        if directory is None:
            return
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{engine_id.replace('/', '_')}-rank{rank}-{os.getpid()}.jsonl"
        self._queue.put_nowait(this_process(engine_id, rank))
        self._thread = threading.Thread(target=self._run, name="layerpush-trace", daemon=True)
        self._thread.start()

    @property
    def enabled(self) -> bool:
        return self._thread is not None

    @property
    def dropped(self) -> int:
        """Any thread."""
        return self._crowded_out + self._unwritten

    def add(self, record: Record) -> None:
        """Queue what is over, and change it no more. Never blocks. Writer thread."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._crowded_out += 1
            text = f"the trace {self._path} is {QUEUE_LIMIT} records behind: this one is dropped"
            self._complaints.add("trace behind", text, time.perf_counter())

    def close(self) -> None:
        """Write what is queued and end the thread; what cannot be written within two seconds is left behind."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(timeout=CLOSE_S)
        self._thread = None
        if self.dropped:
            logger.warning("layerpush: the trace %s lacks %d records", self._path, self.dropped)

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # whatever it was: the engine goes on without a trace, and says so
            self._unwritten += 1
            self.death = f"{type(error).__name__}: {error}"
            logger.exception("layerpush: the thread of the trace %s has died: nothing more is recorded", self._path)
            self._drain()

    def _write(self) -> None:
        with contextlib.closing(_Lines(self._path)) as lines:
            self._write_to(lines)

    def _write_to(self, lines: _Lines) -> None:
        complaints = Complaints(logger, QUIET_S)
        told = 0
        while True:
            record = self._queue.get()
            try:
                if self.dropped > told:
                    told = self.dropped
                    lines.put(DropRecord(records=told, t=time.perf_counter()))
                if record is None:
                    return
                lines.put(record)
            except (OSError, ValueError) as error:  # a full disk may have room again; an id may be no text
                self._unwritten += record is not None
                complaints.add("trace lost", f"the trace {self._path} cannot be written: {error}", time.perf_counter())
                if record is None:
                    return

    def _drain(self) -> None:
        """Go on taking records, so that each one is counted."""
        while self._queue.get() is not None:
            self._unwritten += 1


class _Lines:
    """A file of whole lines. One that the disk took a part of is ended before the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._torn = False
        self._encoder = msgspec.json.Encoder()

    def put(self, record: msgspec.Struct) -> None:
        """Raises ``OSError``, and ``ValueError`` for what is no JSON."""
        line = b"\n" * self._torn + self._encoder.encode(record) + b"\n"
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        self._torn = self._file.write(line) < len(line)
        if self._torn:
            raise OSError("the disk took a part of a line only")

    def close(self) -> None:
        """Raises ``OSError``."""
        if self._file is not None:
            self._file.close()


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
