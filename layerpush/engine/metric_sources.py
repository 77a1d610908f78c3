"""Gauges and totals that a worker's and a scheduler's ``Reporter`` read for each report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from layerpush.telemetry.metrics.catalog import (
    ACTIVE_PUSHES,
    AWAITED_LOADS,
    DROPPED_MESSAGES,
    DROPPED_RECORDS,
    PENDING_REGISTRATIONS,
    RANKS,
    RING_BYTES,
    RING_USED_BYTES,
    UNCLAIMED_PUSHES,
)

if TYPE_CHECKING:
    from layerpush.decode.loads import Loads
    from layerpush.prefill.claims import Claims
    from layerpush.prefill.pushes import Pushes
    from layerpush.prefill.step_events import StepEvents
    from layerpush.telemetry.metrics.reporter import Reporter
    from layerpush.telemetry.peer_errors import PeerErrors
    from layerpush.telemetry.trace_file import TraceFile
    from layerpush.transport.gather.ring import Ring


def watch_rings(reporter: Reporter, rings: Sequence[Ring]) -> None:
    """``rings`` are all of a worker's; empty if it gathers nothing."""
    reporter.level(RING_BYTES, lambda: sum(ring.capacity_bytes for ring in rings))
    reporter.level(RING_USED_BYTES, lambda: sum(ring.used_bytes for ring in rings))


def watch_worker(reporter: Reporter, ranks: int, loads: Loads, peer_errors: PeerErrors) -> None:
    """Report the engine's number of ``ranks``, this rank's loads, and its peer errors."""
    reporter.level(RANKS, lambda: ranks)
    reporter.level(AWAITED_LOADS, lambda: len(loads))
    watch_peer_errors(reporter, peer_errors)


def watch_pushes(reporter: Reporter, pushes: Pushes, claims: Claims, step_events: StepEvents, trace: TraceFile) -> None:
    """Report pushes, pending registrations, and lost records."""
    reporter.level(ACTIVE_PUSHES, lambda: pushes.active)
    reporter.level(UNCLAIMED_PUSHES, lambda: len(pushes.waiting()))
    reporter.level(PENDING_REGISTRATIONS, lambda: claims.pending)
    reporter.total(DROPPED_RECORDS, lambda: {"trace": trace.dropped, "hooks": step_events.dropped})


def watch_peer_errors(reporter: Reporter, peer_errors: PeerErrors) -> None:
    """Report the number of dropped messages of each kind."""

    def totals() -> Mapping[str, int]:
        counts = dict(peer_errors.counts)  # in one go: another thread may be adding a kind
        return {kind.replace(" ", "_"): number for kind, number in counts.items()}

    reporter.total(DROPPED_MESSAGES, totals)
