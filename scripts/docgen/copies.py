"""What ranks of P with equal KV send, from the JSON of ``python -m tests.connector.ranks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.bootstrap import ratio_of_medians
from bench.markdown import Result, conditions, number_table

STOCK = "stock"
KINDS = {"mla": "MLA", "full": "GQA"}
Samples = Mapping[str, Sequence[Any]]


def tables(result: Result) -> str:
    ways = list(result["cells"][0]["ways"])
    headings = (
        "KV",
        "TP",
        "D needs",
        *(f"`{way}` sends" for way in ways),
        "of one rank",
        *(f"exposed by `{way}`" for way in ways),
    )
    rows = [_row(cell) for cell in result["cells"]]
    about = (
        f"Prompts of {result['tokens']} tokens over a loopback of {result['link']} that all ranks share; medians of "
        f"{result['rounds']} prompts in which the ways take turns; in brackets the ratio to `{STOCK}`, with its 95 % "
        f"interval. `{STOCK}`: vLLM's push connector on both sides; `layer`, `request`: layerpush, by layer and with "
        "`layerwise: false`. GQA has 2 KV heads. Of one rank: the least and the most that one rank of P sends by "
        "layer. Times are exposed: from the last KV that P computes to the end of the last WRITE. Every byte of D's KV "
        "cache was compared."
    )
    return f"{number_table(headings, rows, words=2)}\n\n{about} {conditions(result)}"


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    ways: Mapping[str, Samples] = cell["ways"]
    ranks = ways["layer"]["sent"][-1]
    sent = [_kib(sum(each["sent"][-1])) if each["sent"] else "refused" for each in ways.values()]
    times = [_time(each, ways[STOCK] if way != STOCK else None) for way, each in ways.items()]
    least_to_most = f"{_kib(min(ranks))} to {_kib(max(ranks))}"
    return (KINDS[cell["kind"]], f"{cell['p']} to {cell['d']}", _kib(cell["needed"]), *sent, least_to_most, *times)


def _time(samples: Samples, stock: Samples | None) -> str:
    seconds = samples["exposed_s"]
    if not seconds:
        return ""
    median = sorted(seconds)[len(seconds) // 2]
    ratio = f" ({ratio_of_medians(seconds, stock['exposed_s'])})" if stock and stock["exposed_s"] else ""
    return f"{1e3 * median:.0f} ms{ratio}"


def _kib(count: int) -> str:
    return f"{count / 1024:.0f} KiB"
