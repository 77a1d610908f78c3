"""The file that a push leaves behind."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from layerpush import trace
from layerpush.trace import ChunkRecord, PushRecord, TraceFile, WriteRecord


def record(name: str = "p-1") -> PushRecord:
    return PushRecord(request_id=name, engine_id="eng", rank=1, mode="layer")


def lines(folder: Path) -> list[dict[str, object]]:
    (path,) = folder.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_for_a_push(tmp_path: Path) -> None:
    push = record()
    push.chunks.append(ChunkRecord(0, 2, 1.0))
    push.ready_at(0, 0, 1.5, True)
    push.ready_at(0, 1, 1.75, False)
    push.writes.append(WriteRecord(0, (0, 1), (0, 0), 4, 256, 2.0, 2.25, 2.5))
    push.outcome = "completed"
    file = TraceFile(str(tmp_path), "eng", 1)
    file.add(push)
    file.close()

    (line,) = lines(tmp_path)
    assert line["kind"] == "push"
    assert (line["request_id"], line["engine_id"], line["rank"], line["mode"]) == ("p-1", "eng", 1, "layer")
    assert line["chunks"] == [{"start_block": 0, "end_block": 2, "t_planned": 1.0}]
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
        }
    ]
    assert {"decode_request_id", "decode_engine_id", "fallback", "epoch", "tokens"} <= line.keys()
    assert {"t_first_planned", "t_last_landed", "t_notified"} <= line.keys()


def test_the_file_is_named_after_its_worker(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "new" / "folder"), "host/eng", 3)
    file.close()
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == [f"host_eng-rank3-{os.getpid()}.jsonl"]


def test_without_a_directory_nothing_is_kept_and_no_thread_runs() -> None:
    before = threading.active_count()
    file = TraceFile(None, "eng", 0)
    file.add(record())
    assert not file.enabled
    assert threading.active_count() == before
    file.close()


def test_a_record_can_be_read_before_the_file_is_closed(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "eng", 0)
    file.add(record())
    deadline = time.monotonic() + 10
    while not any(path.stat().st_size for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    file.close()


def test_many_records_keep_their_order(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path), "eng", 0)
    for number in range(500):
        file.add(record(f"p-{number}"))
    file.close()
    assert [line["request_id"] for line in lines(tmp_path)] == [f"p-{number}" for number in range(500)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_takes_nothing_costs_records_and_never_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "QUEUE_LIMIT", 2)
    (tmp_path / f"eng-rank0-{os.getpid()}.jsonl").mkdir()  # open() fails, as a full disk would later
    file = TraceFile(str(tmp_path), "eng", 0)
    for number in range(5):
        file.add(record(f"p-{number}"))
    assert file.dropped >= 3
    started = time.monotonic()
    file.close()
    assert time.monotonic() - started < 8


def test_a_restart_keeps_the_writes_and_forgets_what_was_ready() -> None:
    push = record()
    push.ready_at(0, 0, 1.0, True)
    push.writes.append(WriteRecord(0, (0, 0), (0, 0), 1, 1, 0.0, 0.0))
    push.restart(2)
    assert (push.epoch, push.ready, push.chunks, len(push.writes)) == (2, [], [], 1)


def test_rows_are_kept_only_where_there_is_a_file_for_them() -> None:
    push = record()
    push.ready_at(0, 0, 1.0, True, keep=False)
    assert (push.ready, push.hooked_layers, push.t_last_ready) == ([], 1, 1.0)
