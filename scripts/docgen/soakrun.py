"""What the last soak found, from the JSON that it writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.docgen.conditions import conditions, not_measured
from scripts.docgen.tables import table

RESULT = Path("bench/results/soak.json")
COMMAND = "make soak MINUTES=10"
PASSED = "passed"


def summary(root: Path) -> str:
    """One paragraph. Raises ``ValueError`` for a run that found something: that is no figure to publish."""
    result = _result(root)
    return not_measured(COMMAND) if result is None else _summary(result)


def tables(root: Path) -> str:
    """How the requests ended, what became of each kind of fault, and the memory of each engine."""
    result = _result(root)
    if result is None:
        return not_measured(COMMAND)
    requests = [(words, f"{count:,}") for words, count in result["requests"].items()]
    faults = [
        (f"`{kind}`", *(_count(fault[column]) for column in ("injected", "struck", "survived")))
        for kind, fault in result["faults"].items()
    ]
    memory = [
        (engine, str(len(used["processes"])), f"{used['peak_mib']:,.0f}", f"{used['growth_mib']:,.0f}")
        for engine, used in result["memory"].items()
    ]
    return "\n\n".join(
        (
            _summary(result),
            table(("requests ended as", "count"), requests),
            table(("fault", "injected", "struck", "survived"), faults),
            table(("engine", "processes", "peak MiB", "most growth between idle moments, MiB"), memory),
        )
    )


def _summary(result: Mapping[str, Any]) -> str:
    if result["verdict"] != PASSED:
        raise ValueError(f"{RESULT} is of a run that {result['verdict']}")
    faults, compared = result["faults"].values(), result["compared"]
    cells = f"{compared['layer_blocks']:,} layer blocks of {compared['pushes']:,} pushes"
    return (
        f"{result['minutes']:g} minutes, {sum(result['requests'].values()):,} requests, "
        f"{sum(fault['injected'] for fault in faults):,} faults of {len(faults)} kinds; the tokens of "
        f"{compared['tokens']:,} answers and {cells} compared: "
        f"{result['mismatches']} mismatches, {result['leaks']} leaks, {result['hangs']} hangs, "
        f"{result['engines_that_died_by_themselves']} engines that died by themselves. {conditions(result)}"
    )


def _result(root: Path) -> Mapping[str, Any] | None:
    path = root / RESULT
    result: Mapping[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return result


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
