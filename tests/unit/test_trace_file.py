"""The trace file of a worker: its lines, and the disks, pipes and folders that fail under it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from layerpush.apps.tracing.folder import read_folders
from layerpush.core.config import ConfigError
from layerpush.telemetry import trace_file, trace_records
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import ChunkRecord, ProcessRecord, PushRecord, WriteRecord
from tests.support import waiting

ROOT = Path(__file__).parents[2]
until = partial(waiting.until, pause_s=0.001)


def record(name: str = "p-1") -> PushRecord:
    return PushRecord(request_id=name, engine_id="eng", rank=1, mode="layer")


def path_of(folder: Path) -> Path:
    """The path of the file of engine ``eng``, rank 0."""
    return folder / f"eng-rank0-{os.getpid()}.jsonl"


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the one file. The first one describes the process."""
    (path,) = folder.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_push_has_one_line(tmp_path: Path) -> None:
    push = record()
    push.chunks.append(ChunkRecord(0, 2, 1.0))
    push.ready_at(0, 0, 1.5, True)
    push.ready_at(0, 1, 1.75, False)
    push.writes.append(WriteRecord(0, (0, 1), (0, 0), 4, 256, 2.0, 2.25, 2.5))
    push.outcome = "completed"
    file = TraceFile(str(tmp_path), "eng", 1)
    file.write_record(push)
    file.close()

    process, line = lines(tmp_path)
    assert (process["kind"], line["kind"]) == ("process", "push")
    assert (line["request_id"], line["engine_id"], line["rank"], line["mode"]) == ("p-1", "eng", 1, "layer")
    assert line["chunks"] == [{"start_block": 0, "end_block": 2, "t_planned": 1.0, "cached": False}]
    assert line["ready"] == [[0, 0, 1.5, True], [0, 1, 1.75, False]]
    assert (line["hooked_layers"], line["swept_layers"], line["t_last_ready"]) == (1, 1, 1.75)
    assert line["writes"] == [
        {
            "remote_rank": 0,
            "layers": [0, 1],
            "chunks": [0, 0],
            "descriptors": 4,
            "bytes": 256,
            "t_post": 2.0,
            "t_posted": 2.25,
            "t_landed": 2.5,
            "plan": "direct",
            "runs": None,
            "estimate_s": None,
            "t_planned": None,
        }
    ]
    assert {"decode_request_id", "decode_engine_id", "fallback", "epoch", "tokens"} <= line.keys()
    assert {"t_first_planned", "t_last_landed", "t_notified"} <= line.keys()


def test_the_file_is_named_after_its_worker(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "new" / "folder"), "host/eng", 3)
    file.close()
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [f"host_eng-rank3-{os.getpid()}.jsonl"]


def test_without_a_directory_no_record_is_kept_and_no_thread_runs() -> None:
    before = threading.active_count()
    file = TraceFile(None, "eng", 0)
    file.write_record(record())
    assert not file.enabled
    assert threading.active_count() == before
    file.close()


def test_the_first_line_names_the_process_and_its_clock(tmp_path: Path) -> None:
    before = time.perf_counter(), time.time()
    file = TraceFile(str(tmp_path), "eng", 2)
    file.close()
    after = time.perf_counter(), time.time()
    (path,) = tmp_path.iterdir()
    first = msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
    assert (first.engine_id, first.rank, first.pid, first.host) == ("eng", 2, os.getpid(), socket.gethostname())
    assert before[0] <= first.t <= after[0]
    assert before[1] <= first.unix <= after[1]


def test_processes_of_one_machine_name_the_same_clock() -> None:
    code = "from layerpush.telemetry.trace_records import this_process; print(this_process('other', 0).clock)"
    other = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip()
    assert other == trace_records.this_process("eng", 0).clock
    assert len(other) > 36, "a boot id and a time namespace"


def test_many_records_keep_their_order(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "eng", 0)
    for number in range(500):
        file.write_record(record(f"p-{number}"))
    file.close()
    assert [line["request_id"] for line in lines(tmp_path)[1:]] == [f"p-{number}" for number in range(500)]


SOMETHING = os.open(os.devnull, os.O_RDONLY)


def trace_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "layerpush-trace"]


class Disk:
    """Stands in for the file: ``takes`` gives the number of bytes of the next line that it takes, or raises."""

    def __init__(self) -> None:
        self.takes: Callable[[bytes], int] = len
        self.content = b""

    def write(self, line: bytes) -> int:
        taken = self.takes(line)
        self.content += line[:taken]
        return taken

    def fileno(self) -> int:
        """The descriptor of a file that is never deleted."""
        return SOMETHING

    def close(self) -> None:
        pass

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.content.splitlines() if line]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(trace_file, "_file_at", lambda _: disk)
    return disk


def full(_: bytes) -> int:
    raise OSError(28, "No space left on device")


def test_a_hanging_disk_drops_records_and_never_blocks(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_file, "QUEUE_LIMIT", 2)
    monkeypatch.setattr(trace_file, "CLOSE_S", 0.1)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(line: bytes) -> int:
        hangs.set()
        goes_on.wait(20)
        return len(line)

    disk.takes = hang
    file = TraceFile(str(tmp_path), "eng", 0)
    assert hangs.wait(10)
    started = time.monotonic()
    for number in range(5):
        file.write_record(record(f"p-{number}"))
    assert file.dropped == 3
    file.close()
    assert time.monotonic() - started < 5
    assert [line.message for line in caplog.records if "behind" in line.message] != []
    assert file.dropped == 5
    assert "lacks 5 records" in caplog.records[-1].message
    goes_on.set()
    until(lambda: not trace_threads())
    assert [line.get("request_id") for line in disk.records] == [None], "the rest is dropped"


def test_a_full_disk_drops_only_the_records_of_that_time(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(str(tmp_path), "eng", 0)
    file.write_record(record("before"))
    until(lambda: b"before" in disk.content)
    disk.takes = full
    file.write_record(record("lost"))
    file.write_record(record("lost, too"))
    until(lambda: file.dropped == 2)
    disk.takes = len
    file.write_record(record("after"))
    file.close()
    assert [line.get("request_id") for line in disk.records] == [None, "before", None, "after"]
    assert (disk.records[2]["kind"], disk.records[2]["records"]) == ("dropped", 2)
    messages = [line.message for line in caplog.records]
    assert any("No space left" in message for message in messages)
    assert not any("has died" in message for message in messages)


def test_a_partly_written_line_spoils_no_other(tmp_path: Path, disk: Disk) -> None:
    file = TraceFile(str(tmp_path), "eng", 0)
    file.write_record(record("before"))
    until(lambda: b"before" in disk.content)
    disk.takes = lambda line: 20
    file.write_record(record("torn"))
    until(lambda: file.dropped == 1)
    disk.takes = len
    file.write_record(record("after"))
    file.close()
    whole = [line for line in disk.content.splitlines() if line.endswith(b"}")]
    assert [json.loads(line).get("request_id") for line in whole] == [None, "before", None, "after"]
    assert len(disk.content.splitlines()) == len(whole) + 1


def test_a_record_that_is_not_json_drops_only_itself(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "eng", 0)
    file.write_record(record("\ud800"))
    file.write_record(record("after"))
    file.close()
    assert [line["kind"] for line in lines(tmp_path)] == ["process", "dropped", "push"]
    assert file.dropped == 1


def test_a_dead_thread_is_logged_and_later_records_count_as_dropped(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    def die(_: bytes) -> int:
        raise MemoryError("no more")

    file = TraceFile(str(tmp_path), "eng", 0)
    until(lambda: bool(disk.content))
    disk.takes = die
    for number in range(4):
        file.write_record(record(f"p-{number}"))
    until(lambda: file.dropped == 4)
    assert "MemoryError: no more" in caplog.text
    assert [line.message for line in caplog.records if "has died" in line.message] != []
    file.close()
    assert "lacks 4 records" in caplog.records[-1].message


def test_a_restart_keeps_the_writes_and_clears_the_ready_rows() -> None:
    push = record()
    push.ready_at(0, 0, 1.0, True)
    push.writes.append(WriteRecord(0, (0, 0), (0, 0), 1, 1, 0.0, 0.0))
    push.restart(2)
    assert (push.epoch, push.ready, push.chunks, len(push.writes)) == (2, [], [], 1)


def test_ready_rows_are_kept_only_with_a_trace_file() -> None:
    push = record()
    push.ready_at(0, 0, 1.0, True, keep=False)
    assert (push.ready, push.hooked_layers, push.t_last_ready) == ([], 1, 1.0)


def long_push(rows: int) -> PushRecord:
    push = record()
    for layer in range(rows):
        push.ready_at(0, layer, 1.0, True)
    return push


def test_a_process_exits_in_spite_of_a_stuck_trace(tmp_path: Path) -> None:
    code = (
        "import os, sys; from layerpush.telemetry import trace_file\n"
        "from layerpush.telemetry.trace_records import PushRecord\n"
        "trace_file.CLOSE_S = 0.1\n"
        "os.mkfifo(f'{sys.argv[1]}/eng-rank0-{os.getpid()}.jsonl')\n"
        "file = trace_file.TraceFile(sys.argv[1], 'eng', 0)\n"
        "file.write_record(PushRecord(request_id='r', engine_id='eng', rank=0, mode='layer'))\n"
        "file.close(); print(file.dropped)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "1\n"


def test_a_partial_line_of_an_earlier_process_spoils_no_first_line(tmp_path: Path) -> None:
    """In a container the next engine has the same name and the same pid."""
    path_of(tmp_path).write_bytes(b'{"kind":"push","requ')
    file = TraceFile(str(tmp_path), "eng", 0)
    file.write_record(record())
    file.close()
    (source,) = read_folders([tmp_path])
    assert (source.process is not None, len(source.pushes), source.unreadable) == (True, 1, 1)


@pytest.mark.parametrize("what", ["the folder", "the file"])
def test_a_deleted_file_or_folder_is_created_again(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "trace"
    file = TraceFile(str(folder), "eng", 0)
    file.write_record(record("deleted"))
    until(lambda: path_of(folder).exists() and len(lines(folder)) == 2)
    if what == "the folder":
        shutil.rmtree(folder)
    else:
        path_of(folder).unlink()
    file.write_record(record("after"))
    file.close()
    first, second = lines(folder)
    assert (first["kind"], second["request_id"]) == ("process", "after")
    assert file.dropped == 0


def test_a_disk_that_is_full_at_first_does_not_drop_the_first_line(tmp_path: Path, disk: Disk) -> None:
    """Without the first line, the process behind the times is unknown."""
    disk.takes = full
    file = TraceFile(str(tmp_path), "eng", 0)
    file.write_record(record("lost"))
    until(lambda: file.dropped == 1)
    disk.takes = len
    file.write_record(record("after"))
    file.close()
    assert [line["kind"] for line in disk.records] == ["process", "dropped", "push"]


def test_waiting_records_are_bounded_in_memory(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt of a hundred thousand tokens has thousands of rows; a thousand such records would be a gigabyte."""
    monkeypatch.setattr(trace_file, "ROWS_LIMIT", 100)
    goes_on = threading.Event()
    disk.takes = lambda line: goes_on.wait(20) and len(line)
    file = TraceFile(str(tmp_path), "eng", 0)
    for rows, dropped in ((500, 0), (1, 1), (98, 2)):
        file.write_record(long_push(rows - 1))
        assert file.dropped == dropped, "a record that is too large by itself is taken if no other waits"
    goes_on.set()
    until(lambda: file._rows == 0)
    goes_on.clear()
    for rows, dropped in ((60, 2), (40, 2), (1, 3)):
        file.write_record(long_push(rows - 1))
        assert file.dropped == dropped
    goes_on.set()
    file.close()
    assert file.dropped == 3
    assert [line.message for line in caplog.records if "rows behind: this one is dropped" in line.message] != []


def test_only_the_user_of_the_process_may_read_the_file(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "eng", 0)
    file.close()
    assert path_of(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_in_the_place_of_the_file_is_not_followed(
    exists: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, victim = tmp_path / "trace", tmp_path / "victim"
    folder.mkdir()
    if exists:
        victim.write_text("mine")
    path_of(folder).symlink_to(victim)
    file = TraceFile(str(folder), "eng", 0)
    file.write_record(record())
    file.close()
    assert file.dropped == 1
    assert (victim.read_text() if exists else victim.exists()) == ("mine" if exists else False)
    assert "cannot be written" in caplog.text


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the path belong to another user than the engine's."""
    if os.getuid() == trace_file.ROOT:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.touch(mode=0o666)
    give_away(path, monkeypatch)


def a_second_name(path: Path, _: pytest.MonkeyPatch) -> None:
    other = path.parent.parent / "other"
    other.touch()
    os.link(other, path)


def a_pipe(path: Path, _: pytest.MonkeyPatch) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [a_file, a_second_name, a_pipe])
def test_nothing_is_written_to_what_another_user_has_put_there(
    plant: Callable[[Path, pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    file = TraceFile(str(folder), "eng", 0)
    file.write_record(record("deleted"))
    until(lambda: path_of(folder).exists() and len(lines(folder)) == 2)
    path_of(folder).unlink()
    plant(path_of(folder), monkeypatch)
    file.write_record(record())
    file.close()
    assert file.dropped == 1
    assert path_of(folder).stat().st_size == 0
    assert "cannot be written" in caplog.text


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "trace"
    folder.mkdir(mode=0o777)
    give_away(folder, monkeypatch)
    with pytest.raises(ConfigError, match=f"'trace_dir': no directory {folder}: it belongs to another user"):
        TraceFile(str(folder), "eng", 0)


def test_a_folder_that_another_user_has_made_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "trace"
    file = TraceFile(str(folder), "eng", 0)
    until(lambda: path_of(folder).exists())
    assert folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(folder)
    folder.mkdir()
    give_away(folder, monkeypatch)
    file.write_record(record())
    file.close()
    assert (file.dropped, list(folder.iterdir())) == (1, [])
    assert "it belongs to another user" in caplog.text


def test_the_files_of_a_process_are_bounded_and_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_FILE_BYTES", 8192)
    file = TraceFile(str(tmp_path), "eng", 0)
    for number in range(60):
        file.write_record(record(f"p-{number}"))
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        path_of(tmp_path).with_suffix(".1.jsonl").name,
        path_of(tmp_path).name,
    ]
    assert all(path.stat().st_size <= 8192 for path in tmp_path.iterdir())
    (source,) = read_folders([tmp_path])
    assert source.process is not None
    read = [push.request_id for push in source.pushes]
    assert read == [f"p-{number}" for number in range(60)][-len(read) :]
    assert len(read) > 10


@pytest.mark.parametrize("below", ["", "/sub"])
def test_a_trace_dir_that_is_a_file_is_a_configuration_error(below: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match=f"'trace_dir': no directory {path}{below}: "):
        TraceFile(f"{path}{below}", "eng", 0)


def test_a_tilde_in_trace_dir_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    TraceFile("~/traces", "eng", 0).close()
    assert path_of(tmp_path / "traces").exists()


def test_a_home_of_nobody_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"'trace_dir': no directory ~no-such-user/traces: "):
        TraceFile("~no-such-user/traces", "eng", 0)
