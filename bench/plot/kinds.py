"""The pictures of a result, by the keys of its cells. Heavy modules are imported where they draw."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plot import growth, lengths, links
from bench.plot.series import ResultError, Series, of_forward, of_serve

Result = Mapping[str, Any]
Cells = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Kind:
    """Only cells of this kind have all of ``keys``. A kind with modes has ``series``, any other ``draw_cells``."""

    command: str
    keys: frozenset[str]
    series: Callable[[Result], list[Series]] | None = None
    draw_cells: Callable[[Cells, Path, str], None] | None = None

    def draw(self, result: Result, path: Path, text: str) -> list[Path]:
        """Draw ``path``, and beside it a sweep over the links if there are several speeds, and the growth of costs if
        it was measured. Returns their paths.
        """
        if self.draw_cells is not None:
            self.draw_cells(result["cells"], path, text)
            return [path]
        assert self.series is not None
        series = self.series(result)
        lengths.draw(series, path, text)
        drawn = [path]
        if len(links.speeds(series)) > 1:
            drawn.append(path.with_stem(f"{path.stem}-links"))
            links.draw(series, drawn[-1], text)
        if lines := growth.lines_of(result):
            drawn.append(path.with_stem(f"{path.stem}-growth"))
            growth.draw(lines, drawn[-1], text)
        return drawn


def read(path: Path) -> tuple[Kind, Result]:
    """A result and its kind. Raises ``ResultError``."""
    try:
        result = json.loads(path.read_text())
        cells = result["cells"]
        keys = set(cells[0])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ResultError(f"{path} is no result with cells: {error!r}") from error
    found = [kind for kind in KINDS if kind.keys <= keys]
    if not found:
        known = ", ".join(kind.command for kind in KINDS)
        raise ResultError(f"{path} is not of a bench that has pictures ({known})")
    return found[0], result


def title(result: Result, path: Path) -> str:
    """The file, the machine and the day."""
    machine = result["machine"]
    gpus = "".join(f"{gpu['name']}, " for gpu in machine.get("gpus", []))
    return f"{path.stem}: {gpus}{machine['cpus']} CPU cores, {result['date'][:10]}"


def _push(cells: Cells, path: Path, text: str) -> None:
    from bench.push.cells import Cell
    from bench.push.plot import plot

    plot([Cell.from_json(cell) for cell in cells], path, f"A WRITE between two processes, by plan. {text}")


def _kernel(cells: Cells, path: Path, text: str) -> None:
    from bench.kernel import Cell, plot

    plot([Cell.from_json(cell) for cell in cells], path, text)


FORWARD = Kind("python -m bench.forward", frozenset({"modes", "ceiling", "tokens"}), of_forward)
KINDS = (
    Kind("python -m bench.serve", frozenset({"prompt_tokens", "ratios", "request_rate"}), of_serve),
    FORWARD,
    Kind("python -m bench.push", frozenset({"ways", "runs", "estimate_s"}), draw_cells=_push),
    Kind("python -m bench.kernel", frozenset({"ways", "direction"}), draw_cells=_kernel),
)
