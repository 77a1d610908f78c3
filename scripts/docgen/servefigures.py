"""Engines as users run them, from the JSON of ``python -m bench.serve``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.docgen.conditions import alone, not_measured
from scripts.docgen.tables import number_table

RESULT = Path("bench/results/serve.json")
COMMAND = f"python -m bench.serve --out {RESULT}"
AGGREGATED, REFERENCE = "aggregated", "request"

Cell = Mapping[str, Any]
Key = tuple[str, int | None, int | None, float | None]


def tables(root: Path) -> str:
    """For each link, step and load, by prompt length: first tokens in every mode, prefill, and what is exposed."""
    result = _result(root)
    if result is None:
        return not_measured(COMMAND)
    groups: dict[Key, list[Cell]] = {}
    for cell in result["cells"]:
        key = (cell["link"], cell["max_num_batched_tokens"], cell["concurrency"], cell["request_rate"])
        groups.setdefault(key, []).append(cell)
    parts = []
    for key, cells in groups.items():
        parts += [f"{_where(key)}. Time to first token:", _first_tokens(cells)]
        if prefill := _known(cells, "prefill_ms", AGGREGATED):
            parts += ["Prefill alone, as P tells it:", prefill]
        if exposed := _known(cells, "exposed_ms", REFERENCE):
            parts += ["What the transfer adds after prefill:", exposed]
    rounds = sorted({cell["rounds"] for cell in result["cells"]})
    about = (
        f"Medians over {'/'.join(map(str, rounds))} rounds in which the modes take turns; in brackets the ratio to "
        f"{AGGREGATED} or to {REFERENCE}, with its 95 % interval. {result['answers']['compared']:,} answers compared "
        f"with the {AGGREGATED} engine's, none was another."
    )
    return "\n\n".join([*parts, f"{about} {alone(result)}"])


def summary(root: Path) -> str:
    """One row for each link: time to first token of the longest prompts in every mode."""
    result = _result(root)
    if result is None:
        return not_measured(COMMAND)
    longest = max(cell["prompt_tokens"] for cell in result["cells"])
    cells = [cell for cell in result["cells"] if cell["prompt_tokens"] == longest]
    modes = list(cells[0]["modes"])
    rows = [(cell["link"], *(_median(cell, mode, "ttft_ms", AGGREGATED) for mode in modes)) for cell in cells]
    about = (
        f"Time to first token of prompts of {longest} tokens, median of {cells[0]['rounds']} rounds, and the ratio to "
        f"one engine without any transfer, with its 95 % interval. `pull` and `push` are stock vLLM's."
    )
    return f"{number_table(('link', *(f'`{mode}`' for mode in modes)), rows)}\n\n{about} {alone(result)}"


def _result(root: Path) -> dict[str, Any] | None:
    path = root / RESULT
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    if result["answers"]["wrong"]:
        raise ValueError(f"{RESULT} is of a run with wrong answers")
    return result


def _where(key: Key) -> str:
    link, step, streams, rate = key
    load = f"{streams} at a time" if rate is None else f"{rate:g} requests per second"
    words = [link if link == "loopback" else f"link emulated at {link}", load]
    if step is not None:
        words.append(f"{step} tokens a step")
    return (text := ", ".join(words))[0].upper() + text[1:]


def _first_tokens(cells: Sequence[Cell]) -> str:
    return _table(cells, list(cells[0]["modes"]), "ttft_ms", AGGREGATED)


def _known(cells: Sequence[Cell], measure: str, reference: str) -> str:
    """A table of the modes that know this of themselves; nothing if none does."""
    modes = [mode for mode, figures in cells[0]["modes"].items() if figures[measure]]
    return _table(cells, modes, measure, reference) if modes else ""


def _table(cells: Sequence[Cell], modes: Sequence[str], measure: str, reference: str) -> str:
    rows = [
        (str(cell["prompt_tokens"]), *(_median(cell, mode, measure, reference) for mode in modes))
        for cell in sorted(cells, key=lambda cell: int(cell["prompt_tokens"]))
    ]
    return number_table(("tokens", *(f"`{mode}`" for mode in modes)), rows)


def _median(cell: Cell, mode: str, measure: str, reference: str) -> str:
    figures = cell["modes"][mode][measure]
    if figures is None:
        return "?"
    ratio = cell["ratios"].get(measure, {}).get(f"{mode}/{reference}")
    beside = f" ({ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}])" if ratio else ""
    return f"{figures['p50']:.1f} ms{beside}"
