"""The origin in every result: command, revision, versions down to UCX and the driver, machine."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import machine, ucx
from bench.provenance import provenance, unplaced

ROOT = Path(__file__).parents[2]
Driver = Callable[[str], None]


@pytest.fixture
def a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Installs a script as this machine's ``nvidia-smi``."""

    def install(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        machine._gpus.cache_clear()

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    yield install
    machine._gpus.cache_clear()


def test_a_result_records_its_provenance(a_driver: Driver) -> None:
    a_driver("exit 9")
    said = json.loads(json.dumps(provenance(seed=7)))
    assert set(said) == {"argv", "git_sha", "git_dirty", "versions", "machine", "date", "seed"}
    assert said["seed"] == 7
    assert re.fullmatch(r"[0-9a-f]{40}", said["git_sha"])
    assert {"python", "layerpush", "nixl", "torch", "triton", "ucx"} <= set(said["versions"])
    assert said["versions"]["python"] == platform.python_version()
    assert "driver" not in said["versions"]
    assert set(said["machine"]) == {"system", "cpus", "processor"}


def test_ucx_is_recorded_only_with_nixl(a_driver: Driver) -> None:
    a_driver("exit 9")
    assert set(provenance(0, ["aiohttp"])["versions"]) == {"python", "aiohttp"}


def test_gpus_are_recorded_with_their_driver(a_driver: Driver) -> None:
    """A name may have a comma."""
    a_driver("echo 'NVIDIA H200, 143771, 580.1'; echo 'Odd, one, 80, 580.1'; echo 'No memory, [N/A], 580.1'")
    said = provenance(0, [])
    assert said["versions"] == {"python": platform.python_version(), "driver": "580.1"}
    assert machine.machine()["gpus"] == [
        {"name": "NVIDIA H200", "memory_mib": 143771},
        {"name": "Odd, one", "memory_mib": 80},
        {"name": "No memory", "memory_mib": 0},
    ]


@pytest.mark.parametrize("script", ["echo 'No devices were found'", "echo broken >&2; exit 9", ""])
def test_a_driver_without_a_gpu_is_not_recorded(a_driver: Driver, script: str) -> None:
    a_driver(script)
    assert machine.driver() is None
    assert "gpus" not in machine.machine()


def test_the_processor_is_recorded_by_name_or_architecture(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Xeon 9\nmodel name\t: Xeon 9\n")
    assert machine.processor(tmp_path / "cpuinfo") == "Xeon 9"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 50\n")
    assert machine.processor(tmp_path / "cpuinfo") == (platform.processor() or platform.machine())
    assert machine.processor(tmp_path / "none")


def test_the_ucx_version_is_read_in_a_separate_process() -> None:
    """Loading UCX would change the measuring process."""
    maps = Path("/proc/self/maps")
    before = set(re.findall(r"\S*libucp\S*", maps.read_text()))
    assert re.fullmatch(r"\d+\.\d+\.\d+", ucx.version() or "")
    assert set(re.findall(r"\S*libucp\S*", maps.read_text())) == before


def test_missing_ucx_has_no_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ucx, "NIXL_PACKAGES", ("no-such-package",))
    assert ucx.version() is None
    broken = tmp_path / "libucp-0.so"
    broken.write_text("no library")
    monkeypatch.setattr(ucx, "_bundled", lambda: [str(broken)])
    assert ucx.version() is None


def test_the_recorded_command_line_has_no_directories_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(home)
    (home / "here").mkdir()
    monkeypatch.chdir(home / "here")
    given = [str(home / "here/bench.py"), str(home / "model"), str(temporary / "t/x"), "/etc/hosts", "--out", "a/b", ""]
    given += [f"--model={home / 'model'}", "--rate=0.5"]
    monkeypatch.setattr(sys, "argv", given)
    said = provenance(0, [])["argv"]
    assert said == [
        "bench.py",
        "~/model",
        "$TMPDIR/t/x",
        "/etc/hosts",
        "--out",
        "a/b",
        "",
        "--model=~/model",
        "--rate=0.5",
    ]
    monkeypatch.chdir("/")
    assert unplaced(str(home / "model")) == "~/model"
