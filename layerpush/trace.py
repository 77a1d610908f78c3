"""What happened to each push, as JSON lines that a person or a plot can read.

The writer thread fills a ``PushRecord`` per push and hands it to ``TraceFile``, whose own thread writes it: neither
the forward pass nor the transport ever waits for a disk. A full queue drops records and counts them.
All times are ``time.perf_counter()`` seconds, which every process of one Linux machine shares.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from pathlib import Path

import msgspec

QUEUE_LIMIT = 1024


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


class TraceFile:
    """Appends records to ``<directory>/<engine>-rank<rank>-<pid>.jsonl``. ``directory`` None keeps nothing."""

    def __init__(self, directory: str | None, engine_id: str, rank: int) -> None:
        self.dropped = 0
        self._queue: queue.Queue[PushRecord | None] = queue.Queue(QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        if directory is None:
            return
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{engine_id.replace('/', '_')}-rank{rank}-{os.getpid()}.jsonl"
        self._thread = threading.Thread(target=self._write, args=(path,), name="layerpush-trace", daemon=True)
        self._thread.start()

    @property
    def enabled(self) -> bool:
        return self._thread is not None

    def add(self, record: PushRecord) -> None:
        """Queue one finished push. Never blocks. Writer thread."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=2)
            self._thread.join(timeout=2)
            self._thread = None

    def _write(self, path: Path) -> None:
        encoder = msgspec.json.Encoder()
        with path.open("ab", buffering=0) as file:
            while (record := self._queue.get()) is not None:
                file.write(encoder.encode(record) + b"\n")
