"""The numbers of layerpush in vLLM's periodic log line. Pure."""

from __future__ import annotations

from layerpush.telemetry.metrics.catalog import (
    DROPPED_MESSAGES,
    EXPOSED,
    FAILED_WRITES,
    FALLBACKS,
    LAYERS_READY,
    LOAD,
    LOADS,
    LOST_PEERS,
    PARKED_BLOCKS,
    PUSHES,
    TRANSFER,
    WRITE_BYTES,
    WRITE_DESCRIPTORS,
    WRITE_LAYERS,
    WRITER_LAG,
)
from layerpush.telemetry.metrics.tally import Tally

UNEVENTFUL = frozenset({WRITER_LAG.key})
MIB = float(1 << 20)


def is_eventful(tally: Tally) -> bool:
    """Whether a log line is worth writing: gauges and lag alone are not."""
    return bool(tally.counters) or not tally.histograms.keys() <= UNEVENTFUL


def summary(tally: Tally) -> dict[str, int | float]:
    """The numbers of one interval by their names. Numbers without an event are left out."""
    line: dict[str, int | float] = {}
    if tally.counted(PUSHES):
        line |= _pushes(tally)
    if (writes := tally.observed(WRITE_BYTES)).count:
        line |= {
            "WRITEs": writes.count,
            "MiB pushed": round(writes.total / MIB, 3),
            "Avg descriptors per WRITE": round(tally.observed(WRITE_DESCRIPTORS).mean, 1),
        }
        if tally.observed(WRITE_LAYERS).count:
            line["Avg layers per WRITE"] = round(tally.observed(WRITE_LAYERS).mean, 1)
    if tally.counted(LOADS):
        line |= {
            "Loads": tally.counted(LOADS, "loaded"),
            "Loads not done": tally.counted(LOADS) - tally.counted(LOADS, "loaded"),
        }
        line |= {"P90 load time (ms)": _ms(tally.observed(LOAD).quantile(0.9))}
    for name, number in (
        ("Failed WRITEs", tally.counted(FAILED_WRITES)),
        ("Lost peers", tally.counted(LOST_PEERS)),
        ("Dropped messages", tally.counted(DROPPED_MESSAGES)),
        ("Parked blocks", int(tally.highest(PARKED_BLOCKS))),
    ):
        line |= {name: number} if number else {}
    return line


def _pushes(tally: Tally) -> dict[str, int | float]:
    exposed, layers = tally.observed(EXPOSED), tally.counted(LAYERS_READY)
    return {
        "Layer-wise pushes": tally.counted(PUSHES, "layerwise"),
        "Whole pushes": tally.counted(PUSHES, "whole", "fallback", "late_registration"),
        "Fallbacks": tally.counted(FALLBACKS),
        "Failed pushes": tally.counted(PUSHES, "failed"),
        "Cancelled pushes": tally.counted(PUSHES, "cancelled"),
        "Avg exposed time (ms)": _ms(exposed.mean),
        "P90 exposed time (ms)": _ms(exposed.quantile(0.9)),
        "Avg transfer time (ms)": _ms(tally.observed(TRANSFER).mean),
        "Hooked layers (%)": round(100 * tally.counted(LAYERS_READY, "hooked") / layers, 1) if layers else 0,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
