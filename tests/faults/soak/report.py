"""The table for people and the JSON for programs. Both show the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from layerpush.telemetry.metrics.catalog import VERIFIED_PARTS, VERIFY_MISMATCHES
from tests.faults.soak.engine import Memory
from tests.faults.soak.kinds import Kind
from tests.faults.soak.request import Outcome
from tests.faults.soak.scripted import RETURNED
from tests.faults.soak.tally import ILLS, Tally

DIFFERING = "loads that D has found to differ"
HEADINGS = {"mismatch": "mismatches", "leak": "leaks", "hang": "hangs", "death": "engines that died by themselves"}


def verdict(tally: Tally) -> list[str]:
    """The reasons for a failure of the soak. Empty: success. A soak without comparisons is a failure."""
    reasons = [f"{tally.count(ill)} {HEADINGS[ill]}" for ill in ILLS if tally.count(ill)]
    if differing := tally.effects[VERIFY_MISMATCHES.key]:
        reasons.append(f"{differing} {DIFFERING}")
    for turn in tally.turns:
        if not turn.tokens:
            reasons.append(f"{turn.name}: no answer was compared with the plain engine's")
        if turn.reads_kv and not turn.pushes:
            reasons.append(f"{turn.name}: no pushed KV was compared")
    return reasons


TURNS_CAPTION = "answers: with the plain engine's; layer blocks of pushes: D's bytes with P's"
CAPTION = "struck: WRITEs, notifications or preemptions that came of it; survived: its round ended without a problem"


def effect(tally: Tally, kind: Kind) -> int | None:
    """The number of a kind's effects. None: it strikes only its engine or request."""
    counted = kind.name == "preempt" or (kind.place == "wire" and kind.name != "garbage-port")
    return tally.effects[kind.name] if counted else None


def requests_table(tally: Tally) -> Table:
    table = Table(title=f"{tally.requests} requests in {tally.rounds} rounds")
    table.add_column("ended as")
    table.add_column("count", justify="right")
    for outcome in Outcome:
        table.add_row(outcome.value, str(tally.outcomes[outcome]))
    table.add_section()
    table.add_row("recomputed or failed with no fault near", str(len(tally.unexplained)))
    table.add_section()
    for ill in ILLS:
        count = tally.count(ill)
        table.add_row(HEADINGS[ill], f"[red]{count}[/]" if count else "[green]0[/]")
    table.add_section()
    table.add_row("parts of KV that D has verified", str(tally.effects[VERIFIED_PARTS.key]))
    table.add_row(DIFFERING, str(tally.effects[VERIFY_MISMATCHES.key]))
    table.add_row("turns that P has loaded from D", str(tally.effects[RETURNED]))
    return table


def turns_table(tally: Tally) -> Table:
    table = Table(title="Compared, by line-up", caption=TURNS_CAPTION, caption_justify="left")
    for heading in ("line-up", "requests", "faults", "answers", "pushes", "layer blocks"):
        table.add_column(heading, justify="left" if heading == "line-up" else "right")
    for turn in tally.turns:
        kv = (str(turn.pushes), str(turn.layer_blocks)) if turn.reads_kv else ("", "")
        table.add_row(turn.name, str(turn.requests), str(turn.faults), str(turn.tokens), *kv)
    return table


def faults_table(tally: Tally, kinds: Sequence[Kind]) -> Table:
    table = Table(title="Faults", caption=CAPTION, caption_justify="left")
    for heading in ("kind", "injected", "struck", "survived"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in kinds:
        injected, survived = tally.injected[kind.name], tally.survived[kind.name]
        struck = effect(tally, kind)
        shown = str(survived) if survived == injected else f"[red]{survived}[/]"
        table.add_row(kind.name, str(injected), "" if struck is None else str(struck), shown)
    return table


def memory_table(memories: Mapping[str, Sequence[Memory]]) -> Table:
    table = Table(title="Memory of each engine process, MiB")
    for heading in ("engine", "processes", "peak", "most growth between idle moments"):
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for name, figures in memory_figures(memories).items():
        table.add_row(
            name, str(len(figures["processes"])), f"{figures['peak_mib']:.0f}", f"{figures['growth_mib']:.0f}"
        )
    return table


def memory_figures(memories: Mapping[str, Sequence[Memory]]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "peak_mib": max(memory.peak_mib for memory in processes),
            "growth_mib": max(memory.growth_mib for memory in processes),
            "processes": [{"peak_mib": memory.peak_mib, "idle_mib": memory.idle_mib} for memory in processes],
        }
        for name, processes in memories.items()
    }


def as_json(tally: Tally, kinds: Sequence[Kind], memories: Mapping[str, Sequence[Memory]]) -> dict[str, Any]:
    """All results, down to each request."""
    return {
        "verdict": verdict(tally) or "passed",
        "requests": {outcome.value: tally.outcomes[outcome] for outcome in Outcome},
        "rounds": tally.rounds,
        "faults": {
            kind.name: {
                "injected": tally.injected[kind.name],
                "struck": effect(tally, kind),
                "survived": tally.survived[kind.name],
            }
            for kind in kinds
        },
        "faults_that_found_no_target": dict(tally.skipped),
        "compared": {
            compared: sum(getattr(turn, compared) for turn in tally.turns)
            for compared in ("tokens", "pushes", "layer_blocks")
        },
        **{key: tally.effects[key] for key in (VERIFIED_PARTS.key, VERIFY_MISMATCHES.key, RETURNED)},
        "line_ups": [dataclasses.asdict(turn) for turn in tally.turns],
        **{HEADINGS[ill].replace(" ", "_"): tally.count(ill) for ill in ILLS},
        "problems": [dataclasses.asdict(problem) for problem in tally.problems],
        "undone_with_no_fault_near": tally.unexplained,
        "memory": memory_figures(memories),
        "samples": tally.samples,
    }
