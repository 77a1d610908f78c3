"""Errors of peers and of the network: counted by kind, and logged at a limited rate."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from layerpush.core.wire import one_line

QUIET_S = 1.0
MAX_KINDS = 64
MAX_TEXT_CHARS = 2000
OTHER = "other"


@dataclass
class _LoggedKind:
    silent_until: float = float("-inf")
    suppressed: int = 0


class PeerErrors:
    """Logs at most one line of a kind in ``quiet_s`` seconds. The line has the number of errors of its kind that were
    not logged since the line before.

    Kinds beyond ``MAX_KINDS`` count as one kind, "other". A text may contain bytes from a peer: it is logged as one
    short line. One thread counts; any thread may read ``counts``.
    """

    def __init__(self, logger: logging.Logger, quiet_s: float = QUIET_S) -> None:
        self.counts: Counter[str] = Counter()
        self._logger = logger
        self._quiet_s = quiet_s
        self._kinds: dict[str, _LoggedKind] = {}

    def count(self, kind: str, text: str, now: float, error: Exception | None = None) -> None:
        """Count an error of this kind. Log ``text`` unless the kind's last line is younger than ``quiet_s``, with the
        traceback of ``error`` if that is a defect of ours.

        ``now`` is in seconds on any clock that only goes forward.
        """
        if kind not in self._kinds:
            if len(self._kinds) >= MAX_KINDS:
                kind = OTHER
            self._kinds.setdefault(kind, _LoggedKind())
        self.counts[kind] += 1
        state = self._kinds[kind]
        if now < state.silent_until:
            state.suppressed += 1
            return
        more = f" ({state.suppressed} more like it since the last line)" if state.suppressed else ""
        state.suppressed, state.silent_until = 0, now + self._quiet_s
        level = logging.WARNING if error is None else logging.ERROR
        self._logger.log(level, "layerpush: %s%s", one_line(text, MAX_TEXT_CHARS), more, exc_info=error)
