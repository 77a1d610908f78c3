"""bench.forward between two processes: results, the check of bytes, the clean-up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.forward.cores import STATISTICS
from bench.servers.processes import is_running
from tests.contract.commands import SECONDS, children, start
from tests.support.waiting import until

FORWARD = "bench.forward --models llama-8b --tokens 160 --chunk-tokens 64 --layer-ms 0.5 --no-growth"
EMULATES = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
needs_emulation = pytest.mark.skipif(not EMULATES, reason="an emulated link needs root and iproute2")
CONDITIONS = {"argv", "git_sha", "versions", "machine", "seed", "settings", "rounds", "about"}
HEAD = CONDITIONS | {"left_out", "cells"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 20)]


def written_by(command: str, out: Path) -> dict[str, Any]:
    """The JSON of a short run."""
    process = start(*command.split(), "--rounds", "2", "--out", str(out))
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    found: dict[str, Any] = json.loads(out.read_text())
    assert found.keys() >= HEAD
    return found


def namespaces(pid: int) -> list[str]:
    """The network namespaces of the command with this process id."""
    folder = Path("/run/netns")
    return sorted(each.name for each in folder.glob(f"layerpush-*-{pid % 100_000}")) if folder.exists() else []


def test_a_forward_writes_every_sample_with_its_conditions(tmp_path: Path) -> None:
    modes = "auto,layer,chunk,request,verify-1"
    command = f"{FORWARD} --links shm,loopback --ids contiguous,random --modes {modes}"
    written = written_by(command, tmp_path / "forward.json")
    assert written["about"]["loopback"]["ucx_settings"]["UCX_TLS"] == "tcp,self"
    assert [(each["link"], each["ids"]) for each in written["cells"]] == [
        (link, ids) for link in ("shm", "loopback") for ids in ("contiguous", "random")
    ]
    for each in written["cells"]:
        assert each["steps"] == 3
        assert each["ceiling"]["gb_s"] > 0
        for mode in modes.split(","):
            raw = each["modes"][mode]["raw"]
            assert len(raw["exposed_s"]) == len(raw["handed_over_s"]) == len(raw["forward_s"]) == 2
            assert raw["verified"] == [10 * 32 if mode == "verify-1" else 0] * 2, "each block of each layer"
            if STATISTICS.exists():
                assert len(raw["forward_queued_s"]) == 2
                assert set(each["modes"][mode]["delays"]) == {"computing", "for_a_core", "for_the_lock"}
            assert min(raw["writes"]) >= 1  # a late writer sends the layers of several steps at once
            assert each["modes"][mode]["hook_us"]["calls"] == 2 * 3 * 32
        assert each["modes"]["request"]["raw"]["writes"] == [1, 1]
        assert each["modes"]["chunk"]["raw"]["writes"] == [3, 3]


def test_blocks_arrive_byte_for_byte_by_gathered_writes(tmp_path: Path) -> None:
    written = written_by(f"{FORWARD} --ids random --packing gather", tmp_path / "forward.json")
    (cell,) = written["cells"]
    assert {name for taken in cell["modes"]["layer"]["raw"]["plans"] for name in taken} >= {"gathered"}


def test_a_paged_table_goes_every_way(tmp_path: Path) -> None:
    out = tmp_path / "paged.json"
    process = start("bench.paged", "--links", "shm", "--kib", "256,1024", "--rounds", "2", "--out", str(out))
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    rows = json.loads(out.read_text())["rows"]
    descriptors = {(row["way"], row["descriptor_bytes"] >> 10): row["descriptors"] for row in rows}
    assert len(descriptors) == len(rows) == 10
    for kib in (256, 1024):
        assert descriptors["direct", kib] == descriptors["SGL", kib] == (64 << 10) // kib
    assert {row["writes"] for row in rows} == {1}
    assert all(row["share"]["ratio"] > 0 for row in rows)


def test_a_wrong_byte_ends_the_benchmark_without_a_result(tmp_path: Path) -> None:
    process = start(
        *f"{FORWARD} --ids random".split(), "--rounds", "2", "--corrupt", "--out", str(tmp_path / "result.json")
    )
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, said
    assert "1 bytes of D's blocks are not what the forward computed" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "emulated", "signum"),
    [
        (f"{FORWARD} --ids random", 0, signal.SIGINT),
        (f"{FORWARD} --ids random", 0, signal.SIGKILL),
        pytest.param(f"{FORWARD} --ids random --links 1gbit", 2, signal.SIGINT, marks=needs_emulation),
    ],
    ids=["interrupted", "killed", "emulated link"],
)
def test_no_process_and_no_namespace_stays_after_a_signal(
    tmp_path: Path, command: str, emulated: int, signum: int
) -> None:
    process = start(*command.split(), "--rounds", "100000", "--out", str(tmp_path / "result.json"))
    try:
        pair = until(lambda: children(process.pid, 2), seconds=SECONDS)
        assert len(namespaces(process.pid)) == emulated
        process.send_signal(signum)
        process.communicate(timeout=SECONDS)
        until(lambda: not any(map(is_running, pair)), seconds=SECONDS)
    finally:
        process.kill()
    assert process.returncode == (128 + signum if signum == signal.SIGINT else -signum)
    assert not list(tmp_path.iterdir())
    assert not namespaces(process.pid)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the forward has no core of its own on one core")
def test_the_forward_has_a_core_to_itself(tmp_path: Path) -> None:
    *others, forward = sorted(os.sched_getaffinity(0))
    process = start(*FORWARD.split(), "--ids", "random", "--rounds", "100000", "--out", str(tmp_path / "result.json"))
    try:
        decode, prefill = until(lambda: children(process.pid, 2), seconds=SECONDS)
        until(lambda: places(prefill).get(prefill) == {forward}, seconds=SECONDS)
        until(lambda: len(places(prefill)) > 3, seconds=SECONDS)  # UCX's, NIXL's progress thread, and the writer
        assert {frozenset(cores) for thread, cores in places(prefill).items() if thread != prefill} == {
            frozenset(others)
        }
        assert {frozenset(cores) for cores in places(decode).values()} == {frozenset(others)}
        assert os.sched_getaffinity(process.pid) == set(others)
    finally:
        process.send_signal(signal.SIGINT)  # a killed command would leave the pair until the end of its rounds
        process.communicate(timeout=SECONDS)
    assert not is_running(prefill)
    assert not is_running(decode)


def places(pid: int) -> dict[int, set[int]]:
    """The cores of each thread."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def test_each_rank_of_d_gets_its_part_of_every_block(tmp_path: Path) -> None:
    growing = FORWARD.replace("--no-growth", "--growth")
    written = written_by(f"{growing} --quick --modes auto,request", tmp_path / "forward.json")
    grown = [each for each in written["grown"] if each["what"] == "ranks"]
    assert [each["ranks"] for each in grown] == [1, 2, 4]
    assert [each["modes"]["request"]["raw"]["writes"] for each in grown] == [[1, 1], [2, 2], [4, 4]]
    (line,) = [
        line
        for line in written["lines"]
        if (line["what"], line["mode"], line["cost"]) == ("ranks", "request", "WRITEs")
    ]
    assert line["slope"] == pytest.approx(1)


@needs_emulation
def test_an_emulated_link_is_no_faster_than_stated_and_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "forward.json"
    process = start(
        *FORWARD.split(),
        "--rounds",
        "2",
        "--links",
        "200mbit",
        "--ids",
        "random",
        "--modes",
        "layer",
        "--out",
        str(out),
    )
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["link"] == "200mbit"
    assert cell["ceiling"]["gb_s"] < 0.2 / 8 * 1.1  # the measured ceiling does not exceed the link's rate
    assert not namespaces(process.pid)
