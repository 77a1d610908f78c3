"""Trace lines in, figures of a push out, for the demo and the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.figures import Figures, TraceError, figures_of, median_figures, read_pushes
from layerpush.apps.tracing.intervals import compute_intervals
from layerpush.telemetry.trace_records import PushRecord

LAYERS = 3


def write(layers: tuple[int, int], chunk: int, t_post: float, t_landed: float) -> dict[str, Any]:
    return {
        "remote_rank": 0,
        "layers": list(layers),
        "chunks": [chunk, chunk],
        "descriptors": 8 * (1 + layers[1] - layers[0]),
        "bytes": 1000 * (1 + layers[1] - layers[0]),
        "t_post": t_post,
        "t_posted": t_post + 0.001,
        "t_landed": t_landed,
    }


def push_line(**changes: Any) -> dict[str, Any]:
    """Two chunks of three layers, planned at 10 s and 11 s; a layer every 0.1 s, the last WRITE landing at 11.45 s."""
    line = {
        "kind": "push",
        "request_id": "cmpl-abc-0-0123abcd",
        "decode_request_id": "cmpl-abc-0-89abcdef",
        "engine_id": "prefill",
        "decode_engine_id": "decode",
        "rank": 0,
        "mode": "layer",
        "fallback": None,
        "outcome": "completed",
        "epoch": 0,
        "tokens": 64,
        "chunks": [
            {"start_block": 0, "end_block": 8, "t_planned": 10.0},
            {"start_block": 8, "end_block": 16, "t_planned": 11.0},
        ],
        "ready": [[chunk, layer, 10.1 + chunk + 0.1 * layer, True] for chunk in range(2) for layer in range(LAYERS)],
        "writes": [
            write((0, 2), 0, 10.3, 10.6),
            write((0, 0), 1, 11.1, 11.25),
            write((1, 1), 1, 11.2, 11.3),
            write((2, 2), 1, 11.4, 11.45),
        ],
        "hooked_layers": 2 * LAYERS,
        "swept_layers": 0,
        "t_first_planned": 10.0,
        "t_last_ready": 11.3,
        "t_last_landed": 11.45,
        "t_notified": 11.46,
    }
    return line | changes


def parse(**changes: Any) -> PushRecord:
    return msgspec.convert(push_line(**changes), PushRecord)


def test_figures_of_a_push():
    figures = figures_of(parse())
    assert figures.prefill_ms == pytest.approx(1300)
    assert figures.transfer_ms == pytest.approx(300 + 200 + 50), "overlapping WRITEs are counted once"
    assert figures.exposed_ms == pytest.approx(150)
    assert (figures.hooked_layers, figures.swept_layers) == (6, 0)
    assert (figures.writes, figures.descriptors, figures.bytes) == (4, 48, 6000)


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "pending"])
def test_a_push_that_did_not_complete_has_no_figures(outcome: str):
    with pytest.raises(TraceError, match=outcome):
        figures_of(parse(outcome=outcome))


@pytest.mark.parametrize("missing", ["t_first_planned", "t_last_ready", "t_last_landed"])
def test_a_missing_time_is_an_error(missing: str):
    with pytest.raises(TraceError, match="lacks the time"):
        figures_of(parse(**{missing: None}))


def test_a_write_that_never_landed_is_an_error():
    lost = write((0, 2), 0, 10.3, 10.6) | {"t_landed": None}
    with pytest.raises(TraceError, match="not landed"):
        figures_of(parse(writes=[lost]))


def test_files_are_read_up_to_the_last_whole_line(tmp_path: Path):
    whole = json.dumps(push_line())
    (tmp_path / "a-rank0-1.jsonl").write_text(f"{whole}\n{whole[:100]}")
    (tmp_path / "b-rank0-2.jsonl").write_text(f"{whole}\n{whole}\n")
    (tmp_path / "notes.txt").write_text("not a trace")
    assert len(read_pushes(tmp_path)) == 3


def test_medians_have_whole_counts_and_the_largest_swept_count():
    def figures(exposed_ms: float, writes: int, swept: int) -> Figures:
        return Figures(1.0, 2.0, exposed_ms, 6, swept, writes, 48, 6000)

    middle = median_figures([figures(1.0, 4, 0), figures(3.0, 5, 0), figures(9.0, 6, 1), figures(5.0, 7, 0)])
    assert middle == Figures(1.0, 2.0, 4.0, 6, 1, 5, 48, 6000)
    with pytest.raises(TraceError):
        median_figures([])


def test_the_interval_of_a_layer_starts_at_the_end_of_the_previous_one():
    intervals = compute_intervals(parse())
    assert [(one.chunk, one.layer) for one in intervals] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [one.start for one in intervals] == pytest.approx([10.0, 10.1, 10.2, 11.0, 11.1, 11.2])
    assert [one.end for one in intervals] == pytest.approx([10.1, 10.2, 10.3, 11.1, 11.2, 11.3])
