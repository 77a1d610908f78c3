"""The record of vLLM's names on which layerpush relies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from layerpush.compat.vllm_sources import VllmSources
from scripts import vllm_names
from scripts.vllm_names import Package, moved, record

VLLM = {
    "_version.py": "__version__ = version = '0.32.0+cpu'\n",
    "base.py": """
class Base:
    def __init__(self):
        self._table: dict = {}
    def _post(self, block: int, *, wait: bool = True) -> None: ...
    @property
    def _size(self): ...
""",
    "worker.py": """
try:
    from vllm.base import Base
except ImportError:
    Base = None
class Worker(Base):
    @staticmethod
    def run(step): ...
""",
    "package/__init__.py": "from .helper import help_out as helps\n",
    "package/helper.py": "def help_out(text='a'): ...\n",
}
OURS = """
from vllm.worker import Worker
class OurWorker(Worker):
    def run(self, step):
        self._post(1)
        return self._own, self._table
    def __init__(self):
        self._own = 1
def size(worker: Worker | None) -> int:
    return worker._size
"""
SEEN = {
    "vllm.worker:Worker",
    *(f"vllm.worker:Worker.{name}" for name in ("run", "__init__", "_post", "_table", "_size")),
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vllm_names, "UNSEEN", ())
    monkeypatch.setattr(vllm_names, "PATCHES", ())
    for name, text in VLLM.items():
        file = tmp_path / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    ours = tmp_path / "layerpush/compat"
    ours.mkdir(parents=True)
    (ours / "worker.py").write_text(OURS)
    return tmp_path


def edit(world: Path, file: str, old: str, new: str) -> VllmSources:
    path = world / "vllm" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return VllmSources(world / "vllm")


def test_the_parameters_of_a_name_are_found_through_parents_and_imports(world: Path) -> None:
    sources = VllmSources(world / "vllm")
    found = {
        "vllm.worker:Worker": "class",
        "vllm.worker:Worker._post": "(self, block, *, wait=True)",
        "vllm.worker:Worker.run": "staticmethod (step)",
        "vllm.worker:Worker._size": "property",
        "vllm.worker:Worker._table": "attribute",
        "vllm.package:helps": "(text='a')",
        "vllm.worker:Worker.gone": None,
        "vllm.gone:Worker": None,
    }
    assert {path: sources.describe(path) for path in found} == found


def test_overridden_and_private_names_are_seen(world: Path) -> None:
    assert Package(world).names(VllmSources(world / "vllm")) == SEEN


def test_a_private_name_without_an_owner_is_an_error(world: Path) -> None:
    (world / "layerpush/compat/other.py").write_text("def f(core):\n    return core._unknown\n")
    with pytest.raises(LookupError, match=r"layerpush.compat.other:2: vLLM has no _unknown there; name its class"):
        Package(world).names(VllmSources(world / "vllm"))


@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("base.py", "wait: bool = True", "wait: bool = True, rank=0", "_post of vLLM 0.32.0 is (self, block, *, wait="),
        ("base.py", "self._table", "self._tables", "_table of vLLM 0.32.0 is missing; recorded for 0.32.0: attribute"),
        (
            "base.py",
            "@property",
            "@classmethod",
            "_size of vLLM 0.32.0 is classmethod (self); recorded for 0.32.0: pro",
        ),
        ("worker.py", "def run", "def runs", "run of vLLM 0.32.0 is missing; recorded for 0.32.0: staticmethod (step)"),
    ],
)
def test_a_name_that_has_moved_is_named(world: Path, file: str, old: str, new: str, line: str) -> None:
    before = VllmSources(world / "vllm")
    recorded: dict[str, Any] = record({"versions": [], "names": {}}, {"0.32.0": before}, SEEN)
    assert not list(moved(recorded, before, SEEN))
    (problem,) = moved(recorded, edit(world, file, old, new), SEEN)
    assert problem.startswith(f"vllm.worker:Worker.{line}")


def test_a_new_release_is_compared_with_the_newest_record(world: Path) -> None:
    recorded = record({"versions": [], "names": {}}, {"0.32.0": VllmSources(world / "vllm")}, SEEN)
    edit(world, "_version.py", "0.32.0", "0.100.0")
    newer = edit(world, "worker.py", "run(step)", "run(step, more)")
    (problem,) = moved(recorded, newer, SEEN)
    expected = "vllm.worker:Worker.run of vLLM 0.100.0 is staticmethod (step, more); recorded for 0.32.0: "
    assert problem == f"{expected}staticmethod (step)"
    both = record(recorded, {"0.100.0": newer}, SEEN)
    assert both["versions"] == ["0.32.0", "0.100.0"]
    assert not list(moved(both, newer, SEEN))
    assert both["names"]["vllm.worker:Worker.run"] == {
        "0.32.0": "staticmethod (step)",
        "0.100.0": "staticmethod (step, more)",
    }


def test_an_unrecorded_name_is_named(world: Path) -> None:
    sources = VllmSources(world / "vllm")
    recorded = record({"versions": [], "names": {}}, {"0.32.0": sources}, SEEN - {"vllm.worker:Worker.run"})
    assert list(moved(recorded, sources, SEEN)) == ["vllm.worker:Worker.run is not recorded"]
