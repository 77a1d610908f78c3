"""The result of the last soak, from its JSON."""

from __future__ import annotations

from bench.markdown import Result, conditions
from scripts.docgen.tables import table

PASSED = "passed"


def tables(result: Result) -> str:
    """Tables of the requests' outcomes, of each kind of fault, and of each engine's memory."""
    requests = [(words, f"{count:,}") for words, count in result["requests"].items()]
    faults = [
        (f"`{kind}`", *(_count(fault[column]) for column in ("injected", "struck", "survived")))
        for kind, fault in result["faults"].items()
    ]
    turns = [
        (
            f"`{turn['name']}`",
            *(f"{turn[column]:,}" for column in ("requests", "faults", "tokens", "pushes", "layer_blocks")),
        )
        for turn in result["line_ups"]
    ]
    memory = [
        (engine, str(len(used["processes"])), f"{used['peak_mib']:,.0f}", f"{used['growth_mib']:,.0f}")
        for engine, used in result["memory"].items()
    ]
    return "\n\n".join(
        (
            summary(result),
            table(("requests ended as", "count"), requests),
            table(("line-up", "requests", "faults", "answers compared", "pushes compared", "layer blocks"), turns),
            table(("fault", "injected", "struck", "survived"), faults),
            table(("engine", "processes", "peak MiB", "most growth between idle moments, MiB"), memory),
        )
    )


def summary(result: Result) -> str:
    """One paragraph. Raises ``ValueError`` for a run that found a defect: it must not be published."""
    if result["verdict"] != PASSED:
        raise ValueError(f"a soak with {', '.join(result['verdict'])} is not published")
    faults, compared = result["faults"].values(), result["compared"]
    cells = f"{compared['layer_blocks']:,} layer blocks of {compared['pushes']:,} pushes"
    measured = conditions(result, "loopback")
    return (
        f"{result['minutes']:g} minutes, {sum(result['requests'].values()):,} requests, "
        f"{sum(fault['injected'] for fault in faults):,} faults of {len(faults)} kinds; the tokens of "
        f"{compared['tokens']:,} answers and {cells} compared; D verified {result['verified_parts']:,} parts of KV: "
        f"{result['verify_mismatches']} loads differed; P loaded {result['returned_turns']:,} turns from D: "
        f"{result['mismatches']} mismatches, {result['leaks']} leaks, {result['hangs']} hangs, "
        f"{result['engines_that_died_by_themselves']} engines that died by themselves. {measured}"
    )


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
