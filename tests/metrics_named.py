"""Compares the metrics of the dashboard and the alert rules in ``layerpush/apps/files`` with a scrape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.metrics_scrape import Scrape

FOLDER = Path(__file__).parents[1] / "layerpush/apps/files"
ADDED_BY_PROMETHEUS = {"namespace", "pod", "instance", "job"}
DASHBOARD, ALERTS = FOLDER / "grafana.json", FOLDER / "alerts.yml"


def expressions(document: Any) -> Iterator[str]:
    """Every PromQL expression of a dashboard or a file of rules, variables' queries included."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in ("expr", "query", "definition") and isinstance(value, str) and "vllm:" in value:
                yield value
            else:
                yield from expressions(value)
    elif isinstance(document, list):
        for value in document:
            yield from expressions(value)


def unknown_names(wanted: Iterable[str], scrape: Scrape) -> list[str]:
    """Metrics, labels and label values that these expressions name and the scrape does not have."""
    missing = []
    for expression in wanted:
        for name, matchers in re.findall(r"(vllm:[a-z0-9_]+)(?:\{([^}]*)\})?", expression):
            if name not in scrape.names:
                missing.append(name)
                continue
            for label, operator, text in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
                if label in ADDED_BY_PROMETHEUS:
                    continue
                known = scrape.label_values(name, label)
                values = [] if "$" in text else text.split("|") if "~" in operator else [text]
                missing += [f"{name}{{{label}}}"] if not known else []
                missing += [f'{name}{{{label}="{value}"}}' for value in values if known and value not in known]
        everywhere = ADDED_BY_PROMETHEUS | {label for sample in scrape.samples for label in sample.labels}
        for labels in re.findall(r"\bby\s*\(([^)]*)\)", expression):
            missing += [label.strip() for label in labels.split(",") if label.strip() not in everywhere]
    return missing
