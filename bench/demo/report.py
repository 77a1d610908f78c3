"""The table for people and the JSON for programs; both show the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial

import msgspec
from rich.table import Table

from bench.demo.measure import DemoSample, ModeResult, result_of
from bench.figures import Figures
from bench.hand_over import CLIENT, HandOver
from layerpush.telemetry.trace_records import PushRecord

FIGURE_NAMES = tuple(field.name for field in fields(Figures))
FIRST_ROWS: tuple[tuple[str, Callable[[ModeResult], str]], ...] = (
    ("[bold]exposed[/]: last layer to last WRITE", lambda mode: f"[bold]{_ms(mode.figures, 'exposed_ms', 1)}[/]"),
    ("hand-over: last layer to first token", lambda mode: _ms(mode.hand_over, "ms")),
    ("tokens as without a transfer", lambda mode: "[green]equal[/]" if mode.tokens_equal else "[red]DIFFER[/]"),
    ("layers hooked / swept", lambda mode: f"{_count(mode, 'hooked_layers')} / {_count(mode, 'swept_layers')}"),
    ("WRITEs", lambda mode: _count(mode, "writes")),
)
HAND_OVER_ROWS: tuple[tuple[str, str], ...] = (
    ("hand-over: last WRITE", "exposed"),
    ("P's completion read by D", "notification"),
    ("D's scheduler has the report", "D wait"),
    ("D's step begins", "schedule"),
    ("D's first token", "first step"),
    ("D's output and API server", CLIENT),
)
"""The parts of the hand-over, except for a late request: the demo asks D when it asks P."""
LAST_ROWS: tuple[tuple[str, Callable[[ModeResult], str]], ...] = (
    ("descriptors", lambda mode: _count(mode, "descriptors")),
    ("bytes", lambda mode: f"{mode.figures.bytes / 2**20:.0f} MiB" if mode.figures else UNKNOWN),
    ("transfer: a WRITE is on its way", lambda mode: _ms(mode.figures, "transfer_ms")),
    ("prefill", lambda mode: _ms(mode.figures, "prefill_ms")),
    ("time to first token: median", lambda mode: _ms(mode, "ttft_ms")),
    ("least to most", lambda mode: "-".join(f"{ms / 1e3:.1f}" for ms in mode.ttft_range_ms) + " s"),
)
UNKNOWN = "[red]?[/]"
CAPTION = (
    "Medians over the prompts; layers are counted once per chunk. Until D reads the completion, P still computes the "
    "rest of the last layer and samples; a whole push begins after that. Time to first token is mostly prefill: where "
    "the ranges overlap, it does not show which mode is faster."
)


@dataclass(frozen=True)
class DemoReport:
    """The result of a run. Of two corrupted pushes one changed the tokens, and ``verify`` found the other one."""

    samples: Mapping[str, Sequence[DemoSample]]
    negative_control_detected: bool
    verify_detected: bool

    def results(self) -> dict[str, ModeResult]:
        """One summary per mode."""
        return {mode: result_of(samples) for mode, samples in self.samples.items()}

    def problems(self) -> list[str]:
        """The reasons why the run failed; empty if it did not."""
        problems = []
        for mode, result in self.results().items():
            problems += [f"{mode}: {problem}" for problem in result.problems]
            if not result.tokens_equal:
                problems.append(f"{mode}: tokens differ from those without a transfer")
        if not self.negative_control_detected:
            problems.append(
                "negative control: a corrupted layer did not change any token, so equal tokens prove nothing"
            )
        if not self.verify_detected:
            problems.append("negative control: with verify 1.0, D used a corrupted layer")
        return problems

    def sooner_ms(self) -> float | None:
        """By how much sooner than with a whole push the first token follows the last layer in auto mode."""
        results = self.results()
        auto, request = results["auto"].hand_over, results["request"].hand_over
        return None if auto is None or request is None else request.ms - auto.ms

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
            "verify_detected": self.verify_detected,
            "problems": self.problems(),
            "samples": {mode: [_sample_json(sample) for sample in samples] for mode, samples in self.samples.items()},
        }

    def table(self) -> Table:
        """One column per mode, one row per figure. Figures that differ between modes come first."""
        results = self.results()
        table = Table(caption=CAPTION, caption_justify="left")
        table.add_column("")
        for mode in results:
            table.add_column(mode, justify="right", no_wrap=True)
        parts = [(heading, partial(_part, name=name)) for heading, name in HAND_OVER_ROWS]
        for rows in (FIRST_ROWS, parts, LAST_ROWS):
            for heading, show in rows:
                table.add_row(heading, *(show(result) for result in results.values()))
            table.add_section()
        return table


def _part(mode: ModeResult, name: str) -> str:
    part = None if mode.hand_over is None else mode.hand_over.parts_ms.get(name)
    return UNKNOWN if part is None else f"{part:.1f} ms"


def _ms(of: ModeResult | Figures | HandOver | None, name: str, digits: int = 0) -> str:
    value: float | None = getattr(of, name, None)
    return UNKNOWN if value is None else f"{value:.{digits}f} ms"


def _count(mode: ModeResult, name: str) -> str:
    return str(getattr(mode.figures, name)) if mode.figures else UNKNOWN


def _mode_json(result: ModeResult) -> dict[str, object]:
    figures = asdict(result.figures) if result.figures else dict.fromkeys(FIGURE_NAMES)
    return {
        "ttft_ms": result.ttft_ms,
        "ttft_range_ms": list(result.ttft_range_ms),
        **_hand_over_json(result.hand_over),
        **figures,
        "tokens_equal": result.tokens_equal,
    }


def _sample_json(sample: DemoSample) -> dict[str, object]:
    return {
        "prompt": sample.prompt,
        "ttft_ms": 1e3 * sample.answer.ttft_s,
        "tokens": list(sample.answer.tokens),
        "tokens_equal": sample.tokens_equal,
        **_hand_over_json(sample.hand_over),
        "figures": asdict(sample.figures) if sample.figures else None,
        "problem": sample.problem,
        "push": msgspec.to_builtins(sample.push),
    }


def _hand_over_json(hand_over: HandOver | None) -> dict[str, object]:
    return {
        "hand_over_ms": None if hand_over is None else hand_over.ms,
        "hand_over_parts_ms": None if hand_over is None else hand_over.parts_ms,
    }
