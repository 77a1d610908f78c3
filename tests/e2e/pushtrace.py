"""Reads the push trace of a P engine (one JSON object per finished push)."""

import dataclasses
import json
import pathlib
import time
from typing import Any


@dataclasses.dataclass(frozen=True)
class Push:
    """A finished push's record in the trace. Times are time.perf_counter() seconds, shared by all processes here."""

    fields: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def writes_before_last_ready(self) -> int:
        """WRITEs that were posted while prefill was still computing a layer."""
        return sum(write["t_post"] < self.fields["t_last_ready"] for write in self.fields["writes"])

    @property
    def has_merged_write(self) -> bool:
        """Whether several layers shared a WRITE."""
        return any(first < last for first, last in (write["layers"] for write in self.fields["writes"]))

    @property
    def layer_chunks(self) -> set[tuple[int, int]]:
        return {(chunk, layer) for chunk, layer, _, _ in self.fields["ready"]}


def pushes(trace_dir: pathlib.Path, base_request_id: str) -> list[Push]:
    """The pushes of a request so far. The file may have lines of many other requests."""
    lines = [line for path in trace_dir.glob("*.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines if base_request_id in line]
    pushes = [Push(record) for record in records if record["kind"] == "push"]
    return [push for push in pushes if push.request_id.startswith(base_request_id)]


def wait_for_pushes(trace_dir: pathlib.Path, base_request_id: str, count: int = 1, timeout: float = 30.0) -> list[Push]:
    """The `count` pushes of a request. P writes their lines shortly after the request's end."""
    deadline = time.monotonic() + timeout
    while len(found := pushes(trace_dir, base_request_id)) < count:
        if time.monotonic() > deadline:
            raise AssertionError(f"{len(found)} of {count} pushes of {base_request_id} in {trace_dir}")
        time.sleep(0.01)
    assert len(found) == count
    return found
