"""Which part of which page is generated, and by what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from layerpush.core.config import documentation_table
from layerpush.telemetry.metrics.catalog import Side
from scripts.docgen import (
    contributing,
    figures,
    forwardfigures,
    kernelfigures,
    limits,
    messages,
    metrics,
    options,
    protocol,
    pushfigures,
    refusals,
    servefigures,
    soakrun,
    versions,
)
from scripts.docgen.markers import fill


class Section(NamedTuple):
    """``render`` gets the root of the checkout; ``pages`` are paths in it."""

    pages: tuple[str, ...]
    render: Callable[[Path], str]


README, CONFIGURATION, SECURITY = "README.md", "docs/configuration.md", "docs/security.md"
METRICS, PROXY = "docs/metrics.md", "docs/proxy.md"
BENCHMARKS, COMPATIBILITY, CONTRIBUTING = "docs/benchmarks.md", "docs/compatibility.md", "docs/contributing.md"
PROTOCOL, FAILURES, SOAK = "docs/design/protocol.md", "docs/design/failures.md", "docs/soak.md"
PACKING = "docs/design/packing.md"

SECTIONS: Mapping[str, Section] = {
    "config-table": Section((README, CONFIGURATION), lambda _: documentation_table()),
    "config-errors": Section((CONFIGURATION,), lambda _: refusals.refusals()),
    "params-errors": Section((CONFIGURATION,), lambda _: refusals.bad_requests()),
    "demo-figures": Section((README, BENCHMARKS), figures.demo),
    "bench-figures": Section((README, BENCHMARKS), figures.bench),
    "proxy-figures": Section((README, PROXY, BENCHMARKS), figures.proxy),
    "serve-summary": Section((README,), servefigures.summary),
    "serve-figures": Section((BENCHMARKS,), servefigures.tables),
    "again-figures": Section((BENCHMARKS,), servefigures.again),
    "sweep-figures": Section((BENCHMARKS,), servefigures.sweep),
    "forward-figures": Section((BENCHMARKS,), forwardfigures.tables),
    "link-figures": Section((BENCHMARKS,), forwardfigures.links),
    "push-summary": Section((README, PACKING), pushfigures.summary),
    "push-figures": Section((BENCHMARKS,), pushfigures.tables),
    "kernel-figures": Section((BENCHMARKS,), kernelfigures.tables),
    "soak-summary": Section((README, BENCHMARKS), soakrun.summary),
    "soak-tables": Section((SOAK,), soakrun.tables),
    "protocol-course": Section((PROTOCOL,), lambda _: protocol.course()),
    "protocol-endings": Section((PROTOCOL,), lambda _: protocol.endings()),
    "protocol-states": Section((PROTOCOL,), lambda _: protocol.PREFILL.states()),
    "protocol-events": Section((PROTOCOL,), lambda _: protocol.PREFILL.events()),
    "protocol-actions": Section((PROTOCOL,), lambda _: protocol.PREFILL.actions()),
    "decode-moves": Section((PROTOCOL,), lambda _: protocol.DECODE.diagram()),
    "decode-states": Section((PROTOCOL,), lambda _: protocol.DECODE.states()),
    "decode-final-statuses": Section((PROTOCOL,), lambda _: protocol.final_statuses()),
    "decode-events": Section((PROTOCOL,), lambda _: protocol.DECODE.events()),
    "decode-actions": Section((PROTOCOL,), lambda _: protocol.DECODE.actions()),
    "messages-upstream": Section((PROTOCOL,), lambda _: messages.upstream()),
    "messages-ours": Section((PROTOCOL,), lambda _: messages.ours()),
    "limits-messages": Section((SECURITY,), limits.messages),
    "metrics-prefill": Section((METRICS,), lambda _: metrics.table_of(Side.PREFILL)),
    "metrics-decode": Section((METRICS,), lambda _: metrics.table_of(Side.DECODE)),
    "metrics-both": Section((METRICS,), lambda _: metrics.table_of(Side.BOTH)),
    "metrics-labels": Section((METRICS,), lambda _: metrics.label_values()),
    "metrics-buckets": Section((METRICS,), lambda _: metrics.buckets()),
    "limits-tables": Section((FAILURES,), limits.tables),
    "proxy-options": Section((PROXY,), lambda _: options.proxy()),
    "versions": Section((COMPATIBILITY,), versions.tables),
    "contributing": Section((CONTRIBUTING,), contributing.page),
}


def pages() -> list[str]:
    """Every page with a generated part."""
    return sorted({page for section in SECTIONS.values() for page in section.pages})


def updated(root: Path, page: str, text: str, markers: Iterable[str] = SECTIONS) -> str:
    """``text`` of ``page`` with these parts made anew. Raises ``markers.MarkerError``."""
    for marker in markers:
        if page in SECTIONS[marker].pages:
            text = fill(text, marker, SECTIONS[marker].render(root))
    return text
