"""The Grafana dashboard of ``layerpush/apps/files/grafana.json``, which ``scripts/pages`` writes again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerpush.telemetry.metrics import catalog
from layerpush.telemetry.metrics.catalog import Kind, Metric

FILE = Path(__file__).parents[2] / "layerpush/apps/files/grafana.json"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
VARIABLES = {"model_name": "Model", "namespace": "Namespace", "pod": "Pod", "instance": "Instance"}
"""Labels of a scrape to choose engines by, and their titles. "All" has series without the label, too."""
HERE = ", ".join(f'{label}=~"${label}"' for label in VARIABLES)
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """``lines`` are PromQL expressions by legend. ``unit`` is Grafana's name of a unit."""

    title: str
    unit: str
    lines: Mapping[str, str]
    meaning: str = ""
    stacked: bool = False


def rate(metric: Metric, matcher: str = "", by: str = "", part: str = "") -> str:
    """Rate per second, summed over the chosen instances. ``part`` is a suffix of a histogram, such as ``_sum``."""
    matchers = ", ".join(filter(None, (HERE, matcher)))
    inner = f"rate({metric.exposed_name}{part}{{{matchers}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def zeroed(value: str, events: str) -> str:
    """``value``, which is NaN while the rate of its ``events`` is 0, or that 0: Grafana says "No data" for NaN."""
    return f"{value} >= 0 or {events}"


def quantiles(metric: Metric) -> dict[str, str]:
    """The 50th, 90th and 99th percentile of a histogram, by legend."""
    buckets, events = rate(metric, by="le", part="_bucket"), rate(metric, part="_count")
    return {f"p{part}": zeroed(f"histogram_quantile(0.{part}, {buckets})", events) for part in (50, 90, 99)}


def mean(metric: Metric) -> str:
    """The mean of a histogram."""
    events = rate(metric, part="_count")
    return zeroed(f"{rate(metric, part='_sum')} / {events}", events)


def levels(*metrics: Metric) -> dict[str, str]:
    """Gauges, summed over the chosen instances, by legend."""
    assert all(metric.kind is Kind.GAUGE for metric in metrics)
    return {metric.key.replace("_", " "): f"sum({metric.exposed_name}{{{HERE}}})" for metric in metrics}


def share(metric: Metric, value: str, of: Sequence[str]) -> str:
    """The share, 0 to 1, of one label value among the label values ``of``."""
    some, known = f'{metric.label}="{value}"', f'{metric.label}=~"{"|".join(of)}"'
    return zeroed(f"{rate(metric, some)} / {rate(metric, known)}", rate(metric, known))


def first_token_times() -> str:
    """The 90th percentile of vLLM's time to first token, by engine."""
    buckets, events = (
        f"sum by ({labels}) (rate({TTFT}{part}{{{HERE}}}[$__rate_interval]))"
        for part, labels in (("_bucket", "le, instance"), ("_count", "instance"))
    )
    return zeroed(f"histogram_quantile(0.9, {buckets})", events)


def by_engine(gauge: str, of_its_ranks: str = "sum") -> str:
    """One of vLLM's gauges, by engine: the sum of its data-parallel ranks, or their ``max``."""
    return f"{of_its_ranks} by (instance) ({gauge}{{{HERE}}})"


TTFT = "vllm:time_to_first_token_seconds"
VLLMS = RUNNING, WAITING, USED = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
"""vLLM's own gauges that panels show."""
COMPLETED = ("layerwise", "whole", "fallback", "late_registration")
ROWS: Mapping[str, tuple[Panel, ...]] = {
    "First look": (
        Panel(
            "Engines",
            "short",
            {"engines": f"count({catalog.RANKS.exposed_name}{{{HERE}}})"} | levels(catalog.RANKS),
            "Fewer than you have started: one is down, or Prometheus cannot reach it.",
        ),
        Panel(
            "Failures",
            "reqps",
            {
                "pushes": rate(catalog.PUSHES, 'outcome="failed"'),
                "loads": rate(catalog.LOADS, 'outcome=~"failed|parked|refused"'),
            },
            "The engines' logs have the reasons.",
        ),
        Panel(
            "Time to first token",
            "s",
            {"{{instance}}": first_token_times()},
            "vLLM's, 90th percentile. That of a D is from its request to its first token. 0 without requests.",
        ),
        Panel(
            "Requests",
            "short",
            {"{{instance}} running": by_engine(RUNNING), "{{instance}} waiting": by_engine(WAITING)},
            "vLLM's. Many that wait: that engine is the bottleneck.",
        ),
        Panel(
            "KV cache in use", "percentunit", {"{{instance}}": by_engine(USED, "max")}, "vLLM's share of the blocks."
        ),
        Panel(
            "Waiting for each other",
            "short",
            levels(catalog.ACTIVE_PUSHES, catalog.UNCLAIMED_PUSHES, catalog.PENDING_REGISTRATIONS),
            "Unclaimed: P waits for D. Pending registrations: D waits for P.",
        ),
        Panel(
            "Pushed by layer",
            "percentunit",
            {"of completed pushes": share(catalog.PUSHES, "layerwise", COMPLETED)},
            "Share of completed pushes that overlap with prefill. 0 without pushes.",
        ),
        Panel("Exposed time", "s", quantiles(catalog.EXPOSED), catalog.EXPOSED.meaning),
        Panel("Pushed", "Bps", {"bytes": rate(catalog.WRITE_BYTES, part="_sum")}),
    ),
    "Prefill: pushes": (
        Panel("Pushes by outcome", "reqps", {"{{outcome}}": rate(catalog.PUSHES, by="outcome")}, stacked=True),
        Panel("Fallbacks by reason", "reqps", {"{{reason}}": rate(catalog.FALLBACKS, by="reason")}, stacked=True),
        Panel("Transfer time", "s", quantiles(catalog.TRANSFER), catalog.TRANSFER.meaning),
        Panel(
            "Layers hooked",
            "percentunit",
            {"of all layers": share(catalog.LAYERS_READY, "hooked", ("hooked", "swept"))},
            "Other layers are swept at the end of a step, without overlap within the step. 0 without pushes.",
        ),
    ),
    "Prefill: other connectors": (
        Panel(
            "Taken back after the completion",
            "ops",
            {"pushes": rate(catalog.REWOUND_PUSHES)},
            "Any of them may be a wrong answer of D.",
        ),
    ),
    "Prefill: routers": (
        Panel(
            "Early answers",
            "reqps",
            {"{{event}}": rate(catalog.EARLY_ANSWERS, by="event")},
            "Empty without `answer_early`.",
        ),
    ),
    "Prefill: WRITEs": (
        Panel(
            "WRITEs",
            "wps",
            {"{{plan}}": rate(catalog.WRITES, by="plan"), "failed": rate(catalog.FAILED_WRITES)},
            "By plan.",
        ),
        Panel("Bytes per WRITE", "bytes", {"mean": mean(catalog.WRITE_BYTES)} | quantiles(catalog.WRITE_BYTES)),
        Panel("Layers per WRITE", "short", {"mean": mean(catalog.WRITE_LAYERS)} | quantiles(catalog.WRITE_LAYERS)),
        Panel(
            "Descriptors per WRITE",
            "short",
            {"mean": mean(catalog.WRITE_DESCRIPTORS)} | quantiles(catalog.WRITE_DESCRIPTORS),
        ),
        Panel(
            "Time of a WRITE",
            "s",
            {"took": mean(catalog.WRITE_SECONDS), "was estimated to take": mean(catalog.WRITE_ESTIMATE)},
            "Means, of WRITEs that have an estimate. Far apart: the cost model of `packing: auto` is wrong.",
        ),
    ),
    "Decode: loads": (
        Panel("Loads by outcome", "reqps", {"{{outcome}}": rate(catalog.LOADS, by="outcome")}, stacked=True),
        Panel(
            "First tokens by origin",
            "reqps",
            {"{{origin}}": rate(catalog.FIRST_TOKENS, by="origin")},
            "Empty while `first_token` is `decode`.",
            stacked=True,
        ),
        Panel("Load time", "s", quantiles(catalog.LOAD), catalog.LOAD.meaning),
        Panel("Hand-over on D", "s", quantiles(catalog.HAND_OVER), catalog.HAND_OVER.meaning),
        Panel(
            "Parts of the hand-over on D",
            "s",
            {
                "report": mean(catalog.HAND_OVER_REPORT),
                "schedule": mean(catalog.HAND_OVER_SCHEDULE),
                "first step": mean(catalog.HAND_OVER_FIRST_STEP),
            },
            "Means of its parts: until the scheduler has the report, until a step begins, until the step's token.",
        ),
        Panel(
            "Kept of failed loads",
            "short",
            {"tokens": rate(catalog.KEPT_TOKENS)},
            "Tokens a second whose KV had landed when their load failed or was aborted.",
        ),
        Panel(
            "Verified",
            "short",
            {"parts": rate(catalog.VERIFIED_PARTS), "loads that differ": rate(catalog.VERIFY_MISMATCHES)},
            "Parts of KV that D has compared with P's, and loads that failed by it. Empty without `verify`.",
        ),
        Panel(
            "Awaited loads",
            "short",
            levels(catalog.AWAITED_LOADS, catalog.WAITING_PROMPTS),
            catalog.WAITING_PROMPTS.meaning,
        ),
        Panel(
            "Parked",
            "short",
            levels(catalog.PARKED_REQUESTS, catalog.PARKED_BLOCKS),
            "Parked until the P that may still write them answers or is known to have ended.",
        ),
        Panel("Lost peers", "ops", {"{{how}}": rate(catalog.LOST_PEERS, by="how")}),
    ),
    "Both": (
        Panel("Dropped messages", "ops", {"{{kind}}": rate(catalog.DROPPED_MESSAGES, by="kind")}),
        Panel("Writer lag", "s", quantiles(catalog.WRITER_LAG), catalog.WRITER_LAG.meaning),
        Panel(
            "Staging rings",
            "bytes",
            levels(catalog.RING_BYTES, catalog.RING_USED_BYTES),
            "0: nothing is gathered; the log has the reason.",
        ),
        Panel("Dropped records", "ops", {"{{queue}}": rate(catalog.DROPPED_RECORDS, by="queue")}),
    ),
}


def dashboard() -> dict[str, object]:
    """The dashboard as JSON types, in Grafana's format."""
    panels: list[dict[str, object]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": top, "w": WIDTH * COLUMNS, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        top += 1
        for index, panel in enumerate(row):
            line, column = divmod(index, COLUMNS)
            place = {"x": column * WIDTH, "y": top + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        top += -(-len(row) // COLUMNS) * HEIGHT
    return {
        "title": "layerpush",
        "uid": "layerpush",
        "tags": ["vllm", "layerpush"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                *map(_variable, VARIABLES),
            ]
        },
        "panels": panels,
    }


def _variable(label: str) -> dict[str, object]:
    """A variable for this label. The variables before it limit its values."""
    before = list(VARIABLES)[: list(VARIABLES).index(label)]
    chosen = ", ".join(f'{each}=~"${each}"' for each in before)
    query = f"label_values({catalog.RANKS.exposed_name}{{{chosen}}}, {label})"
    return {
        "name": label,
        "type": "query",
        "label": VARIABLES[label],
        "datasource": DATA_SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(panel: Panel) -> dict[str, object]:
    custom: dict[str, object] = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.meaning.replace("`", ""),
        "datasource": DATA_SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": DATA_SOURCE}
            for index, (legend, expression) in enumerate(panel.lines.items())
        ],
    }


def render() -> str:
    """The text of ``FILE``."""
    return json.dumps(dashboard(), indent=2) + "\n"
