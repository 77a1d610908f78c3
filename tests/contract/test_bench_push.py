"""bench.push between two real processes: what it writes, its gate, and that nothing of it stays."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.contract.commands import SECONDS, children, is_running, start
from tests.contract.waiting import until

FEW = ["--block-kib", "4", "--blocks", "16", "--ids", "random,contiguous", "--rounds", "2", "--staging-mib", "8"]


@pytest.mark.slow
def test_it_writes_every_sample_with_where_it_comes_from(tmp_path: Path) -> None:
    out = tmp_path / "push.json"
    process = start("bench.push", *FEW, "--links", "shm,tcp", "--out", str(out))
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
    process = start("bench.push", *FEW, "--links", "tcp", "--corrupt", "--out", str(tmp_path / "push.json"))
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, said
    assert "1 bytes of D's blocks are not P's" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_process_stays(tmp_path: Path, signum: signal.Signals) -> None:
    process = start("bench.push", *FEW, "--links", "tcp", "--rounds", "100000", "--out", str(tmp_path / "push.json"))
    try:
        pair = until(lambda: children(process.pid, 2), SECONDS)
        process.send_signal(signum)
        process.communicate(timeout=SECONDS)
        until(lambda: not any(map(is_running, pair)), SECONDS)
    finally:
        process.kill()
    assert process.returncode == (128 + signum if signum == signal.SIGINT else -signum)
    assert not list(tmp_path.iterdir())
