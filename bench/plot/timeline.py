"""One request: when each layer was computed and when it was on the wire, for one mode or several side by side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.plot.series import ResultError
from layerpush.apps.tracing.figures import TraceError, figures_of, read_pushes
from layerpush.apps.tracing.folder import FolderError
from layerpush.apps.tracing.picture import PictureError, draw_pushes, draw_request
from layerpush.apps.tracing.requests import RequestError, read_traces
from layerpush.telemetry.trace_records import PushRecord


def draw(folder: Path, path: Path, request: str | None = None) -> str:
    """What was drawn: the request that is named, with all that P and D did, or a typical one of each mode.

    Folders in ``folder`` are modes, as ``make demo ARGS="--keep-logs DIR"`` leaves them in ``DIR/trace``; without
    any, ``folder`` is a mode itself. Raises ``ResultError``.
    """
    try:
        if request is not None:
            chosen = read_traces([folder]).find(request)
            draw_request(chosen, path)
            return chosen.name
        typical = {mode: push for mode, pushes in _modes(folder) if (push := _typical(pushes)) is not None}
        if not typical:
            raise ResultError(f"{folder}: no push of its traces was completed; is it a trace_dir, or a folder of some?")
        draw_pushes(typical, path)
    except (FolderError, RequestError, PictureError, TraceError, OSError) as error:
        raise ResultError(f"{folder}: {error}") from error
    return ", ".join(f"{mode} {push.request_id}" for mode, push in typical.items())


def _modes(folder: Path) -> Iterable[tuple[str, list[PushRecord]]]:
    own = read_pushes(folder)
    if own:
        yield folder.name, own
    for below in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield below.name, read_pushes(below)


def _typical(pushes: Iterable[PushRecord]) -> PushRecord | None:
    """Of the longest prompts, the push whose exposed time is in the middle."""
    completed = [push for push in pushes if push.outcome == "completed"]
    longest = max((push.tokens for push in completed), default=0)
    candidates = sorted((push for push in completed if push.tokens == longest), key=lambda p: figures_of(p).exposed_ms)
    return candidates[(len(candidates) - 1) // 2] if candidates else None
