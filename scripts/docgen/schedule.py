"""The picture of the write schedule: WRITEs and exposed time by link use, on a simulated wire."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from layerpush.core.write_schedule import Progress, Speeds, layers_to_wait
from scripts.docgen.canvas import COLOURS, figure, logarithmic
from tests.support.simulated_wire import Case, Outcome, Rule, by_chunk, by_layer, known, push

LAYERS, CHUNKS = 32, 4
LOADS = tuple(float(load) for load in np.geomspace(0.01, 2.0, 60))
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


def whole(_: Speeds, progress: Progress) -> int:
    """One WRITE after the last layer of the prompt."""
    return 0 if not progress.next_part and progress.ready == progress.layers else 1


RULES: Mapping[str, Rule] = {"auto": layers_to_wait, "layer": by_layer, "chunk": by_chunk, "request": whole}


def outcomes(rule: Rule) -> list[Outcome]:
    """One prompt for each link use. The engine knows the link."""
    cases = [Case(layers=LAYERS, chunks=CHUNKS, load=load) for load in LOADS]
    return [push(case, rule, known(case)) for case in cases]


def draw(path: Path) -> None:
    """Two panels, a line for each rule."""
    with figure(1, 2, path, f"{CHUNKS} chunks of {LAYERS} layers on a simulated link") as ((writes, exposed),):
        for mode, rule in RULES.items():
            found = outcomes(rule)
            style = {"color": COLOURS[mode], "label": mode, "lw": 2.4 if mode == "auto" else 1.2}
            writes.plot(LOADS, [len(each.writes) for each in found], **style)
            exposed.plot(LOADS, [1e3 * each.exposed_s for each in found], **style)
        _finish(writes, "WRITEs", (1, 2, 5, 10, 20, 50, 100))
        _finish(exposed, "exposed, milliseconds", (0.2, 1, 5, 20, 100, 500))
        writes.legend(fontsize="small")


def _finish(panel: Any, title: str, ticks: tuple[float, ...]) -> None:
    logarithmic(panel, "x", TICKS)
    logarithmic(panel, "y", ticks)
    panel.set_xlabel("link use: a layer's transfer over its computation")
    panel.set_title(title, loc="left", fontsize="medium")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
