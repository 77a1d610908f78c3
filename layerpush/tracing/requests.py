"""Requests, each with the pushes of P's ranks and the loads of D's, all times on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from layerpush.trace import LoadRecord, PushRecord
from layerpush.tracing.clocks import Clocks, find_clocks
from layerpush.tracing.folder import Source, read_folders

R = TypeVar("R", bound=Struct)


class RequestError(ValueError):
    """No such request, or more than one. The text names some that there are."""


@dataclass(slots=True)
class RequestTrace:
    """One request. ``name`` is its id without the suffixes that the engines gave it."""

    name: str
    pushes: list[PushRecord] = field(default_factory=list)
    loads: list[LoadRecord] = field(default_factory=list)

    @property
    def ids(self) -> set[str]:
        """Everything that it is called."""
        decode_ids = {push.decode_request_id for push in self.pushes} - {None}
        own = {push.request_id for push in self.pushes} | {load.request_id for load in self.loads}
        return {self.name} | own | {one for one in decode_ids if one is not None}

    @property
    def tokens(self) -> int:
        return max((push.tokens for push in self.pushes), default=0)

    @property
    def outcome(self) -> str:
        """D's word counts, if it is there; what is not "completed" outweighs what is."""
        outcomes = [one.outcome for one in self.loads or self.pushes]
        return next((outcome for outcome in outcomes if outcome != "completed"), "completed")

    @property
    def reason(self) -> str | None:
        reasons = [load.reason for load in self.loads] + [push.reason for push in self.pushes]
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def begin(self) -> float:
        """The first that is known of it, in seconds; 0 if nothing is."""
        return min((at for record in (*self.pushes, *self.loads) for _, at in times(record)), default=0.0)

    @property
    def mode(self) -> str:
        return next((push.mode for push in self.pushes), "?")


@dataclass(frozen=True, slots=True)
class TraceSet:
    """All that was read. Times of ``requests`` are the reference clock's, those of ``sources`` are as written."""

    requests: list[RequestTrace]
    sources: list[Source]
    clocks: Clocks

    def find(self, wanted: str) -> RequestTrace:
        """The request that is called so, or the only one whose id has this in it. Raises ``RequestError``."""
        exact = [request for request in self.requests if wanted in request.ids]
        found = exact or [request for request in self.requests if any(wanted in one for one in request.ids)]
        if len(found) == 1:
            return found[0]
        some = ", ".join(request.name for request in (found or self.requests)[:5])
        more = ", ..." if len(found or self.requests) > 5 else ""
        what = f"{len(found)} requests have it" if found else "no request has it; there are"
        raise RequestError(f"{wanted!r} is not the id of one request: {what}: {some}{more}")


def read_traces(folders: Iterable[Path]) -> TraceSet:
    """Raises ``FolderError`` if nothing is recorded there."""
    sources = read_folders(folders)
    clocks = find_clocks(sources)
    return TraceSet(join(sources, clocks), sources, clocks)


def join(sources: Iterable[Source], clocks: Clocks) -> list[RequestTrace]:
    """Requests in the order of their beginning."""
    requests: dict[tuple[str | None, str | None], RequestTrace] = {}

    def of(engine_id: str | None, request_id: str) -> RequestTrace:
        return requests.setdefault((engine_id, request_id), RequestTrace(without_suffix(request_id)))

    for source in sources:
        by = clocks.rebased(source.clock)
        for load in source.loads:
            of(load.engine_id, load.request_id).loads.append(shifted(load, by))
        for push in source.pushes:
            if push.decode_request_id is not None:
                request = of(push.decode_engine_id, push.decode_request_id)
            else:
                request = of(push.engine_id, push.request_id)
            request.pushes.append(shifted(push, by))
    for request in requests.values():
        request.pushes.sort(key=lambda push: (push.engine_id, push.rank))
        request.loads.sort(key=lambda load: (load.engine_id, load.rank))
    return sorted(requests.values(), key=lambda request: request.begin)


def shifted(record: R, by: float) -> R:
    """A push or a load with every time moved by so many seconds."""
    moved = _moved(record, by)
    if isinstance(moved, PushRecord):
        moved.chunks = [_moved(chunk, by) for chunk in moved.chunks]
        moved.writes = [_moved(write, by) for write in moved.writes]
        moved.ready = [(chunk, layer, at + by, hooked) for chunk, layer, at, hooked in moved.ready]
    return moved


def _moved(record: R, by: float) -> R:
    return replace(record, **{name: at + by for name, at in times(record)})


def times(record: Struct) -> Iterator[tuple[str, float]]:
    """The times of a record that are known, by their names."""
    for name in record.__struct_fields__:
        if name.startswith("t_") and (at := getattr(record, name)) is not None:
            yield name, at


def without_suffix(request_id: str) -> str:
    """vLLM appends ``-`` and eight hex digits to the id of each request."""
    base, dash, suffix = request_id.rpartition("-")
    has_suffix = dash and len(suffix) == 8 and all(digit in "0123456789abcdef" for digit in suffix)
    return base if has_suffix else request_id
