"""What ``bench/proxy.py`` found last, from the JSON that it writes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.docgen.figures import NOT_MEASURED, conditions
from scripts.docgen.tables import Row, table

RESULT = Path("bench/results/proxy.json")
PARTS = {"first": "first byte", "whole": "whole answer"}
SHARES = {"median": 0.5, "99 %": 0.99}


def tables(root: Path) -> str:
    """What the proxy adds to medians and 99th percentiles."""
    path = root / RESULT
    if not path.exists():
        return NOT_MEASURED
    result = json.loads(path.read_text())
    added = [f"{what}, {which}" for what in PARTS.values() for which in SHARES]
    rows: list[Row] = []
    for cell in result["cells"]:
        figures = [_added(cell, part, share) for part in PARTS for share in SHARES.values()]
        rows.append((str(cell["prompt_tokens"]), str(cell["streams"]), *figures))
    text = table(("tokens", "streams at a time", *added), rows)
    return f"{text}\n\nAdded by the proxy. {conditions(result | {'link': None})}"


def _added(cell: Mapping[str, Any], part: str, share: float) -> str:
    proxied, direct = (_quantile(cell[f"{way}_{part}_ms"], share) for way in ("proxied", "direct"))
    return f"{proxied - direct:.2f} ms"


def _quantile(times: Sequence[float], share: float) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[round(100 * share) - 1]
