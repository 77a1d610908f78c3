"""The pushes of the last call, from P's trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from layerpush.apps.tracing.figures import Figures, TraceError, figures_of, read_pushes
from layerpush.apps.tracing.requests import without_suffix
from layerpush.telemetry.trace_records import PushRecord

PATIENCE_S = 10.0
LOOK_S = 0.05
PROBE = "probe-"


class Pushes:
    """Follows a ``trace_dir`` from its current end."""

    def __init__(self, directory: Path, patience_s: float = PATIENCE_S) -> None:
        self._directory = directory
        self._patience_s = patience_s
        self._seen = {_key(push) for push in read_pushes(directory)}

    def new(self, requests: int) -> list[list[PushRecord]]:
        """The pushes since the last call: for each request those of its ranks. Requests are in the order of their ends.

        P writes its trace at about the time when D begins to answer, so this waits a little for late records. It leaves
        out a proxy's probes.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            fresh = [push for push in read_pushes(self._directory) if _key(push) not in self._seen]
            found: dict[str, list[PushRecord]] = {}
            for push in sorted(fresh, key=lambda push: push.t_last_landed or 0.0):
                if PROBE not in push.request_id:
                    found.setdefault(without_suffix(push.request_id), []).append(push)
            if len(found) >= requests or time.monotonic() > deadline:
                self._seen |= {_key(push) for push in fresh}
                return list(found.values())
            time.sleep(LOOK_S)


def figures_of_ranks(parts: Sequence[PushRecord]) -> Figures:
    """The figures of one request: bytes, WRITEs and descriptors are sums over its ranks, times are of the slowest rank.

    Raises ``TraceError``.
    """
    if not parts:
        raise TraceError("no push to take figures from")
    ranks = [figures_of(part) for part in parts]
    return Figures(
        prefill_ms=max(each.prefill_ms for each in ranks),
        transfer_ms=max(each.transfer_ms for each in ranks),
        exposed_ms=max(each.exposed_ms for each in ranks),
        hooked_layers=sum(each.hooked_layers for each in ranks),
        swept_layers=sum(each.swept_layers for each in ranks),
        writes=sum(each.writes for each in ranks),
        descriptors=sum(each.descriptors for each in ranks),
        bytes=sum(each.bytes for each in ranks),
    )


def _key(push: PushRecord) -> tuple[str, int, str]:
    return push.engine_id, push.rank, push.request_id
