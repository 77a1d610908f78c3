"""The table of `python -m bench.kept` for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.markdown import Result, conditions, number_table

KEPT, NOTHING, STOCK = "kept", "nothing", "stock"
HEADINGS = ("P dies at", "D keeps", "first token", "D keeps nothing", "stock push")


def seconds(samples: Sequence[dict[str, Any]]) -> str:
    """The median of the first tokens after P's death; in brackets the least and the most."""
    found = [each["first_token_s"] for each in samples if each["first_token_s"] is not None]
    if not found:
        return f"none in {min(each['waited_s'] for each in samples):.0f} s"
    return f"{median(found):.1f} s ({min(found):.1f}-{max(found):.1f})"


def table(result: Result) -> str:
    """One row for each percentage; below it the conditions. Raises ``ValueError`` for a run with wrong answers."""
    if result["wrong"]:
        raise ValueError(f"a run with {result['wrong']} wrong answers is not published")
    settings, rows = result["settings"], []
    for percent in dict.fromkeys(each["percent"] for each in result["samples"]):
        here = [each for each in result["samples"] if each["percent"] == percent]
        by_mode = {mode: [each for each in here if each["mode"] == mode] for mode in (KEPT, NOTHING, STOCK)}
        kept = median(each["kept_tokens"] for each in by_mode[KEPT])
        rows.append((f"{percent} %", f"{kept:,.0f} tokens", *map(seconds, by_mode.values())))
    noticed = [each["noticed_s"] for each in result["samples"] if each["noticed_s"] is not None]
    said = (
        f"Prompts of {settings['tokens']:,} tokens, {settings['step_tokens']} a step. First tokens after P's death:"
        f" medians of {settings['rounds']}, with the least and the most. D noticed the death after {min(noticed):.1f}"
        f" to {max(noticed):.1f} s, with `peer_timeout_s` {settings['peer_timeout_s']:g}. The time limit of stock push"
        f" was {settings['stock_limit_s']:g} s."
    )
    return f"{number_table(HEADINGS, rows)}\n\n{said} {conditions(result, 'loopback')}"
