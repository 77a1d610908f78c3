"""Which pictures a result has, by what is in its cells. Heavy modules are imported where they draw."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plot import lengths, links
from bench.plot.series import ResultError, Series, of_serve, of_ttft

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """``keys`` are those that a cell of its has, and cells of others lack. ``series`` is for kinds with modes."""

    command: str
    keys: frozenset[str]
    draw: Callable[[Result, Path, str], None]
    series: Callable[[Result], list[Series]] | None = None


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


def _ttft(result: Result, path: Path, text: str) -> None:
    _by_mode(of_ttft(result), path, text)


def _serve(result: Result, path: Path, text: str) -> None:
    _by_mode(of_serve(result), path, text)


def _by_mode(series: Sequence[Series], path: Path, text: str) -> None:
    """By prompt length, and by link speed where there are several."""
    lengths.draw(series, path, text)
    if len(links.speeds(series)) > 1:
        links.draw(series, path.with_stem(f"{path.stem}-links"), text)


def _push(result: Result, path: Path, text: str) -> None:
    from bench.push.cells import Cell
    from bench.push.plot import plot

    plot([Cell.from_json(cell) for cell in result["cells"]], path, f"A WRITE between two processes, by plan. {text}")


def _kernel(result: Result, path: Path, text: str) -> None:
    from bench.kernel import Cell, plot

    plot([Cell.from_json(cell) for cell in result["cells"]], path, text)


KINDS = (
    Kind("python -m bench", frozenset({"prompt_tokens", "ttft_ratios"}), _ttft, of_ttft),
    Kind("python -m bench.serve", frozenset({"prompt_tokens", "ratios", "request_rate"}), _serve, of_serve),
    Kind("python -m bench.push", frozenset({"ways", "runs", "estimate_s"}), _push),
    Kind("python -m bench.kernel", frozenset({"ways", "direction"}), _kernel),
)
