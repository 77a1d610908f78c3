"""Writes trace records to one file per worker, in a thread of its own.

Neither the forward pass nor the transport waits for a disk. Records that cannot be written are counted. The queue to
the thread is bounded, in records and in rows.
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

from layerpush.core.config import ConfigError
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.trace_records import SCHEDULER_RANK, DropRecord, ProcessRecord, Record, this_process

logger = logging.getLogger(f"vllm.{__name__}")

QUEUE_LIMIT = 1024
ROWS_LIMIT = 1 << 18
"""The most rows that queued records may have together, about 50 MB. A push of a long prompt has thousands."""
QUIET_S = 60.0
CLOSE_S = 2.0


class TraceFile:
    """Appends records to ``<directory>/<engine>-rank<rank>-<pid>.jsonl``, or ``<engine>-scheduler-<pid>.jsonl`` for
    ``SCHEDULER_RANK``. If ``directory`` is None, it writes nothing. Only the user of this process may read the file.

    ``dropped`` counts lost records: the queue was full, the disk refused them, the thread died, or it had no time for
    them at the end. All of it is logged, at most once a minute.
    """

    def __init__(self, directory: str | None, engine_id: str, rank: int) -> None:
        """Raises ``ConfigError`` if ``directory`` is no directory and cannot be made one."""
        self._counts = _Counts()
        self._closing = False
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        self._peer_errors = PeerErrors(logger, QUIET_S)
        if directory is None:
            return
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"kv_connector_extra_config: 'trace_dir': no directory {folder}: {error.strerror}"
            ) from None
        process, thread = f"rank{rank}", "layerpush-trace"
        if rank == SCHEDULER_RANK:
            process, thread = "scheduler", "layerpush-trace-scheduler"
        self._path = folder / f"{engine_id.replace('/', '_')}-{process}-{os.getpid()}.jsonl"
        lines = _Lines(self._path, this_process(engine_id, rank))
        self._thread = threading.Thread(target=self._run, args=(lines,), name=thread, daemon=True)
        self._thread.start()

    @property
    def enabled(self) -> bool:
        return self._thread is not None

    @property
    def dropped(self) -> int:
        """The number of lost records. Any thread."""
        return self._counts.dropped

    def write_record(self, record: Record) -> None:
        """Queue a record that the caller will not change any more. Never blocks. One thread of a process."""
        if self._thread is None:
            return
        rows, waiting = record.rows, self._counts.rows_waiting
        try:
            if waiting and waiting + rows > ROWS_LIMIT:
                raise queue.Full
            self._queue.put_nowait(record)
        except queue.Full:
            self._counts.crowded_out += 1
            behind = self._queue.qsize()
            text = f"the trace {self._path} is {behind} records of {waiting} rows behind: this one is dropped"
            self._peer_errors.count("trace behind", text, time.perf_counter())
        else:
            self._counts.queued(rows)

    def close(self) -> None:
        """Write the queue and end the thread. Records that take longer than two seconds are lost."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            self._closing = True
            self._counts.leave_behind()
        if self.dropped:
            logger.warning("layerpush: the trace %s lacks %d records", self._path, self.dropped)

    def _run(self, lines: _Lines) -> None:
        try:
            with contextlib.closing(lines):
                self._write_to(lines)
        except Exception:  # any defect: the engine continues without a trace, and logs it
            self._counts.lost_one()
            logger.exception("layerpush: the thread of the trace %s has died: nothing more is recorded", self._path)
            self._drain()

    def _write_to(self, lines: _Lines) -> None:
        peer_errors = PeerErrors(logger, QUIET_S)

        def attempt(write: Callable[[], None]) -> bool:
            try:
                write()
            except (OSError, ValueError) as error:  # a full disk may have room again; an id may be invalid text
                text = f"the trace {self._path} cannot be written: {error}"
                peer_errors.count("trace lost", text, time.perf_counter())
                return False
            return True

        reported = 0
        attempt(lines.begin)
        while not self._closing:
            record = self._queue.get()
            dropped = self.dropped
            if dropped > reported and attempt(partial(lines.put, DropRecord(records=dropped, t=time.perf_counter()))):
                reported = dropped
            if record is None:
                return
            if attempt(partial(lines.put, record)):
                self._counts.handled(record.rows)
            else:
                self._counts.lost_one(record.rows)

    def _drain(self) -> None:
        """Take records until the end, so that each one is counted as lost."""
        while (record := self._queue.get()) is not None and not self._closing:
            self._counts.lost_one(record.rows)


@dataclass
class _Counts:
    """Counts of records. Only one thread changes each counter, so none needs a lock."""

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
        """A record could not be written."""
        self.unwritten += 1
        self.handled(rows)

    def leave_behind(self) -> None:
        """Count all records that are not written yet as lost. The thread may still write one of them."""
        self.left_behind = max(0, self.records_queued - self.records_handled)


def _file_at(path: Path) -> FileIO:
    """The file to append to. Raises ``OSError``.

    Others may write to the folder and know the name, so a link of theirs is not followed.
    """
    return FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))


class _Lines:
    """A file of whole lines; the first is ``head``. If the disk took only a part of a line, a line end precedes the
    next line. A deleted file is created again. Trace thread.
    """

    def __init__(self, path: Path, head: ProcessRecord) -> None:
        self._path = path
        self._head = head
        self._file: FileIO | None = None
        self._has_head = False
        self._torn = False
        self._encoder = msgspec.json.Encoder()

    def begin(self) -> None:
        """Create the file, unless it exists, and write its head. Raises ``OSError``."""
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            self.close()
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _file_at(self._path)
            self._has_head = False
            # A process of the same pid may have left a torn line.
            self._torn = os.fstat(self._file.fileno()).st_size > 0
        if not self._has_head:
            self._write(self._file, self._encoder.encode(self._head))
            self._has_head = True

    def put(self, record: msgspec.Struct) -> None:
        """Append a line. Raises ``OSError``, and ``ValueError`` if the record is not valid JSON."""
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
