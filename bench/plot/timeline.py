"""The timeline of one request, with computation and transfer of each layer; several modes side by side."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from bench.plot.series import ResultError
from layerpush.apps.tracing.figures import TraceError, figures_of, read_pushes
from layerpush.apps.tracing.folder import FolderError
from layerpush.apps.tracing.picture import PictureError, draw_pushes, draw_request
from layerpush.apps.tracing.requests import RequestError, read_traces
from layerpush.core.config import PushMode
from layerpush.telemetry.trace_records import PushRecord


def draw(folder: Path, path: Path, request: str | None = None) -> str:
    """Draw the named request with all work of P and D, or a typical push of each mode. Returns their names.

    ``folder`` is a ``trace_dir`` or has some below it, as ``DIR/trace`` of ``make demo ARGS="--keep-logs DIR"``.
    Raises ``ResultError``.
    """
    try:
        if request is not None:
            chosen = read_traces([folder]).find(request)
            draw_request(chosen, path)
            return chosen.name
        typical = {mode: push for mode in get_args(PushMode) if (push := _typical(folder, mode)) is not None}
        if not typical:
            raise ResultError(f"{folder}: no push of its traces was completed; is it a trace_dir, or a folder of some?")
        draw_pushes(typical, path)
    except (FolderError, RequestError, PictureError, TraceError, OSError) as error:
        raise ResultError(f"{folder}: {error}") from error
    return ", ".join(f"{mode} {push.request_id}" for mode, push in typical.items())


def _typical(folder: Path, mode: PushMode) -> PushRecord | None:
    """The push with the median exposed time, of the longest prompts in a mode."""
    places = (folder, *(path for path in folder.iterdir() if path.is_dir()))
    pushes = [push for place in places for push in read_pushes(place)]
    completed = [push for push in pushes if push.mode == mode and push.outcome == "completed"]
    longest = max((push.tokens for push in completed), default=0)
    candidates = sorted((push for push in completed if push.tokens == longest), key=lambda p: figures_of(p).exposed_ms)
    return candidates[(len(candidates) - 1) // 2] if candidates else None
