"""The pushes of the last call, from P's trace."""

from __future__ import annotations

import time
from pathlib import Path

from layerpush.apps.tracing.figures import read_pushes
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


def _key(push: PushRecord) -> tuple[str, int, str]:
    return push.engine_id, push.rank, push.request_id
