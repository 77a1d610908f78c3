"""Runs ``layerpush trace``, and reads its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from layerpush.apps.cli import app
from tests.support.waiting import until

Fields = dict[str, Any]
wait_for = partial(until, pause_s=0.02)
HAND_OVER = ("exposed", "notification", "D wait", "schedule", "first step")


def trace(*arguments: object) -> Result:
    """``layerpush trace ...``, which must end well. tests/unit/test_trace_command.py starts it as a program."""
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done


def summary(folders: Sequence[Path]) -> Fields:
    data: Fields = json.loads(trace("summary", "--json", "--top", 1000, *folders).stdout)
    return data


def merged(folders: Sequence[Path], out: Path) -> list[Fields]:
    """The events of the file that ``merge`` writes."""
    trace("merge", *folders, "--out", out)
    whole = json.loads(out.read_text())
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    events: list[Fields] = whole["traceEvents"]
    return events


def lines(folders: Iterable[Path], kind: str) -> list[Fields]:
    """All whole lines of one kind, read without any of layerpush's code."""
    texts = [path.read_text() for folder in folders for path in folder.glob("*.jsonl")]
    whole = [json.loads(line) for text in texts for line in text.rpartition("\n")[0].splitlines() if line]
    return [line for line in whole if line["kind"] == kind]


def parts_add_up(request: Fields) -> bool:
    """Whether the parts of a summary's entry add up to its total."""
    hand_over = [request[name] or 0.0 for name in HAND_OVER]
    parts = [request[name] or 0.0 for name in ("queue", "prefill", "other")]
    adds_up = request["hand-over"] is None or abs(sum(hand_over) - request["hand-over"]) < 1e-6
    return adds_up and abs(sum(hand_over) + sum(parts) - request["total"]) < 1e-6


def slices(events: Iterable[Fields], category: str, name: str) -> list[Fields]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category and event["name"] == name]


def end(event: Fields) -> float:
    return float(event["ts"] + event["dur"])


def arrows(events: Iterable[Fields]) -> dict[tuple[str, int], tuple[Fields, Fields]]:
    """Both ends of each arrow by its name and number."""
    ends: dict[tuple[str, int], dict[str, Fields]] = {}
    for event in events:
        if event["ph"] in "sf":
            found = ends.setdefault((event["name"], event["id"]), {})
            assert event["ph"] not in found, f"two of {event}"
            found[event["ph"]] = event
    return {key: (found["s"], found["f"]) for key, found in ends.items()}
