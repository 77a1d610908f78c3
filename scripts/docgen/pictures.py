"""Pictures of the documentation: of results in ``bench/results``, and of the write schedule."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.markdown import Result
from scripts.docgen import growth, lengths, schedule

ROOT = Path(__file__).parents[2]
HASH_SALT = "layerpush"


def exposed(path: Path) -> None:
    """Exposed time by prompt length: a panel for each model."""
    lengths.draw(_result("long.json"), path, "Exposed time by prompt length")


def growing(path: Path) -> None:
    """Growth of a forward's costs: a column for each thing that grew."""
    growth.draw(growth.lines_of(_result("forward.json")), path, "Growth of costs")


PICTURES: Mapping[Path, Callable[[Path], None]] = {
    ROOT / "docs/exposed-by-length.svg": exposed,
    ROOT / "docs/growth.svg": growing,
    ROOT / "docs/design/schedule.svg": schedule.draw,
}


def render(draw: Callable[[Path], None]) -> str:
    """The picture as SVG. Equal results make equal text."""
    import matplotlib as mpl

    with tempfile.TemporaryDirectory(prefix="layerpush-") as folder:
        path = Path(folder) / "picture.svg"
        with mpl.rc_context({"svg.hashsalt": HASH_SALT, "svg.fonttype": "none"}):
            draw(path)
        return path.read_text()


def _result(name: str) -> Result:
    result: Result = json.loads((ROOT / "bench/results" / name).read_text())
    return result
