"""A trace file on disks that go wrong in ways that only a real file system has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from layerpush.apps.tracing.folder import read_folders
from layerpush.telemetry import trace_file
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import PushRecord
from tests.unit.test_trace import Disk, disk, full, record, until

__all__ = ["disk"]
IMPATIENT_S = 0.1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "QUEUE_LIMIT", 2)
    monkeypatch.setattr(trace_file, "CLOSE_S", IMPATIENT_S)


def path_of(folder: Path) -> Path:
    """The path of the file of engine ``eng``, rank 0."""
    return folder / f"eng-rank0-{os.getpid()}.jsonl"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path_of(folder).read_text().splitlines()]


def long_push(rows: int) -> PushRecord:
    push = record()
    for layer in range(rows):
        push.ready_at(0, layer, 1.0, True)
    return push


@pytest.mark.usefixtures("impatient")
def test_a_pipe_that_nobody_reads_costs_records_and_never_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(path_of(tmp_path))
    file = TraceFile(str(tmp_path), "eng", 0)
    waits = []
    for number in range(5):
        before = time.perf_counter()
        file.add(record(f"p-{number}"))
        waits.append(time.perf_counter() - before)
    assert max(waits) < IMPATIENT_S
    before = time.monotonic()
    file.close()
    assert time.monotonic() - before < 10 * IMPATIENT_S
    assert file.dropped == 5
    assert "lacks 5 records" in caplog.records[-1].message
    os.close(os.open(path_of(tmp_path), os.O_RDONLY | os.O_NONBLOCK))  # lets the thread go


def test_a_process_ends_although_its_trace_is_stuck(tmp_path: Path) -> None:
    code = (
        "import os, sys; from layerpush.telemetry import trace_file\n"
        "from layerpush.telemetry.trace_records import PushRecord\n"
        "trace_file.CLOSE_S = 0.1\n"
        "os.mkfifo(f'{sys.argv[1]}/eng-rank0-{os.getpid()}.jsonl')\n"
        "file = trace_file.TraceFile(sys.argv[1], 'eng', 0)\n"
        "file.add(PushRecord(request_id='r', engine_id='eng', rank=0, mode='layer'))\n"
        "file.close(); print(file.dropped)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "1\n"


def test_a_reader_that_leaves_costs_what_comes_after(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(path_of(tmp_path))
    file = TraceFile(str(tmp_path), "eng", 0)
    reader = os.open(path_of(tmp_path), os.O_RDONLY)
    assert b"process" in os.read(reader, 1 << 16)
    os.close(reader)
    file.add(record())
    until(lambda: file.dropped == 1)
    file.close()
    assert "has died" not in caplog.text


def test_half_a_line_of_a_process_before_spoils_no_first_line(tmp_path: Path) -> None:
    """In a container the next engine has the same name and the same pid."""
    path_of(tmp_path).write_bytes(b'{"kind":"push","requ')
    file = TraceFile(str(tmp_path), "eng", 0)
    file.add(record())
    file.close()
    (source,) = read_folders([tmp_path])
    assert (source.process is not None, len(source.pushes), source.unreadable) == (True, 1, 1)


@pytest.mark.parametrize("what", ["the folder", "the file"])
def test_what_somebody_deletes_comes_back(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "trace"
    file = TraceFile(str(folder), "eng", 0)
    file.add(record("deleted"))
    until(lambda: path_of(folder).exists() and len(lines(folder)) == 2)
    if what == "the folder":
        shutil.rmtree(folder)
    else:
        path_of(folder).unlink()
    file.add(record("after"))
    file.close()
    first, second = lines(folder)
    assert (first["kind"], second["request_id"]) == ("process", "after")
    assert file.dropped == 0


def test_a_folder_that_cannot_come_back_costs_records_until_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    file = TraceFile(str(folder), "eng", 0)
    until(path_of(folder).exists)
    shutil.rmtree(folder)
    folder.write_text("in its place")
    file.add(record("lost"))
    until(lambda: file.dropped == 1)
    folder.unlink()
    file.add(record("after"))
    file.close()
    assert [line["kind"] for line in lines(folder)] == ["process", "dropped", "push"]


def test_a_disk_that_is_full_at_first_costs_no_first_line(tmp_path: Path, disk: Disk) -> None:
    """Without the first line, the process behind the times is unknown."""
    disk.takes = full
    file = TraceFile(str(tmp_path), "eng", 0)
    file.add(record("lost"))
    until(lambda: file.dropped == 1)
    disk.takes = len
    file.add(record("after"))
    file.close()
    assert [line["kind"] for line in disk.records] == ["process", "dropped", "push"]


def test_records_that_wait_are_bounded_in_memory(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt of a hundred thousand tokens has thousands of rows; a thousand such records would be a gigabyte."""
    monkeypatch.setattr(trace_file, "ROWS_LIMIT", 100)
    goes_on = threading.Event()
    disk.takes = lambda line: goes_on.wait(20) and len(line)
    file = TraceFile(str(tmp_path), "eng", 0)
    for rows, dropped in ((500, 0), (1, 1), (98, 2)):
        file.add(long_push(rows - 1))
        assert file.dropped == dropped, "a record that is too large by itself is taken if no other waits"
    goes_on.set()
    until(lambda: file._counts.rows_waiting == 0)
    goes_on.clear()
    for rows, dropped in ((60, 2), (40, 2), (1, 3)):
        file.add(long_push(rows - 1))
        assert file.dropped == dropped
    goes_on.set()
    file.close()
    assert file.dropped == 3
    assert [line.message for line in caplog.records if "rows behind: this one is dropped" in line.message] != []
