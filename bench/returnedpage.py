"""The tables of `python -m bench.returned` for the documentation."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from bench.markdown import Result, conditions, number_table

ONE, PULL, AUTO, RETURNS = "one engine", "pull", "layerpush", "layerpush, returns"
SAME, ANOTHER = "the same P", "another P"

Sample = dict[str, Any]


def series(result: Result, what: str) -> dict[tuple[str, str], list[list[float]]]:
    """The samples of ``what`` by mode and P: those of the first turn, those of the second, and so on."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    for each in result["samples"]:
        turns = found.setdefault((each["mode"], each["p"]), [[] for _ in range(result["settings"]["turns"])])
        turns[each["turn"]].append(each[what])
    order = [(ONE, SAME), *((mode, p) for p in (SAME, ANOTHER) for mode in (PULL, AUTO, RETURNS))]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def prompts(result: Result) -> list[int]:
    """The tokens of each turn's prompt."""
    settings = result["settings"]
    return [settings["first"] + turn * (settings["new"] + settings["answer"]) for turn in range(settings["turns"])]


def tables(result: Result) -> str:
    """Computed tokens and times to the first token: one row for each mode and P, one column for each turn.

    Raises ``ValueError`` for a run with wrong answers.
    """
    if result["wrong"]:
        raise ValueError(f"a run with {result['wrong']} wrong answers is not published")
    settings = result["settings"]

    def table(what: str, shown: Callable[[list[float]], str]) -> str:
        rows = [
            (mode, "" if mode == ONE else p, *map(shown, turns)) for (mode, p), turns in series(result, what).items()
        ]
        return number_table(("", "P", *(f"{tokens:,}" for tokens in prompts(result))), rows, words=2)

    said = (
        f"Medians of {settings['rounds']} conversations, with the least and the most. Each answer has"
        f" {settings['answer']} tokens, each further prompt {settings['new']:,} new ones; {settings['step_tokens']}"
        " tokens a step. All answers are those of the one engine."
    )
    return "\n\n".join(
        (
            "Tokens that P computes, by the tokens of the prompt:",
            table("computed", lambda turn: f"{median(turn):,.0f}"),
            "Time to the first token:",
            table("first_token_s", lambda turn: f"{median(turn):.2f} s ({min(turn):.2f}-{max(turn):.2f})"),
            f"{said} {conditions(result, 'loopback')}",
        )
    )
