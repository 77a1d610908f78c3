"""Requests, each with the pushes of P's ranks, the loads of D's ranks, and its first token; all times on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

from msgspec import Struct

from layerpush.apps.tracing.clocks import Clocks, find_clocks
from layerpush.apps.tracing.folder import Source, read_folders
from layerpush.telemetry.trace_records import FirstTokenRecord, LoadRecord, PushRecord, Record

SHORTENED = "…"


class RequestError(ValueError):
    """No request matches, or more than one does. The text names some requests."""


@dataclass(slots=True)
class RequestTrace:
    """One request. ``name`` is its id without the suffixes that the engines gave it."""

    name: str
    pushes: list[PushRecord] = field(default_factory=list)
    loads: list[LoadRecord] = field(default_factory=list)
    first_tokens: list[FirstTokenRecord] = field(default_factory=list)

    @property
    def ids(self) -> set[str]:
        """All its ids: its name, and P's and D's request ids."""
        decode_ids = {push.decode_request_id for push in self.pushes} - {None}
        own = {push.request_id for push in self.pushes} | {load.request_id for load in self.loads}
        return {self.name} | own | {one for one in decode_ids if one is not None}

    @property
    def tokens(self) -> int:
        return max((push.tokens for push in self.pushes), default=0)

    @property
    def outcome(self) -> str:
        """The outcome on D if it has a record, else on P. Of several, one that is not "completed" counts."""
        outcomes = [one.outcome for one in self.loads or self.pushes]
        return next((outcome for outcome in outcomes if outcome != "completed"), "completed")

    @property
    def reason(self) -> str | None:
        reasons = [load.reason for load in self.loads] + [push.reason for push in self.pushes]
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def begin(self) -> float:
        """Its first known time, in seconds; 0 if there is none."""
        return min((at for record in (*self.pushes, *self.loads) for _, at in times(record)), default=0.0)

    @property
    def verified_parts(self) -> int:
        """Parts of KV that all ranks of D have compared with P's."""
        return sum(load.verified_parts for load in self.loads)

    @property
    def mode(self) -> str:
        return next((push.mode for push in self.pushes), "?")


@dataclass(frozen=True, slots=True)
class TraceSet:
    """All requests of the folders. The times of all records are on the reference clock."""

    requests: list[RequestTrace]
    sources: list[Source]
    clocks: Clocks

    def find(self, wanted: str) -> RequestTrace:
        """The request with this id, or the only one whose id contains it, or has it when ``shortened``.

        Raises ``RequestError``.
        """
        exact = [request for request in self.requests if wanted in request.ids]
        found = exact or [request for request in self.requests if any(_has(one, wanted) for one in request.ids)]
        if len(found) == 1:
            return found[0]
        some = ", ".join(request.name for request in (found or self.requests)[:5])
        more = ", ..." if len(found or self.requests) > 5 else ""
        reason = f"{len(found)} requests have it" if found else "no request has it; there are"
        raise RequestError(f"{wanted!r} is not the id of one request: {reason}: {some}{more}")


def read_traces(folders: Iterable[Path], *, outlines: bool = False) -> TraceSet:
    """Read the folders and join their records. ``outlines`` and ``FolderError``: see ``read_folders``."""
    sources = read_folders(folders, outlines=outlines)
    clocks = find_clocks(sources)
    return TraceSet(join(sources, clocks), sources, clocks)


def join(sources: Iterable[Source], clocks: Clocks) -> list[RequestTrace]:
    """Join records into requests, in the order of their first times. Moves all times to the reference clock."""
    requests: dict[tuple[str | None, str | None], RequestTrace] = {}

    def of(engine_id: str | None, request_id: str) -> RequestTrace:
        return requests.setdefault((engine_id, request_id), RequestTrace(without_suffix(request_id)))

    for source in sources:
        by = clocks.rebased(source.clock)
        for load in source.loads:
            of(load.engine_id, load.request_id).loads.append(load)
            shift(load, by)
        for push in source.pushes:
            if push.decode_request_id is not None:
                request = of(push.decode_engine_id, push.decode_request_id)
            else:
                request = of(push.engine_id, push.request_id)
            request.pushes.append(push)
            shift(push, by)
    for source in sources:
        by = clocks.rebased(source.clock)
        for token in source.first_tokens:
            loaded = requests.get((token.engine_id, token.request_id))
            if loaded is not None:
                loaded.first_tokens.append(token)
                shift(token, by)
    for request in requests.values():
        request.pushes.sort(key=lambda push: (push.engine_id, push.rank))
        request.loads.sort(key=lambda load: (load.engine_id, load.rank))
    return sorted(requests.values(), key=lambda request: request.begin)


def shift(record: Record, by: float) -> None:
    """Add ``by`` seconds to every time of a record."""
    if not by:
        return
    inner: Iterable[Struct] = ()
    if isinstance(record, PushRecord):
        inner = chain(record.chunks, record.writes)
        record.ready = [(chunk, layer, at + by, hooked) for chunk, layer, at, hooked in record.ready]
    for one in chain((record,), inner):
        for name, at in times(one):
            setattr(one, name, at + by)


def times(record: Struct) -> Iterator[tuple[str, float]]:
    """Names and values of a record's known times."""
    for name in _time_fields(type(record)):
        if (at := getattr(record, name)) is not None:
            yield name, at


@cache
def _time_fields(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name.startswith("t_"))


def shortened(request_id: str, width: int) -> str:
    """The id in at most ``width`` characters, with a gap in its middle. Its end is longer than its begin: routers put
    what an id shares with others in front.
    """
    if len(request_id) <= width:
        return request_id
    begin = (width - 1) // 3
    return request_id[:begin] + SHORTENED + request_id[begin + 1 - width :]


def _has(request_id: str, wanted: str) -> bool:
    begin, gap, end = wanted.partition(SHORTENED)
    return request_id.startswith(begin) and request_id.endswith(end) if gap else wanted in request_id


def without_suffix(request_id: str) -> str:
    """The id without vLLM's suffix: ``-`` and eight hex digits."""
    base, dash, suffix = request_id.rpartition("-")
    has_suffix = dash and len(suffix) == 8 and all(digit in "0123456789abcdef" for digit in suffix)
    return base if has_suffix else request_id
