"""bench.forward between two real processes: what it writes, its gate, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from bench.forward.queued import STATISTICS
from tests.contract.commands import SECONDS, children, is_running, start
from tests.contract.waiting import until

FEW = ["--models", "llama-8b", "--tokens", "160", "--chunk-tokens", "64", "--layer-ms", "0.5", "--rounds", "2"]
FEW += ["--staging-mib", "8"]
EMULATES = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None


def bench(*arguments: str) -> subprocess.Popen[str]:
    return start("bench.forward", *FEW, *arguments)


def namespaces(pid: int) -> list[str]:
    """Those that a command of this process id makes."""
    folder = Path("/run/netns")
    return sorted(each.name for each in folder.glob(f"layerpush-*-{pid % 100_000}")) if folder.exists() else []


@pytest.mark.slow
def test_it_writes_every_sample_with_where_it_comes_from(tmp_path: Path) -> None:
    out = tmp_path / "forward.json"
    process = start(
        "bench.forward", *FEW, "--links", "shm,loopback", "--ids", "contiguous,random", "--no-growth", "--out", str(out)
    )
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    written = json.loads(out.read_text())
    assert {"argv", "git_sha", "versions", "machine", "seed", "settings", "rounds", "about", "left_out"} <= set(written)
    assert written["settings"]["forward_threads"] == 1
    assert written["about"]["loopback"]["ucx_settings"]["UCX_TLS"] == "tcp,self"
    assert [(each["link"], each["ids"]) for each in written["cells"]] == [
        (link, ids) for link in ("shm", "loopback") for ids in ("contiguous", "random")
    ]
    for each in written["cells"]:
        assert each["steps"] == 3
        assert each["ceiling"]["gb_s"] > 0
        for mode, least_writes in (("layer", 3), ("chunk", 3), ("request", 1)):
            raw = each["modes"][mode]["raw"]
            assert len(raw["exposed_s"]) == len(raw["forward_s"]) == 2
            if STATISTICS.exists():
                assert len(raw["forward_queued_s"]) == 2
                assert set(each["modes"][mode]["delays"]) == {"computing", "for_a_core", "for_the_lock"}
            assert min(raw["writes"]) >= least_writes
            assert each["modes"][mode]["hook_us"]["calls"] == 2 * 3 * 32
        assert each["modes"]["request"]["raw"]["writes"] == [1, 1]
        assert each["modes"]["chunk"]["raw"]["writes"] == [3, 3]
    assert out.with_suffix(".png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "plan"), [("packed", "packed"), ("gather", "gathered")])
def test_several_requests_and_every_way_to_pack_arrive_byte_for_byte(tmp_path: Path, packing: str, plan: str) -> None:
    out = tmp_path / "forward.json"
    process = bench("--requests", "3", "--ids", "random", "--no-growth", "--packing", packing, "--out", str(out))
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["requests"] == 3
    assert cell["modes"]["request"]["raw"]["writes"] == [3, 3]
    assert {name for taken in cell["modes"]["layer"]["raw"]["plans"] for name in taken} >= {plan}


@pytest.mark.slow
def test_a_wrong_byte_ends_it_and_nothing_is_written(tmp_path: Path) -> None:
    process = start(
        "bench.forward", *FEW, "--ids", "random", "--no-growth", "--corrupt", "--out", str(tmp_path / "forward.json")
    )
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, said
    assert "1 bytes of D's blocks are not what the forward computed" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_process_stays(tmp_path: Path, signum: signal.Signals) -> None:
    process = start(
        "bench.forward",
        *FEW,
        "--ids",
        "random",
        "--no-growth",
        "--rounds",
        "100000",
        "--out",
        str(tmp_path / "forward.json"),
    )
    try:
        pair = until(lambda: children(process.pid, 2), SECONDS)
        process.send_signal(signum)
        process.communicate(timeout=SECONDS)
        until(lambda: not any(map(is_running, pair)), SECONDS)
    finally:
        process.kill()
    assert process.returncode == (128 + signum if signum == signal.SIGINT else -signum)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not EMULATES, reason="an emulated link needs root and iproute2")
def test_an_emulated_link_is_as_slow_as_it_says_and_goes_away(tmp_path: Path) -> None:
    out = tmp_path / "forward.json"
    process = start(
        "bench.forward",
        *FEW,
        "--links",
        "200mbit",
        "--ids",
        "random",
        "--no-growth",
        "--modes",
        "layer",
        "--out",
        str(out),
    )
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["link"] == "200mbit"
    assert cell["ceiling"]["gb_s"] < 0.2 / 8 * 1.1  # what it makes of an idle link is no more than the link has
    assert not namespaces(process.pid)


@pytest.mark.slow
@pytest.mark.skipif(not EMULATES, reason="an emulated link needs root and iproute2")
def test_no_namespace_stays(tmp_path: Path) -> None:
    process = bench("--links", "1gbit", "--ids", "random", "--no-growth", "--rounds", "100000")
    try:
        pair = until(lambda: children(process.pid, 2), SECONDS)
        assert len(namespaces(process.pid)) == 2
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert not namespaces(process.pid)
    until(lambda: not any(map(is_running, pair)), SECONDS)
