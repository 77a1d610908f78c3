"""Tables of the metrics, from the catalogue."""

from __future__ import annotations

from layerpush.telemetry.metrics.catalog import CATALOG, Kind, Metric, Side
from scripts.docgen.tables import table


def table_of(side: Side) -> str:
    """The metrics of engines of one side, or of both."""
    rows = [
        (f"`{metric.exposed_name}`", metric.kind.value, f"`{metric.label}`" if metric.label else "", metric.meaning)
        for metric in CATALOG
        if metric.side is side
    ]
    return table(("metric", "type", "label", "meaning"), rows)


def label_values() -> str:
    """The known values of each label, with their meanings."""
    rows = [
        (f"`{metric.key}`", f"`{metric.label}`", f"`{value}`", meaning)
        for metric in CATALOG
        for value, meaning in metric.values.items()
    ]
    return table(("metric", "label", "value", "meaning"), rows)


def buckets() -> str:
    """Upper bounds of the histograms. Histograms with equal bounds share a row."""
    by_bounds: dict[tuple[float, ...], list[Metric]] = {}
    for metric in CATALOG:
        if metric.kind is Kind.HISTOGRAM:
            by_bounds.setdefault(metric.buckets, []).append(metric)
    rows = [
        (", ".join(f"`{metric.key}`" for metric in metrics), ", ".join(f"{bound:.12g}" for bound in bounds))
        for bounds, metrics in by_bounds.items()
    ]
    return table(("histogram", "upper bounds"), rows)
