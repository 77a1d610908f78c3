"""Tables of the documentation, from the JSON of ``python -m bench.serve``. Wrong answers raise ``ValueError``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.markdown import Result, conditions, number_table, with_interval
from bench.serve.plan import AGGREGATED, LOOPBACK

REFERENCE = "request"
SWEPT = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per further token",
    "requests_per_s": "Requests per second",
    "exposed_ms": "Exposed time",
}

Cell = Mapping[str, Any]
Key = tuple[str, int | None, int | None, float | None]


def tables(result: Result) -> str:
    """For each link, step and load, by prompt length: time to first token of every mode, prefill and exposed time."""
    _check(result)
    groups: dict[Key, list[Cell]] = {}
    for cell in sorted(result["cells"], key=lambda cell: int(cell["prompt_tokens"])):
        groups.setdefault(_key(cell), []).append(cell)
    parts = []
    for key in dict.fromkeys(map(_key, result["cells"])):
        cells = groups[key]
        parts += [f"{_where(key)}. Time to first token:", _by_length(cells, "ttft_ms", AGGREGATED)]
        if prefill := _by_length(cells, "prefill_ms", AGGREGATED):
            parts += ["Prefill alone, as P reports it:", prefill]
        if exposed := _by_length(cells, "exposed_ms", REFERENCE):
            parts += ["Exposed time:", exposed]
    return "\n\n".join([*parts, _about(result)])


def sweep(result: Result) -> str:
    """A table for each measure under load, with one row for each step, load and prompt length."""
    _check(result)
    parts = []
    for measure, what in SWEPT.items():
        modes = _known(result["cells"], measure)
        reference = AGGREGATED if AGGREGATED in modes else REFERENCE
        rows = [
            (
                cell["link"],
                str(cell["max_num_batched_tokens"] or ""),
                str(cell["prompt_tokens"]),
                _load(cell["concurrency"], cell["request_rate"]),
                *(_median(cell, mode, measure, reference) for mode in modes),
            )
            for cell in result["cells"]
        ]
        headings = ("link", "tokens a step", "tokens", "load", *(f"`{mode}`" for mode in modes))
        parts += [f"{what}:", number_table(headings, rows, words=4)] if modes else []
    return "\n\n".join([*parts, _about(result)])


def summary(result: Result) -> str:
    """One row for each link: time to first token of the longest prompts in every mode."""
    _check(result)
    longest = max(cell["prompt_tokens"] for cell in result["cells"])
    cells = [cell for cell in result["cells"] if cell["prompt_tokens"] == longest]
    modes = list(cells[0]["modes"])
    rows = [(cell["link"], *(_median(cell, mode, "ttft_ms", AGGREGATED) for mode in modes)) for cell in cells]
    about = (
        f"Time to first token of prompts of {longest} tokens, median of {cells[0]['rounds']} rounds, and the ratio to "
        f"one engine without any transfer, with its 95 % interval. `pull` and `push` are stock vLLM's."
    )
    return f"{number_table(('link', *(f'`{mode}`' for mode in modes)), rows)}\n\n{about} {conditions(result)}"


def _about(result: Result) -> str:
    rounds = sorted({cell["rounds"] for cell in result["cells"]})
    about = (
        f"Medians over {'/'.join(map(str, rounds))} rounds in which the modes take turns; in brackets the ratio to "
        f"{AGGREGATED} or to {REFERENCE}, with its 95 % interval. {result['answers']['compared']:,} answers compared "
        f"with the {AGGREGATED} engine's, all equal."
    )
    return f"{about} {conditions(result)}"


def _check(result: Result) -> None:
    if result["answers"]["wrong"]:
        raise ValueError("a run with wrong answers is not published")


def _key(cell: Cell) -> Key:
    return cell["link"], cell["max_num_batched_tokens"], cell["concurrency"], cell["request_rate"]


def _where(key: Key) -> str:
    link, step, streams, rate = key
    words = [link if link == LOOPBACK else f"link emulated at {link}", _load(streams, rate)]
    if step is not None:
        words.append(f"{step} tokens a step")
    return (text := ", ".join(words))[0].upper() + text[1:]


def _load(streams: int | None, rate: float | None) -> str:
    return f"{streams} at a time" if rate is None else f"{rate:g} requests per second"


def _known(cells: Sequence[Cell], measure: str) -> list[str]:
    """The modes that have figures of this measure."""
    return [mode for mode, figures in cells[0]["modes"].items() if figures[measure]]


def _by_length(cells: Sequence[Cell], measure: str, reference: str) -> str:
    """Empty where no mode has figures of this measure."""
    modes = _known(cells, measure)
    rows = [
        (str(cell["prompt_tokens"]), *(_median(cell, mode, measure, reference) for mode in modes)) for cell in cells
    ]
    return number_table(("tokens", *(f"`{mode}`" for mode in modes)), rows) if modes else ""


def _median(cell: Cell, mode: str, measure: str, reference: str) -> str:
    figures = cell["modes"][mode][measure]
    if figures is None:
        return "?"
    ratio = cell["ratios"].get(measure, {}).get(f"{mode}/{reference}")
    value = f"{figures['p50']:.1f} ms" if measure.endswith("_ms") else f"{figures['p50']:.3f}"
    return f"{value} ({with_interval(ratio)})" if ratio else value
