"""The output of a run: a line for each call, tables at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from bench.bootstrap import Ratio
from bench.hand_over import PARTS
from bench.serve.measured import Measured
from bench.serve.plan import AGGREGATED, Call, Setup
from bench.serve.results import CellResult, Series

UNKNOWN = "–"
MIB = 1 << 20
SEEN = ("TTFT ms", "mean", "p99", "to aggregated", "TPOT ms", "p99", "requests/s", "tokens/s", "prefill slowdown")
COSTS = (
    *("exposed ms", "p99", "to request's", "transfer ms"),
    *("WRITEs", "descriptors", "MiB", "writer CPU ms", "as", "plans"),
)


class Lines:
    """One line for each call."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def setup(self, setup: Setup, modes: Sequence[str], calls: int) -> None:
        self._console.print(f"[bold]{setup}[/]: {calls} calls of vllm bench serve in {len(modes)} modes")

    def warmed(self, mode: str) -> None:
        self._console.print(f"  {mode} warmed up")

    def called(self, call: Call, result: Measured, left_s: float | None) -> None:
        ttft = Series([result.ttft_ms]).p50
        left = "" if left_s is None else f"  {duration(left_s)} left"
        where = f"{call.cell.prompt_tokens} tokens, {call.cell.load}, round {call.round}"
        self._console.print(f"  {where}: {call.mode:10} first token after {ttft:.0f} ms{left}")
        for problem in result.problems:
            self._console.print(f"    [yellow]{problem}[/]", highlight=False)


def duration(seconds: float) -> str:
    """``about 3 min``."""
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {seconds:.0f} s"


def tables(results: Sequence[CellResult]) -> Iterator[Table]:
    """Three for each cell: the times of the clients, the costs of the transfer, and the hand-over."""
    for result in results:
        yield _seen_by_clients(result)
        yield _transfers(result)
        yield _hand_overs(result)


def missed(results: Sequence[CellResult]) -> list[str]:
    """The missed limits of all cells, in words."""
    return [f"{result.cell}: {text}" for result in results for text in result.misses]


def _seen_by_clients(result: CellResult) -> Table:
    caption = (
        "p50 with its 95 % interval; ratios are of medians, to the aggregated engine's; prefill slowdown: P's prefill "
        "time to the aggregated engine's, less 1"
    )
    table = Table(title=str(result.cell), caption=caption, title_justify="left", caption_justify="left")
    table.add_column("mode")
    for heading in SEEN:
        table.add_column(heading, justify="right")
    for mode in result.calls:
        ttft, tpot = result.series(mode, "ttft_ms"), result.series(mode, "tpot_ms")
        table.add_row(
            mode,
            _with_interval(ttft),
            _shown(ttft, lambda series: series.mean),
            _shown(ttft, lambda series: series.p99),
            _ratio(_to_aggregated(result, "ttft_ms", mode)),
            _with_interval(tpot),
            _shown(tpot, lambda series: series.p99),
            _with_interval(result.series(mode, "requests_per_s")),
            _with_interval(result.series(mode, "tokens_per_s")),
            _slowdown(_to_aggregated(result, "prefill_ms", mode)),
        )
    return table


def _transfers(result: CellResult) -> Table:
    caption = f"per request; {UNKNOWN}: not known. All of a transfer that begins after prefill is exposed."
    table = Table(caption=caption, caption_justify="left")
    table.add_column("mode")
    for heading in COSTS:
        table.add_column(heading, justify="right")
    for mode, calls in result.calls.items():
        if mode == AGGREGATED:
            continue
        exposed = result.series(mode, "exposed_ms")
        against = result.ratio("exposed_ms", mode, "request") if mode != "request" else None
        counts = [_shown(result.series(mode, name), lambda series: series.mean) for name in ("writes", "descriptors")]
        table.add_row(
            mode,
            _with_interval(exposed),
            _shown(exposed, lambda series: series.p99),
            _ratio(against),
            _shown(result.series(mode, "transfer_ms"), lambda series: series.p50),
            *counts,
            _shown(result.series(mode, "bytes"), lambda series: series.mean / MIB),
            _shown(result.series(mode, "writer_cpu_ms"), lambda series: series.mean),
            ", ".join(sorted({way for call in calls for way in call.pushed_as})) or UNKNOWN,
            ", ".join(sorted({plan for call in calls for plan in call.plans})) or UNKNOWN,
        )
    return table


def _hand_overs(result: CellResult) -> Table:
    caption = (
        f"from the last layer's KV on P to the first token at the client, and p50 of its parts; {UNKNOWN}: not known. "
        "Stock engines do not record when a layer is ready. TTFT less prefill has the way to P and P's queue in it, "
        "and begins with P's token."
    )
    table = Table(caption=caption, caption_justify="left")
    for heading in ("mode", "hand-over ms", "p99", *PARTS, "TTFT less prefill ms"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode in result.calls:
        hand_over = result.series(mode, "hand_over_ms")
        table.add_row(
            mode,
            _with_interval(hand_over),
            _shown(hand_over, lambda series: series.p99),
            *(_shown(result.part(mode, name), lambda series: series.p50) for name in PARTS),
            _with_interval(result.series(mode, "after_prefill_ms")),
        )
    return table


def _to_aggregated(result: CellResult, measure: str, mode: str) -> Ratio | None:
    return None if mode == AGGREGATED else result.ratio(measure, mode, AGGREGATED)


def _shown(series: Series | None, what: Callable[[Series], float]) -> str:
    return UNKNOWN if series is None else f"{what(series):.4g}"


def _with_interval(series: Series | None) -> str:
    if series is None:
        return UNKNOWN
    return f"{series.p50:.4g} [{series.interval.low:.4g}, {series.interval.high:.4g}]"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else str(ratio)


def _slowdown(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.ratio - 1:+.1%} [{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]"
