"""After each round: does an idle engine still hold resources?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.e2e.probes import BOUNDED_MEMORIES
from tests.faults.soak import inhost
from tests.faults.soak.engine import Answer
from tests.faults.soak.engine_slots import EngineSlot
from tests.faults.soak.inhost import Audit
from tests.faults.soak.sent import Sent

PATIENCE_S = 60.0
AGAIN_S = 0.5
MORE_THREADS = 4
ALLOWED = BOUNDED_MEMORIES


class EngineAudit:
    """Asks one engine until it holds nothing, or until patience ends."""

    def __init__(self, slot: EngineSlot, sent: Sent) -> None:
        self.slot = slot
        self._sent = sent
        self._incarnation = slot.incarnation
        self._next_at = 0.0
        self._asking = False
        self.last: Audit | None = None

    def advance(self, now: float) -> None:
        if not self._asking and now >= self._next_at and self.slot.engine.ready:
            self._asking = True
            orphans = self._sent.orphans()
            texts = [request_id for request_id in self._sent.ids() if request_id not in orphans]
            self.slot.engine.call(inhost.audit, texts, sorted(orphans), ALLOWED, then=self._answered)

    def _answered(self, answer: Answer) -> None:
        self._asking = False
        self._next_at = time.monotonic() + AGAIN_S
        if answer.value is not None:
            self.last = answer.value

    @property
    def gone(self) -> bool:
        """Whether the engine died meanwhile, which is a problem of another kind."""
        return self.slot.incarnation != self._incarnation or self.slot.leaving

    def findings(self) -> list[str]:
        """The engine's holdings, in words."""
        if self.gone:
            return []
        if self.last is None:
            return ["it does not answer"]
        return held(self.last, self.slot.usual_threads)


def held(audit: Audit, usual_threads: int | None) -> list[str]:
    """Forbidden holdings of an idle engine, in words."""
    found = []
    if audit.missing_blocks:
        found.append(f"{audit.missing_blocks} blocks are not free")
        found += audit.awaited
    if audit.requests:
        found.append(f"the scheduler keeps {', '.join(audit.requests[:5])}")
    if audit.mentions:
        found.append(f"{len(audit.mentions)} table entries of ended requests, at {', '.join(audit.mentions[:5])}")
    if audit.open_handles:
        found.append(f"{audit.open_handles} transfer handles are open")
    if usual_threads is not None and audit.os_threads > usual_threads + MORE_THREADS:
        found.append(f"{audit.os_threads} threads, {usual_threads} at first: {', '.join(audit.threads)}")
    return found


class Auditor:
    """Audits all engines at once."""

    def __init__(self, slots: Sequence[EngineSlot], sent: Sent) -> None:
        self._audits = [EngineAudit(slot, sent) for slot in slots]
        self._until = time.monotonic() + PATIENCE_S

    def over(self, now: float) -> bool:
        """Advance the audits. True if no engine holds anything, or patience has ended."""
        for audit in self._audits:
            if audit.findings():
                audit.advance(now)
        return now > self._until or not any(audit.findings() for audit in self._audits)

    def leaks(self) -> list[str]:
        return [
            f"{audit.slot.name} ({audit.slot.engine.log_path}) at idle: {finding}"
            for audit in self._audits
            for finding in audit.findings()
        ]

    def leaking(self) -> list[EngineSlot]:
        return [audit.slot for audit in self._audits if audit.findings()]

    def learn(self) -> None:
        """Set each engine's limit of threads for later idle moments: its number at the first one."""
        for audit in self._audits:
            if audit.last is not None and not audit.gone and audit.slot.usual_threads is None:
                audit.slot.usual_threads = audit.last.os_threads
