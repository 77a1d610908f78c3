"""Pushes during a synthetic forward, from the JSON of ``python -m bench.forward``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.docgen.conditions import alone, not_measured
from scripts.docgen.tables import number_table

RESULT, LINKS = Path("bench/results/forward.json"), Path("bench/results/links.json")
COMMAND = f"python -m bench.forward --out {RESULT}"
LINKS_COMMAND = (
    "python -m bench.forward --links loopback,500mbit,1gbit,2gbit,5gbit,10gbit --models llama-70b-tp8 --tokens 4096 "
    f"--no-growth --out {LINKS}"
)
LAYER, REFERENCE = "layer", "request"
DELAYS = ("computing", "for_a_core", "for_the_lock")


def tables(root: Path) -> str:
    """One row for each link, model, prompt length and pattern of blocks; below it what is beyond a limit."""
    return _table(root / RESULT, COMMAND)


def links(root: Path) -> str:
    """The same for one prompt over links of several rates."""
    return _table(root / LINKS, LINKS_COMMAND)


def _table(path: Path, command: str) -> str:
    if not path.exists():
        return not_measured(command)
    result = json.loads(path.read_text())
    cells = result["cells"]
    modes = list(cells[0]["modes"])
    headings = (
        *("model", "link", "blocks", "tokens", "load"),
        *(f"exposed by `{mode}`" for mode in modes),
        *("of request's", "limit", "end", "forward", "computing", "for a core", "for the lock", "hook"),
    )
    table = number_table(headings, [_row(cell, modes) for cell in cells], words=3)
    missed = sum(bool(cell["misses"]) for cell in cells)
    about = (
        f"Medians of {result['rounds']} rounds. Load is the time of all bytes on the wire over that of the forward; "
        "end is when the last byte of a push by layer has landed, over max(forward, transfer) and one layer; forward "
        "is that with a push by layer over that without, with its 95 % interval. Computing, for a core "
        "and for the lock say where the additional time goes, in the mean and in percent of the forward without a "
        "push: its thread computes, could compute and has no core, or sleeps, on a CPU until Python's lock is free. A "
        "hook is one call on that thread. "
        f"In {missed} of {len(cells)} cases something is beyond a limit: the JSON names it."
    )
    return f"{table}\n\n{about} {alone(result)}"


def _row(cell: Mapping[str, Any], modes: list[str]) -> tuple[str, ...]:
    exposed = [f"{1e3 * cell['modes'][mode]['exposed_s_median']:.1f} ms" for mode in modes]
    layer = cell["modes"].get(LAYER)
    if layer is None:
        rest = ("",) * 8
    else:
        share, slower = layer.get(f"exposed_of_{REFERENCE}"), layer["slowdown"]
        rest = (
            f"{share['ratio']:.3f}" if share else "",
            f"{cell['exposed_limit']:.3f}" if cell["exposed_limit"] is not None else "",
            f"{layer['end_of_bound']:.3f}",
            f"{slower['ratio']:.3f} [{slower['low']:.3f}, {slower['high']:.3f}]",
            *(f"{100 * layer['delays'][part]:+.1f} %" if layer["delays"] else "" for part in DELAYS),
            f"{layer['hook_us']['p50']:.1f} µs",
        )
    return (cell["model"], cell["link"], cell["ids"], str(cell["tokens"]), f"{cell['load']:.2f}", *exposed, *rest)
