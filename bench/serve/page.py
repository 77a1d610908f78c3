"""Tables of the documentation, from the JSON of ``python -m bench.serve``. Wrong answers raise ``ValueError``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.hand_over import PARTS
from bench.markdown import Result, conditions, machine, number_table, with_interval
from bench.serve.lineup import STOCK
from bench.serve.plan import AGGREGATED, LOOPBACK, TOKEN
from bench.serve.results import AFTER_PREFILL_LIMIT_MS, AUTO, PREFILL_LIMIT, TOKEN_LIMIT, TOKEN_LIMIT_FROM

REFERENCE, PACE = "request", "requests"
SHOWN = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per further token",
    "requests_per_s": "Requests per second",
    "prefill_ms": "Prefill alone, as P reports it",
    "exposed_ms": "Exposed time",
    "hand_over_ms": "Hand-over: from the last layer's KV on P to the first token at the client",
    "after_prefill_ms": "Time to first token less prefill, with the way to P and P's queue in it",
}
OF_PACES = ("tpot_ms", "requests_per_s")
"""Measures of runs with several paces of requests."""

Cell = Mapping[str, Any]


def tables(result: Result) -> str:
    """For each measure, and for the limits of ``auto``, a table with a row for each link, pace and prompt length."""
    _check(result)
    cells = _ordered(result["cells"])
    varied, fixed = _conditions(cells)
    parts = []
    for measure, what in SHOWN.items():
        modes = _known(cells, measure)
        if not modes or (measure in OF_PACES and _pace not in varied.values()):
            continue
        reference = AGGREGATED if AGGREGATED in modes else REFERENCE
        columns = {f"`{mode}`": [_median(cell, mode, measure, reference) for cell in cells] for mode in modes}
        parts += [f"{what}:", _table(cells, varied, columns)]
    if AUTO in cells[0]["modes"]:
        parts += [f"`{AUTO}`, as ratios:", _table(cells, varied, _of_auto(cells))]
    for mode in (AUTO, TOKEN):
        if all(cell["modes"].get(mode, {}).get("hand_over_parts_ms") for cell in cells):
            parts += [f"The hand-over of `{mode}` by its parts:", _table(cells, varied, _parts(cells, mode))]
    if TOKEN in cells[0]["modes"]:
        parts += [
            "Time to first token less prefill, less that of one engine:",
            _table(cells, varied, _of_token(cells)),
        ]
    return "\n\n".join([*parts, _about(result, fixed)])


def first_tokens(result: Result) -> str:
    """The first of ``tables``, without intervals: time to first token."""
    _check(result)
    cells = _ordered(result["cells"])
    varied, fixed = _conditions(cells)
    columns = {f"`{mode}`": [_first_token(cell, mode) for cell in cells] for mode in cells[0]["modes"]}
    about = f"Time to first token, medians; in brackets the ratio to `{AGGREGATED}`."
    return f"{_table(cells, varied, columns)}\n\n{about} {conditions(result, *fixed)}"


def headline(result: Result) -> str:
    """First tokens of the longest prompts over the slow link with an idle D: one engine, vLLM's connectors, layerpush.

    Below it the same over loopback, and the cost for prefill.
    """
    _check(result)
    longest = max(cell["prompt_tokens"] for cell in result["cells"])
    idle = [cell for cell in result["cells"] if not cell.get("background_streams")]
    cells = {cell["link"]: cell for cell in idle if cell["prompt_tokens"] == longest}
    (link,) = cells.keys() - {LOOPBACK}
    cell, near = cells[link], cells[LOOPBACK]
    stock = {mode: f"vLLM's `{connector}`" for mode, connector in STOCK.items() if mode in cell["modes"]}
    names = {AGGREGATED: "one engine, no transfer", **stock, TOKEN: "**layerpush**, as it is installed"}
    rows = [
        (name, _seconds(cell, mode), f"{cell['modes'][mode]['after_prefill_ms']['p50']:.0f} ms")
        for mode, name in names.items()
    ]
    about = (
        f"Medians for a prompt of {longest:,} tokens over a link emulated at {link} to an idle D, on {machine(result)}"
        f", {result['date'][:10]}. The link makes the difference: over this machine's loopback the first token takes "
        f"{_seconds(near, TOKEN)}, and {_seconds(near, 'pull')} with `{STOCK['pull']}`. **The cost**: P's prefill "
        f"takes {_as_long(cell, f'{TOKEN}/{AGGREGATED}')} as in one engine; P and D share the cores here."
    )
    return f"{number_table(('', 'first token after', 'of that, after prefill'), rows)}\n\n{about}"


def in_short(result: Result) -> str:
    """A sentence on the longest prompts of a result with the modes ``request`` and ``auto``."""
    _check(result)
    cell = max(result["cells"], key=lambda cell: int(cell["prompt_tokens"]))
    exposed = {mode: f"{cell['modes'][mode]['exposed_ms']['p50']:.1f} ms" for mode in (AUTO, REFERENCE)}
    return (
        f"On one GPU, with P and D on it, and prompts of {cell['prompt_tokens']:,} tokens, {exposed[AUTO]} of the "
        f"transfer are left after prefill, and {exposed[REFERENCE]} if layerpush writes the whole prompt then. Prefill "
        f"takes {_as_long(cell, f'{AUTO}/{REFERENCE}')} ({machine(result)}, {result['date'][:10]})."
    )


def _about(result: Result, fixed: Sequence[str]) -> str:
    rounds = sorted({cell["rounds"] for cell in result["cells"]})
    about = (
        f"Medians over {'/'.join(map(str, rounds))} rounds in which the modes take turns; in brackets the ratio to "
        f"{AGGREGATED} or to {REFERENCE}, with its 95 % interval. {_answers(result)}"
    )
    modes = result["cells"][0]["modes"]
    if AUTO in modes:
        missed = sum(bool(cell["misses"]) for cell in result["cells"])
        limited = f"`{AUTO}` or `{TOKEN}`" if TOKEN in modes else f"`{AUTO}`"
        about += (
            f" Best: the lowest median of the other modes with a transfer. In {missed} of {len(result['cells'])} cells "
            f"a whole interval of {limited} is above a limit. The limits of `{AUTO}`: 1 for its first token to the "
            f"best's, {PREFILL_LIMIT} for its prefill to `{REFERENCE}`'s."
        )
        if TOKEN in modes:
            about += (
                f" `{TOKEN}` may take {AFTER_PREFILL_LIMIT_MS:.0f} ms more than one engine from prefill to the first "
                f"token, and from {TOKEN_LIMIT_FROM:,} tokens on {TOKEN_LIMIT} times its time to first token."
            )
    return f"{about} {conditions(result, *fixed)}"


def _answers(result: Result) -> str:
    """The number of compared answers, and those with which they are equal."""
    answers = result["answers"]
    compared = f"{answers['compared']:,} answers compared"
    if result["settings"].get("compare", AGGREGATED) == AGGREGATED:
        return f"{compared} with the {AGGREGATED} engine's, all equal."
    unlike = f"{answers['unlike_aggregated']:,} differ from the {AGGREGATED} engine's"
    return f"{compared} with those of a mode with the same shapes, all equal; {unlike}."


def _check(result: Result) -> None:
    if result["answers"]["wrong"]:
        raise ValueError("a run with wrong answers is not published")


def _pace(cell: Cell) -> str:
    """The requests at a time."""
    pace = f"{cell['concurrency']} at a time"
    streams = cell.get("background_streams")
    return f"{pace}, D decodes {streams} streams" if streams else pace


def _first_token(cell: Cell, mode: str) -> str:
    value = f"{cell['modes'][mode]['ttft_ms']['p50']:.0f} ms"
    ratio = cell["ratios"]["ttft_ms"].get(f"{mode}/{AGGREGATED}")
    return f"{value} ({ratio['ratio']:.2f})" if ratio else value


def _as_long(cell: Cell, pair: str) -> str:
    """The ratio of two prefills, with its 95 % interval."""
    ratio, low, high = (cell["ratios"]["prefill_ms"][pair][name] for name in ("ratio", "low", "high"))
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}] times as long"


def _seconds(cell: Cell, mode: str) -> str:
    return f"{cell['modes'][mode]['ttft_ms']['p50'] / 1e3:.2f} s"


def _link(cell: Cell) -> str:
    return str(cell["link"])


def _step(cell: Cell) -> str:
    return str(cell["max_num_batched_tokens"] or "")


CONDITIONS: Mapping[str, Callable[[Cell], str]] = {"link": _link, "tokens a step": _step, PACE: _pace}


def _conditions(cells: Sequence[Cell]) -> tuple[dict[str, Callable[[Cell], str]], list[str]]:
    """The conditions that vary between the cells, and all others in words."""
    varied = {name: value for name, value in CONDITIONS.items() if len(set(map(value, cells))) > 1}
    link, step, pace = (None if name in varied else value(cells[0]) for name, value in CONDITIONS.items())
    link = link if link in (LOOPBACK, None) else f"link emulated at {link}"
    return varied, [words for words in (link, pace, step and f"{step} tokens a step") if words]


def _ordered(cells: Sequence[Cell]) -> list[Cell]:
    """By the conditions, each in the order of the file, then by prompt length."""
    places = [list(dict.fromkeys(map(value, cells))) for value in CONDITIONS.values()]

    def key(cell: Cell) -> tuple[int, ...]:
        order = (each.index(value(cell)) for each, value in zip(places, CONDITIONS.values(), strict=True))
        return (*order, int(cell["prompt_tokens"]))

    return sorted(cells, key=key)


def _table(
    cells: Sequence[Cell], varied: Mapping[str, Callable[[Cell], str]], columns: Mapping[str, Sequence[str]]
) -> str:
    places = [[*(value(cell) for value in varied.values()), str(cell["prompt_tokens"])] for cell in cells]
    rows = [(*place, *figures) for place, *figures in zip(places, *columns.values(), strict=True)]
    return number_table((*varied, "tokens", *columns), rows, words=len(varied) + 1)


def _known(cells: Sequence[Cell], measure: str) -> list[str]:
    """The modes that have figures of this measure."""
    return [mode for mode, figures in cells[0]["modes"].items() if figures.get(measure)]


def _of_auto(cells: Sequence[Cell]) -> dict[str, list[str]]:
    return {
        "best": [f"`{cell['best']}`" for cell in cells],
        "first token of best's": [_ratio(cell, "ttft_ms", f"{AUTO}/{cell['best']}") for cell in cells],
        "prefill of request's": [_ratio(cell, "prefill_ms", f"{AUTO}/{REFERENCE}") for cell in cells],
    }


def _parts(cells: Sequence[Cell], mode: str) -> dict[str, list[str]]:
    shown = [cell["modes"][mode]["hand_over_parts_ms"] for cell in cells]
    return {name: [f"{one[name]:.1f} ms" for one in shown] for name in PARTS}


def _of_token(cells: Sequence[Cell]) -> dict[str, list[str]]:
    def more(cell: Cell, mode: str) -> str:
        longer = cell["modes"][mode]["longer_after_prefill_ms"]
        return "?" if longer is None else f"{longer['difference']:.1f} [{longer['low']:.1f}, {longer['high']:.1f}] ms"

    counts = [cell["modes"][TOKEN]["first_tokens"] for cell in cells]
    return {
        **{f"`{mode}`": [more(cell, mode) for cell in cells] for mode in cells[0]["modes"] if mode != AGGREGATED},
        "requests with P's token": [f"{each.get('prefill', 0)} of {sum(each.values())}" for each in counts],
    }


def _ratio(cell: Cell, measure: str, pair: str) -> str:
    ratio = cell["ratios"].get(measure, {}).get(pair)
    return "?" if ratio is None else with_interval(ratio)


def _median(cell: Cell, mode: str, measure: str, reference: str) -> str:
    figures = cell["modes"][mode][measure]
    if figures is None:
        return "?"
    ratio = cell["ratios"].get(measure, {}).get(f"{mode}/{reference}")
    value = f"{figures['p50']:.1f} ms" if measure.endswith("_ms") else f"{figures['p50']:.3f}"
    return f"{value} ({with_interval(ratio)})" if ratio else value
