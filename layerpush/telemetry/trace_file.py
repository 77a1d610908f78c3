"""Where records go: a file for each worker, written by a thread of its own.

Neither the forward pass nor the transport ever waits for a disk, and what cannot be written is counted. The queue to
the thread is bounded, in records and in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import msgspec

from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.trace_records import DropRecord, ProcessRecord, Record, this_process

logger = logging.getLogger("vllm.layerpush.trace")

QUEUE_LIMIT = 1024
ROWS_LIMIT = 1 << 18
"""How many rows queued records may have in all, some 50 MB of them: a push of a long prompt has thousands."""
QUIET_S = 60.0
CLOSE_S = 2.0


class TraceFile:
    """Appends records to ``<directory>/<engine>-rank<rank>-<pid>.jsonl``. ``directory`` None keeps nothing.

    ``dropped`` counts records that were lost: the queue was full, the disk took nothing, the thread has died, which
    ``death`` then tells, or had no time to write them before the end. All of it is logged, at most once a minute.
    """

    def __init__(self, directory: str | None, engine_id: str, rank: int) -> None:
        self.death: str | None = None
        self._tally = _Tally()
        self._closing = False
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        self._peer_errors = PeerErrors(logger, QUIET_S)
        if directory is None:
            return
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{engine_id.replace('/', '_')}-rank{rank}-{os.getpid()}.jsonl"
        lines = _Lines(self._path, this_process(engine_id, rank))
        self._thread = threading.Thread(target=self._run, args=(lines,), name="layerpush-trace", daemon=True)
        self._thread.start()

    @property
    def enabled(self) -> bool:
        return self._thread is not None

    @property
    def dropped(self) -> int:
        """Any thread."""
        return self._tally.dropped

    def add(self, record: Record) -> None:
        """Queue what is over, and change it no more. Never blocks. Writer thread."""
        if self._thread is None:
            return
        rows, waiting = record.rows, self._tally.rows_waiting
        try:
            if waiting and waiting + rows > ROWS_LIMIT:
                raise queue.Full
            self._queue.put_nowait(record)
        except queue.Full:
            self._tally.crowded_out += 1
            behind = self._queue.qsize()
            text = f"the trace {self._path} is {behind} records of {waiting} rows behind: this one is dropped"
            self._peer_errors.add("trace behind", text, time.perf_counter())
        else:
            self._tally.queued(rows)

    def close(self) -> None:
        """Write what is queued and end the thread; what cannot be written within two seconds is left behind."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            self._closing = True
            self._tally.leave_behind()
        if self.dropped:
            logger.warning("layerpush: the trace %s lacks %d records", self._path, self.dropped)

    def _run(self, lines: _Lines) -> None:
        try:
            with contextlib.closing(lines):
                self._write_to(lines)
        except Exception as error:  # whatever it was: the engine goes on without a trace, and says so
            self._tally.lost_one()
            self.death = f"{type(error).__name__}: {error}"
            logger.exception("layerpush: the thread of the trace %s has died: nothing more is recorded", self._path)
            self._drain()

    def _write_to(self, lines: _Lines) -> None:
        peer_errors = PeerErrors(logger, QUIET_S)

        def attempt(write: Callable[[], None]) -> bool:
            try:
                write()
            except (OSError, ValueError) as error:  # a full disk may have room again; an id may be no text
                text = f"the trace {self._path} cannot be written: {error}"
                peer_errors.add("trace lost", text, time.perf_counter())
                return False
            return True

        told = 0
        attempt(lines.begin)
        while not self._closing:
            record = self._queue.get()
            dropped = self.dropped
            if dropped > told and attempt(partial(lines.put, DropRecord(records=dropped, t=time.perf_counter()))):
                told = dropped
            if record is None:
                return
            if attempt(partial(lines.put, record)):
                self._tally.handled(record.rows)
            else:
                self._tally.lost_one(record.rows)

    def _drain(self) -> None:
        """Go on taking records, so that each one is counted."""
        while (record := self._queue.get()) is not None and not self._closing:
            self._tally.lost_one(record.rows)


@dataclass
class _Tally:
    """What became of records. Each counter has one thread that changes it, so that none needs a lock."""

    crowded_out: int = 0
    records_queued: int = 0
    rows_queued: int = 0
    records_handled: int = 0
    rows_handled: int = 0
    unwritten: int = 0
    left_behind: int = 0

    @property
    def dropped(self) -> int:
        return self.crowded_out + self.unwritten + self.left_behind

    @property
    def rows_waiting(self) -> int:
        return self.rows_queued - self.rows_handled

    def queued(self, rows: int) -> None:
        self.records_queued += 1
        self.rows_queued += rows

    def handled(self, rows: int) -> None:
        self.records_handled += 1
        self.rows_handled += rows

    def lost_one(self, rows: int = 0) -> None:
        """It could not be written."""
        self.unwritten += 1
        self.handled(rows)

    def leave_behind(self) -> None:
        """Nobody waits for the rest. One that is just being written may still make it."""
        self.left_behind = max(0, self.records_queued - self.records_handled)


class _Lines:
    """A file of whole lines, the first of which is ``head``. A line that the disk took a part of is ended before the
    next. If somebody deletes the file, a new one takes its place.
    """

    def __init__(self, path: Path, head: ProcessRecord) -> None:
        self._path = path
        self._head = head
        self._file: FileIO | None = None
        self._has_head = False
        self._torn = False
        self._encoder = msgspec.json.Encoder()

    def begin(self) -> None:
        """Make the file. Raises ``OSError``."""
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            self.close()
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._has_head = False
            self._torn = os.fstat(self._file.fileno()).st_size > 0  # what a process of the same pid left may be
        if not self._has_head:
            self._write(self._file, self._encoder.encode(self._head))
            self._has_head = True

    def put(self, record: msgspec.Struct) -> None:
        """Raises ``OSError``, and ``ValueError`` for what is no JSON."""
        line = self._encoder.encode(record)
        self.begin()
        assert self._file is not None
        self._write(self._file, line)

    def _write(self, file: FileIO, line: bytes) -> None:
        whole = b"\n" * self._torn + line + b"\n"
        self._torn = file.write(whole) < len(whole)
        if self._torn:
            raise OSError("the disk took a part of a line only")

    def close(self) -> None:
        """Raises ``OSError``."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
