"""Pictures of the documentation, from the JSON in ``bench/results``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.markdown import Result
from bench.plot import growth, lengths
from bench.plot.series import of_forward

ROOT = Path(__file__).parents[2]
HASH_SALT = "layerpush"
Draw = Callable[[Result, Path], None]


def exposed(result: Result, path: Path) -> None:
    """Exposed time by prompt length: a panel for each model."""
    lengths.draw(of_forward(result), path, "Exposed time by prompt length")


def growing(result: Result, path: Path) -> None:
    """Growth of a forward's costs: a column for each thing that grew."""
    growth.draw(growth.lines_of(result), path, "Growth of costs")


PICTURES: Mapping[Path, tuple[str, Draw]] = {
    ROOT / "docs/exposed-by-length.svg": ("long.json", exposed),
    ROOT / "docs/growth.svg": ("forward.json", growing),
}


def render(name: str, draw: Draw) -> str:
    """The picture of ``bench/results/NAME`` as SVG. Equal results make equal text."""
    import matplotlib as mpl

    result = json.loads((ROOT / "bench/results" / name).read_text())
    with tempfile.TemporaryDirectory(prefix="layerpush-") as folder:
        path = Path(folder) / "picture.svg"
        with mpl.rc_context({"svg.hashsalt": HASH_SALT, "svg.fonttype": "none"}):
            draw(result, path)
        return path.read_text()
