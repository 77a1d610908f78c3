"""Writes trace records to one file per worker, in a thread of its own.

Neither the forward pass nor the transport waits for a disk. Records that cannot be written are counted. The queue to
the thread is bounded, in records and in rows.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
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
MAX_FILE_BYTES = 256 << 20
"""A larger file gets the suffix ``PREVIOUS``, and another begins. So a process has twice as many bytes at most."""
PREVIOUS = ".1.jsonl"
ROOT = 0
"""The user who may do all things in any case, such as to make a container's volume."""
QUIET_S = 60.0
CLOSE_S = 2.0


def trace_folder(directory: str) -> Path:
    """The folder of a `trace_dir`, made if there is none.

    Raises ``ConfigError`` if it cannot be made, or belongs to another user: he could read and change the trace.
    """
    try:
        folder = Path(directory).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid not in (os.geteuid(), ROOT):
            raise PermissionError(errno.EPERM, "it belongs to another user")
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user's home
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"kv_connector_extra_config: 'trace_dir': no directory {directory}: {reason}") from None
    return folder


class TraceFile:
    """Appends records to ``<directory>/<engine>-rank<rank>-<pid>.jsonl``, or ``<engine>-scheduler-<pid>.jsonl`` for
    ``SCHEDULER_RANK``. If ``directory`` is None, it writes nothing. Only the user of this process may read the file.

    ``dropped`` counts lost records: the queue was full, the disk refused them, the thread died, or it had no time for
    them at the end. All of it is logged, at most once a minute.
    """

    def __init__(self, directory: str | None, engine_id: str, rank: int) -> None:
        """Raises ``ConfigError`` if ``directory`` is no directory and cannot be made one."""
        self.dropped = 0
        """The number of lost records. Any thread may read it."""
        self._lock = threading.Lock()  # for the counts
        self._records = self._rows = 0  # that wait to be written
        self._closing = False
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_LIMIT)
        self._thread: threading.Thread | None = None
        self._peer_errors = PeerErrors(logger, QUIET_S)
        if directory is None:
            return
        folder = trace_folder(directory)
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

    def write_record(self, record: Record) -> None:
        """Queue a record that the caller will not change any more. Never blocks. One thread of a process."""
        if self._thread is None:
            return
        with self._lock:
            fits = not self._rows or self._rows + record.rows <= ROWS_LIMIT
            fits = fits and not self._queue.full()
            if fits:
                self._queue.put_nowait(record)
                self._records += 1
                self._rows += record.rows
            else:
                self.dropped += 1
                behind = f"{self._records} records of {self._rows} rows behind"
        if not fits:
            text = f"the trace {self._path} is {behind}: this one is dropped"
            self._peer_errors.count("trace behind", text, time.perf_counter())

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
            with self._lock:
                self.dropped += self._records
        if self.dropped:
            logger.warning("layerpush: the trace %s lacks %d records", self._path, self.dropped)

    def _run(self, lines: _Lines) -> None:
        try:
            with contextlib.closing(lines):
                self._write_to(lines)
        except BaseException:  # a trace costs no request: its records count as lost
            self._taken(0, lost=True)
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
            self._taken(record.rows, lost=not attempt(partial(lines.put, record)))

    def _taken(self, rows: int, *, lost: bool) -> None:
        """A record of so many rows waits no more."""
        with self._lock:
            self._records -= 1
            self._rows -= rows
            self.dropped += lost

    def _drain(self) -> None:
        """Take records until the end, so that each one is counted as lost."""
        while (record := self._queue.get()) is not None and not self._closing:
            self._taken(record.rows, lost=True)


def _file_at(path: Path) -> FileIO:
    """The file to append to. Raises ``OSError``, also if it is no plain file of this user with one name.

    Others may write to the folder and know the name, so a link of theirs is not followed, and a pipe does not block.
    """
    file = FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and (found.st_uid, found.st_nlink) == (os.geteuid(), 1):
        os.fchmod(file.fileno(), 0o600)
        return file
    file.close()
    raise PermissionError(errno.EPERM, "it is no plain file of this user", str(path))


class _Lines:
    """A file of whole lines; the first is ``head``. If the disk took only a part of a line, a line end precedes the
    next line. A deleted file is created again, and a file that is too large gets another name. Trace thread.
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
            trace_folder(str(self._path.parent))
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
        if os.fstat(self._file.fileno()).st_size + len(line) > MAX_FILE_BYTES:
            self._path.replace(self._path.with_suffix(PREVIOUS))
            self.close()
            self.begin()
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
