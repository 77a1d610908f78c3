"""The output of a run: a line for each call, and the missed limits at the end."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from bench.serve.measured import Measured
from bench.serve.plan import Call, Setup
from bench.serve.results import CellResult, Series


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


def missed(results: Sequence[CellResult]) -> list[str]:
    """The missed limits of all cells, in words."""
    return [f"{result.cell}: {text}" for result in results for text in result.misses]
