"""The table of pairs of engines, from ``table.json`` of ``tests/connector/ranks``, whose tests expect the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.docgen.tables import table

TABLE = Path("tests/connector/ranks/table.json")
KINDS = {
    "window": "windows",
    "mixed": "full and windows",
    "mla": "MLA",
    "indexer": "MLA, indexer",
    "states": "Mamba-2",
    "gdn": "GDN",
    "mla-gdn": "GDN and MLA",
    "only-states": "Mamba-2 only",
}
SHARED = {"heads": "KV heads", "cached": "tokens cached on D", "groups": "group", "drafts": "drafts"}
DRAFTERS = {"heads": "a drafter", "latents": "a drafter with MLA"}
SIDE = {"tp": "TP", "pp": "PP", "pcp": "PCP", "dp": "DP", "block_size": "blocks", "layout": "", "dtype": ""}
DEFAULTS = {"tp": 1, "pp": 1, "pcp": 1, "dp": 1, "block_size": 32, "layout": "LBHNC", "dtype": "float32"}


def pairs(root: Path) -> str:
    rows = []
    for row in json.loads((root / TABLE).read_text()):
        copies = {0: "", 1: "once"}.get(copied := row.get("copies", 0), f"{copied} times")
        reason = f"`{row['reason']}`" if row["mode"] == "refused" else ""
        rows.append((row["name"], row["mode"], reason, copies, _example(row["cases"])))
    return table(("P and D", "behaviour", "refused with", "P sends each byte", "for example"), rows)


def _example(cases: Sequence[Mapping[str, Any]]) -> str:
    more = len(cases) - 1
    return words(cases[0]) + (f"; {more} more" if more else "")


def words(case: Mapping[str, Any]) -> str:
    """A pair of engines in a few words: the first value is P's, the second is D's."""
    parts = [KINDS[case["kind"]]] if "kind" in case else []
    sides = [DEFAULTS | case.get("both", {}) | case.get(side, {}) for side in ("p", "d")]
    for key, name in SIDE.items():
        p, d = (side[key] for side in sides)
        if key == "tp" or {p, d} != {DEFAULTS[key]}:
            parts.append(f"{name} {p}" + (f" to {d}" if key in ("tp", "dp", "pcp") or p != d else ""))
    parts += [f"{case[key]} {name}" for key, name in SHARED.items() if key in case]
    parts += [DRAFTERS[case["drafter"]]] if "drafter" in case else []
    parts += [f"stock {side.upper()}" for side in ("p", "d") if case.get(side, {}).get("stock")]
    return ", ".join(part.strip() for part in parts)
