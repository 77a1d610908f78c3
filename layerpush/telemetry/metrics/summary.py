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
from layerpush.telemetry.metrics.metric_delta import MetricDelta

UNEVENTFUL = frozenset({WRITER_LAG.key})
MIB = float(1 << 20)


def is_eventful(delta: MetricDelta) -> bool:
    """Whether a log line is worth writing: gauges and lag alone are not."""
    return bool(delta.counters) or not delta.histograms.keys() <= UNEVENTFUL


def summary(delta: MetricDelta) -> dict[str, int | float]:
    """The numbers of one interval by their names. Numbers without an event are left out."""
    line: dict[str, int | float] = {}
    if delta.counted(PUSHES):
        line |= _pushes(delta)
    if (writes := delta.observed(WRITE_BYTES)).count:
        line |= {
            "WRITEs": writes.count,
            "MiB pushed": round(writes.total / MIB, 3),
            "Avg descriptors per WRITE": round(delta.observed(WRITE_DESCRIPTORS).mean, 1),
        }
        if delta.observed(WRITE_LAYERS).count:
            line["Avg layers per WRITE"] = round(delta.observed(WRITE_LAYERS).mean, 1)
    if delta.counted(LOADS):
        line |= {
            "Loads": delta.counted(LOADS, "loaded"),
            "Loads not done": delta.counted(LOADS) - delta.counted(LOADS, "loaded"),
        }
        line |= {"P90 load time (ms)": _ms(delta.observed(LOAD).quantile(0.9))}
    for name, number in (
        ("Failed WRITEs", delta.counted(FAILED_WRITES)),
        ("Lost peers", delta.counted(LOST_PEERS)),
        ("Dropped messages", delta.counted(DROPPED_MESSAGES)),
        ("Parked blocks", int(delta.highest(PARKED_BLOCKS))),
    ):
        line |= {name: number} if number else {}
    return line


def _pushes(delta: MetricDelta) -> dict[str, int | float]:
    exposed, layers = delta.observed(EXPOSED), delta.counted(LAYERS_READY)
    return {
        "Layer-wise pushes": delta.counted(PUSHES, "layerwise"),
        "Whole pushes": delta.counted(PUSHES, "whole", "fallback", "late_registration"),
        "Fallbacks": delta.counted(FALLBACKS),
        "Failed pushes": delta.counted(PUSHES, "failed"),
        "Cancelled pushes": delta.counted(PUSHES, "cancelled"),
        "Avg exposed time (ms)": _ms(exposed.mean),
        "P90 exposed time (ms)": _ms(exposed.quantile(0.9)),
        "Avg transfer time (ms)": _ms(delta.observed(TRANSFER).mean),
        "Hooked layers (%)": round(100 * delta.counted(LAYERS_READY, "hooked") / layers, 1) if layers else 0,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
