"""Generated parts of the pages for operators: versions, contributing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.docgen import contributing, versions

ROOT = Path(__file__).parents[2]


def project(root: Path, *changes: tuple[str, str, str]) -> Path:
    """The files that the versions come from, with ``(file, old, new)`` done to them."""
    for name in ("pyproject.toml", "requirements/cpu.lock", "bench/results/soak.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for name, old, new in changes:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))
    return root


def test_versions_are_those_of_the_project(tmp_path: Path) -> None:
    changes = (
        ("pyproject.toml", 'cuda = ["vllm>=0.32,<0.34"]', 'cuda = ["vllm>=7.1,<7.3"]'),
        ("requirements/cpu.lock", "\nnixl==", "\nnixl==9."),
    )
    lines = versions.tables(project(tmp_path, *changes)).splitlines()
    assert "| vLLM | `>=7.1,<7.3` | not tested: there was no GPU |" in lines
    (nixl,) = (line for line in lines if line.startswith("| NIXL |"))
    assert "| 9." in nixl


@pytest.mark.parametrize(
    "change",
    [
        ("pyproject.toml", '"nixl>=1.5"', '"nixle>=1.5"'),
        ("requirements/cpu.lock", "\nvllm-cpu==", "\nvllm-gpu=="),
        ("bench/results/soak.json", '"python":', '"pyton":'),
    ],
)
def test_versions_that_are_not_said_are_noticed(tmp_path: Path, change: tuple[str, str, str]) -> None:
    with pytest.raises(LookupError):  # a KeyError is one
        versions.tables(project(tmp_path, change))


def test_contributing_has_links_from_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n\nSee [Design](docs/design/index.md) and [x](#y).\n")
    assert contributing.page(tmp_path) == "See [Design](design/index.md) and [x](#y)."
