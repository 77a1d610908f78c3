"""bench.push between two real processes: what it writes, its gate, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FEW = ["--block-kib", "4", "--blocks", "16", "--ids", "random,contiguous", "--rounds", "2", "--staging-mib", "8"]
SECONDS = 100


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.push", *FEW, *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_it_writes_every_sample_with_where_it_comes_from(tmp_path: Path) -> None:
    out = tmp_path / "push.json"
    process = start("--links", "shm,tcp", "--out", str(out))
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    written = json.loads(out.read_text())
    assert {"argv", "git_sha", "versions", "machine", "seed", "settings", "rounds", "about"} <= set(written)
    assert written["argv"][0] == "bench/push/__main__.py"
    assert written["about"]["tcp"]["ucx_settings"]["UCX_TLS"] == "tcp,self"
    assert [(each["link"], each["ids"]) for each in written["cells"]] == [
        (link, ids) for link in ("shm", "tcp") for ids in ("random", "contiguous")
    ]
    for each in written["cells"]:
        for plan in ("direct", "gathered", "packed"):
            assert each["ways"][plan]["plans"] == [plan] * 2
            assert min(each["ways"][plan]["seconds"]) > 0
    assert out.with_suffix(".png").exists()


@pytest.mark.slow
def test_a_wrong_byte_ends_it_and_nothing_is_written(tmp_path: Path) -> None:
    process = start("--links", "tcp", "--corrupt", "--out", str(tmp_path / "push.json"))
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, said
    assert "1 bytes of D's blocks are not P's" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_process_stays(tmp_path: Path, signum: signal.Signals) -> None:
    process = start("--links", "tcp", "--rounds", "100000", "--out", str(tmp_path / "push.json"))
    try:
        pair = wait_for(lambda: found if len(found := children(process.pid)) == 2 else None)
        process.send_signal(signum)
        process.communicate(timeout=SECONDS)
        wait_for(lambda: not any(Path(f"/proc/{pid}/root").exists() for pid in pair))
    finally:
        process.kill()
    assert process.returncode == (128 + signum if signum == signal.SIGINT else -signum)
    assert not list(tmp_path.iterdir())


def wait_for(look):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + SECONDS
    while not (answer := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer
