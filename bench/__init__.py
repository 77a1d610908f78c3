"""Measurements of layerpush. ``make bench`` runs ``bench.serve``."""

import json
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
"""The committed results, which the documentation shows. Commands write here only if an option says so."""
OUTPUT = ROOT / "build" / "bench"
"""The folder that commands write into by default; git ignores it."""


def write(path: Path, result: Mapping[str, object]) -> None:
    """Write one JSON object. Creates the folder if it is missing. A kill meanwhile leaves the old file."""
    path, text = path.resolve(), json.dumps(result, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    is_device = path.exists() and not path.is_file()  # such as /dev/null
    fresh = path if is_device else path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


def unfinished(path: Path) -> Path:
    """The file beside ``path`` for the figures of an unfinished run, which a killed run leaves."""
    return path.with_suffix(".unfinished.json")
