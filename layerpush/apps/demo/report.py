"""The table for people and the JSON for programs; both show the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import msgspec
from rich.table import Table

from layerpush.apps.demo.measure import ModeResult, Sample, result_of
from layerpush.apps.tracing.figures import Figures
from layerpush.telemetry.trace_records import PushRecord

FIGURE_NAMES = tuple(field.name for field in fields(Figures))
FIGURE_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("prefill", lambda figures: f"{figures.prefill_ms:.0f} ms"),
    ("transfer (some WRITE on its way)", lambda figures: f"{figures.transfer_ms:.0f} ms"),
    ("[bold]exposed[/] (last layer ready to all landed)", lambda figures: f"[bold]{figures.exposed_ms:.1f} ms[/]"),
    ("layers hooked / swept", lambda figures: f"{figures.hooked_layers} / {figures.swept_layers}"),
    ("WRITEs", lambda figures: str(figures.writes)),
    ("descriptors", lambda figures: str(figures.descriptors)),
    ("bytes", lambda figures: f"{figures.bytes / 2**20:.0f} MiB"),
)


@dataclass(frozen=True)
class DemoReport:
    """Everything that a run found out."""

    samples: Mapping[str, Sequence[Sample]]
    negative_control_detected: bool

    def results(self) -> dict[str, ModeResult]:
        """One summary per mode."""
        return {mode: result_of(samples) for mode, samples in self.samples.items()}

    def problems(self) -> list[str]:
        """What makes the run a failure; empty when all is well."""
        problems = []
        for mode, result in self.results().items():
            problems += [f"{mode}: {problem}" for problem in result.problems]
            if not result.tokens_equal:
                problems.append(f"{mode}: tokens differ from the plain engine's")
        if not self.negative_control_detected:
            problems.append(
                "negative control: a corrupted layer did not change any token, so equal tokens prove nothing"
            )
        return problems

    def exposed_ratio(self) -> float | None:
        """Exposed time of layer mode over that of request mode."""
        results = self.results()
        layer, request = results["layer"].figures, results["request"].figures
        if layer is None or request is None or request.exposed_ms <= 0:
            return None
        return layer.exposed_ms / request.exposed_ms

    def typical_pushes(self, *modes: str) -> dict[str, PushRecord] | None:
        """Of each mode the push with the median exposed time; None when a mode has no push with figures."""
        pushes = {}
        for mode in modes:
            timed = [(s.figures.exposed_ms, s.prompt, s.push) for s in self.samples[mode] if s.figures and s.push]
            if not timed:
                return None
            _, _, pushes[mode] = sorted(timed, key=lambda row: row[:2])[(len(timed) - 1) // 2]
        return pushes

    def as_json(self) -> dict[str, object]:
        """Summary per mode and the raw samples behind it; missing figures are null."""
        return {
            "modes": {mode: _mode_json(result) for mode, result in self.results().items()},
            "negative_control_detected": self.negative_control_detected,
            "problems": self.problems(),
            "samples": {mode: [_sample_json(sample) for sample in samples] for mode, samples in self.samples.items()},
        }

    def table(self) -> Table:
        """One column per mode, one row per figure."""
        results = self.results()
        table = Table(caption="Medians over the prompts; layers are counted once per chunk.", caption_justify="left")
        table.add_column("")
        for mode in results:
            table.add_column(mode, justify="right", no_wrap=True)
        table.add_row("time to first token", *(f"{result.ttft_ms:.0f} ms" for result in results.values()))
        for heading, show in FIGURE_ROWS:
            table.add_row(
                heading, *(show(result.figures) if result.figures else "[red]?[/]" for result in results.values())
            )
        equal = ("[green]equal[/]" if result.tokens_equal else "[red]DIFFER[/]" for result in results.values())
        table.add_row("tokens and the plain engine's", *equal)
        return table


def _mode_json(result: ModeResult) -> dict[str, object]:
    figures = asdict(result.figures) if result.figures else dict.fromkeys(FIGURE_NAMES)
    return {"ttft_ms": result.ttft_ms, **figures, "tokens_equal": result.tokens_equal}


def _sample_json(sample: Sample) -> dict[str, object]:
    return {
        "prompt": sample.prompt,
        "ttft_ms": 1e3 * sample.answer.ttft_s,
        "total_ms": 1e3 * sample.answer.total_s,
        "tokens": list(sample.answer.tokens),
        "tokens_equal": sample.tokens_equal,
        "figures": asdict(sample.figures) if sample.figures else None,
        "problem": sample.problem,
        "push": msgspec.to_builtins(sample.push),
    }
