"""Engines as users run them, from the JSON of ``python -m bench.serve``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.docgen.conditions import alone, not_measured
from scripts.docgen.tables import number_table

RESULT, AGAIN = Path("bench/results/serve.json"), Path("bench/results/serve-again.json")
SWEEP = Path("bench/results/sweep.json")
COMMAND = f"python -m bench.serve --out {RESULT}"
AGAIN_COMMAND = f"python -m bench.serve --lengths 4096 --links 1gbit,loopback --requests 1 --rounds 3 --out {AGAIN}"
SWEEP_COMMAND = (
    "python -m bench.serve --modes pull,request,layer --lengths 512 --concurrency 1,4 --rounds 3 --requests 2 "
    f"--out {SWEEP}"
)
SWEPT = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per further token",
    "requests_per_s": "Requests per second",
    "exposed_ms": "What the transfer adds after prefill",
}
AGGREGATED, REFERENCE = "aggregated", "request"

Cell = Mapping[str, Any]
Key = tuple[str, int | None, int | None, float | None]


def tables(root: Path) -> str:
    """For each link, step and load, by prompt length: first tokens in every mode, prefill, and what is exposed."""
    return _tables(root / RESULT, COMMAND)


def again(root: Path) -> str:
    """The same of another machine."""
    return _tables(root / AGAIN, AGAIN_COMMAND)


def _tables(path: Path, command: str) -> str:
    result = _result(path)
    if result is None:
        return not_measured(command)
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
    return "\n\n".join([*parts, _about(result)])


def sweep(root: Path) -> str:
    """One row for each step, load and prompt length, in a table for each of what matters under load."""
    result = _result(root / SWEEP)
    if result is None:
        return not_measured(SWEEP_COMMAND)
    cells, parts = result["cells"], []
    for measure, what in SWEPT.items():
        modes = [mode for mode, figures in cells[0]["modes"].items() if figures[measure]]
        if not modes:
            continue
        reference = AGGREGATED if AGGREGATED in modes else REFERENCE
        rows = [
            (
                cell["link"],
                str(cell["max_num_batched_tokens"] or ""),
                str(cell["prompt_tokens"]),
                _load(cell["concurrency"], cell["request_rate"]),
                *(_median(cell, mode, measure, reference) for mode in modes),
            )
            for cell in cells
        ]
        headings = ("link", "tokens a step", "tokens", "load", *(f"`{mode}`" for mode in modes))
        parts += [f"{what}:", number_table(headings, rows, words=4)]
    return "\n\n".join([*parts, _about(result)])


def summary(root: Path) -> str:
    """One row for each link: time to first token of the longest prompts in every mode."""
    result = _result(root / RESULT)
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


def _about(result: Mapping[str, Any]) -> str:
    rounds = sorted({cell["rounds"] for cell in result["cells"]})
    about = (
        f"Medians over {'/'.join(map(str, rounds))} rounds in which the modes take turns; in brackets the ratio to "
        f"{AGGREGATED} or to {REFERENCE}, with its 95 % interval. {result['answers']['compared']:,} answers compared "
        f"with the {AGGREGATED} engine's, none was another."
    )
    return f"{about} {alone(result)}"


def _result(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    if result["answers"]["wrong"]:
        raise ValueError(f"{path} is of a run with wrong answers")
    return result


def _where(key: Key) -> str:
    link, step, streams, rate = key
    words = [link if link == "loopback" else f"link emulated at {link}", _load(streams, rate)]
    if step is not None:
        words.append(f"{step} tokens a step")
    return (text := ", ".join(words))[0].upper() + text[1:]


def _load(streams: int | None, rate: float | None) -> str:
    return f"{streams} at a time" if rate is None else f"{rate:g} requests per second"


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
    value = f"{figures['p50']:.1f} ms" if measure.endswith("_ms") else f"{figures['p50']:.3f}"
    return f"{value}{beside}"
