"""Exposed time by prompt length, from the JSON of ``python -m bench.forward``: a panel for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bench.markdown import Result
from scripts.docgen.canvas import colours, curve, figure, logarithmic

Cell = Mapping[str, Any]


def draw(result: Result, path: Path, title: str) -> None:
    """Two panels share a row; a line for each mode."""
    panels: dict[str, list[Cell]] = {}
    for cell in result["cells"]:
        panels.setdefault(f"{cell['link']}, {cell['model']}, {cell['ids']} blocks", []).append(cell)
    modes = list(dict.fromkeys(mode for cell in result["cells"] for mode in cell["modes"]))
    beside = min(2, len(panels))
    with figure(-(-len(panels) // beside), beside, path, title) as grid:
        for panel, where in zip_longest(grid.flat, panels):
            if where is None:
                panel.set_axis_off()
                continue
            _exposed(panel, panels[where], colours(modes))
            panel.set_title(f"{where}: exposed after prefill", loc="left", fontsize="medium")
        grid[0][0].legend(fontsize="small")


def _exposed(panel: Any, cells: Sequence[Cell], chosen: Mapping[str, str]) -> None:
    for mode, colour in chosen.items():
        here = sorted((cell for cell in cells if mode in cell["modes"]), key=lambda cell: cell["tokens"])
        samples = [[1e3 * each for each in cell["modes"][mode]["raw"]["exposed_s"]] for cell in here]
        curve(panel, [cell["tokens"] for cell in here], samples, colour, mode)
    logarithmic(panel, "x", sorted({cell["tokens"] for cell in cells}))
    panel.set_xlabel("prompt tokens")
    panel.set_ylabel("milliseconds")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_ylim(bottom=0)
