"""The generated parts of all pages, and their functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench import keptpage, kernelpage, paged, returnedpage
from bench.fleet import page as fleet
from bench.forward import page as forward
from bench.markdown import Result
from bench.serve import page as serve
from layerpush.telemetry.metrics.catalog import Side
from scripts.docgen import (
    copies,
    estimates,
    figures,
    hooks,
    kinds,
    limits,
    messages,
    metrics,
    options,
    patches,
    protocol,
    soakrun,
    topologies,
    versions,
    waiting,
)
from scripts.docgen.markers import fill


class Section(NamedTuple):
    """``render`` gets the root of the checkout; ``pages`` are paths in it."""

    pages: tuple[str, ...]
    render: Callable[[Path], str]


def of(name: str, render: Callable[[Result], str]) -> Callable[[Path], str]:
    """Render ``bench/results/NAME``."""
    return lambda root: render(json.loads((root / "bench/results" / name).read_text()))


README = "README.md"
CONFIGURATION, SECURITY = "docs/configuration.md", "docs/security.md"
METRICS, PROXY, FLEET = "docs/metrics.md", "docs/proxy.md", "docs/fleet.md"
ESTIMATE = "docs/estimate.md"
BENCHMARKS, FIGURES = "docs/benchmarks.md", "docs/figures.md"
COMPATIBILITY = "docs/compatibility.md"
PROTOCOL, FAILURES, SOAK = "docs/design/protocol.md", "docs/design/failures.md", "docs/soak.md"

SECTIONS: Mapping[str, Section] = {
    "config-table": Section((CONFIGURATION,), lambda _: options.settings()),
    "demo-figures": Section((BENCHMARKS,), of("demo.json", figures.demo)),
    "headline": Section((README,), of("token-serve.json", serve.headline)),
    "serve-short": Section((BENCHMARKS,), of("serve.json", serve.first_tokens)),
    "serve-figures": Section((FIGURES,), of("serve.json", serve.tables)),
    "token-serve-short": Section((BENCHMARKS,), of("token-serve.json", serve.first_tokens)),
    "token-serve-figures": Section((FIGURES,), of("token-serve.json", serve.tables)),
    "long-serve-short": Section((BENCHMARKS,), of("long-serve.json", serve.first_tokens)),
    "long-serve-figures": Section((FIGURES,), of("long-serve.json", serve.tables)),
    "forward-short": Section((BENCHMARKS,), of("forward.json", forward.short_table)),
    "forward-figures": Section((FIGURES,), of("forward.json", forward.table)),
    "long-figures": Section((BENCHMARKS,), of("long.json", forward.long_table)),
    "verify-figures": Section((BENCHMARKS,), of("verify.json", forward.verify_table)),
    "link-short": Section((BENCHMARKS,), of("links.json", forward.short_table)),
    "link-figures": Section((FIGURES,), of("links.json", forward.table)),
    "gpu-summary": Section((README,), of("gpu-serve.json", serve.in_short)),
    "gpu-serve-short": Section((BENCHMARKS,), of("gpu-serve.json", serve.first_tokens)),
    "gpu-serve-figures": Section((FIGURES,), of("gpu-serve.json", serve.tables)),
    "gpu-kernel-figures": Section((BENCHMARKS,), of("gpu-kernel.json", kernelpage.tables)),
    "paged-figures": Section((FIGURES,), of("paged.json", paged.table)),
    "copies-figures": Section((BENCHMARKS,), of("copies.json", copies.tables)),
    "kept-figures": Section((BENCHMARKS,), of("kept.json", keptpage.table)),
    "returned-figures": Section((BENCHMARKS,), of("returned.json", returnedpage.tables)),
    "fleet-arrivals": Section((FLEET,), lambda _: fleet.arrivals_table()),
    "waiting-figures": Section((BENCHMARKS,), of("waiting.json", waiting.table)),
    "fleet-load": Section((FLEET,), of("fleet.json", fleet.load_table)),
    "fleet-incast": Section((FLEET,), of("fleet.json", fleet.incast_table)),
    "fleet-ratio": Section((FLEET,), of("fleet.json", fleet.ratio_table)),
    "fleet-scale": Section((FLEET,), of("fleet.json", fleet.scale_table)),
    "fleet-deaths": Section((FLEET,), of("fleet.json", fleet.deaths_table)),
    "fleet-validation": Section((FLEET,), of("validation.json", fleet.validation_table)),
    "estimate-example": Section((ESTIMATE,), lambda _: estimates.example()),
    "estimate-check": Section((ESTIMATE,), estimates.check),
    "soak-summary": Section((BENCHMARKS,), of("soak.json", soakrun.summary)),
    "soak-tables": Section((SOAK,), of("soak.json", soakrun.tables)),
    "protocol-course": Section((PROTOCOL,), lambda _: protocol.course()),
    "protocol-endings": Section((PROTOCOL,), lambda _: protocol.endings()),
    "protocol-states": Section((PROTOCOL,), lambda _: protocol.PREFILL.states()),
    "protocol-events": Section((PROTOCOL,), lambda _: protocol.PREFILL.events()),
    "claim-moves": Section((PROTOCOL,), lambda _: protocol.CLAIM.diagram()),
    "claim-states": Section((PROTOCOL,), lambda _: protocol.CLAIM.states()),
    "claim-events": Section((PROTOCOL,), lambda _: protocol.CLAIM.events()),
    "decode-moves": Section((PROTOCOL,), lambda _: protocol.DECODE.diagram()),
    "decode-states": Section((PROTOCOL,), lambda _: protocol.DECODE.states()),
    "decode-final-statuses": Section((PROTOCOL,), lambda _: protocol.final_statuses()),
    "decode-events": Section((PROTOCOL,), lambda _: protocol.DECODE.events()),
    "turn-moves": Section((PROTOCOL,), lambda _: protocol.TURN.diagram()),
    "turn-states": Section((PROTOCOL,), lambda _: protocol.TURN.states()),
    "turn-events": Section((PROTOCOL,), lambda _: protocol.TURN.events()),
    "messages-vllm": Section((PROTOCOL,), lambda _: messages.vllms()),
    "messages-registration": Section((PROTOCOL,), lambda _: messages.registration()),
    "messages-ours": Section((PROTOCOL,), lambda _: messages.ours()),
    "limits-messages": Section((SECURITY,), lambda _: limits.messages()),
    "metrics-prefill": Section((METRICS,), lambda _: metrics.table_of(Side.PREFILL)),
    "metrics-decode": Section((METRICS,), lambda _: metrics.table_of(Side.DECODE)),
    "metrics-both": Section((METRICS,), lambda _: metrics.table_of(Side.BOTH)),
    "metrics-labels": Section((METRICS,), lambda _: metrics.label_values()),
    "metrics-buckets": Section((METRICS,), lambda _: metrics.buckets()),
    "limits-tables": Section((FAILURES,), lambda _: limits.tables()),
    "proxy-options": Section((PROXY,), lambda _: options.proxy()),
    "patches": Section((COMPATIBILITY,), lambda _: patches.patches()),
    "unhooked-layers": Section((COMPATIBILITY,), hooks.layers),
    "topologies": Section((COMPATIBILITY,), topologies.pairs),
    "kinds": Section((COMPATIBILITY,), lambda _: kinds.table_of_kinds()),
    "versions": Section((COMPATIBILITY,), versions.tables),
}


def pages() -> list[str]:
    """Every page with a generated part."""
    return sorted({page for section in SECTIONS.values() for page in section.pages})


def updated(root: Path, page: str, text: str, markers: Iterable[str] = SECTIONS) -> str:
    """``text`` of ``page`` with new generated parts. Raises ``markers.MarkerError``."""
    for marker in markers:
        if page in SECTIONS[marker].pages:
            text = fill(text, marker, SECTIONS[marker].render(root))
    return text
