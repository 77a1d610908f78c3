"""Reads trace files into records, process by process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from layerpush.core.push_mode import PushMode
from layerpush.telemetry.trace_records import (
    SCHEDULER_RANK,
    DropRecord,
    FirstTokenRecord,
    LoadRecord,
    ProcessRecord,
    PushRecord,
)


class FolderError(ValueError):
    """The folders have no record. The text names them and gives advice."""


@dataclass(slots=True)
class Source:
    """The records of one process. ``dropped`` counts lost records, ``unreadable`` lines that are no valid record."""

    path: Path
    process: ProcessRecord | None = None
    pushes: list[PushRecord] = field(default_factory=list)
    loads: list[LoadRecord] = field(default_factory=list)
    first_tokens: list[FirstTokenRecord] = field(default_factory=list)
    dropped: int = 0
    unreadable: int = 0

    def go_on(self, later: Source) -> None:
        """Add the records of the same process' next file."""
        self.path = later.path
        self.pushes += later.pushes
        for load in later.loads:
            _take_load(self.loads, load)
        self.first_tokens += later.first_tokens
        self.dropped = later.dropped or self.dropped
        self.unreadable += later.unreadable

    @property
    def clock(self) -> str:
        """The name of its clock; empty if the file does not name one."""
        return "" if self.process is None else self.process.clock

    @property
    def engine(self) -> tuple[str, int]:
        """Engine and rank; that of a scheduler is ``SCHEDULER_RANK``."""
        for known in (self.process, *self.pushes[:1], *self.loads[:1]):
            if known is not None:
                return known.engine_id, known.rank
        return self.path.stem, 0

    @property
    def name(self) -> str:
        """Engine and rank in words."""
        engine, rank = self.engine
        return f"{engine} scheduler" if rank == SCHEDULER_RANK else f"{engine} rank {rank}"


class _RecordKind(msgspec.Struct):
    kind: str


_TYPES: dict[str, type[ProcessRecord | PushRecord | LoadRecord | FirstTokenRecord | DropRecord]] = {
    kind.__struct_defaults__[0]: kind for kind in (ProcessRecord, PushRecord, LoadRecord, FirstTokenRecord, DropRecord)
}


def trace_files(folders: Iterable[Path]) -> list[Path]:
    """All trace files in these folders and below, each one once, in the order of their names."""
    return sorted({path.resolve() for folder in folders for path in folder.rglob("*.jsonl")})


def read_folders(folders: Iterable[Path], *, outlines: bool = False) -> list[Source]:
    """The records of all processes in these folders and below. Raises ``FolderError`` if there is no push and no load.

    With ``outlines``, pushes have no rows of layers and WRITEs: that takes less memory.
    """
    folders = list(folders)
    sources: list[Source] = []
    for path in trace_files(folders):
        with path.open("rb") as file:
            for source in read_lines(path, file, outlines):
                if sources and source.process is not None and source.process == sources[-1].process:
                    sources[-1].go_on(source)  # the file before had the largest size
                else:
                    sources.append(source)
    if not any(source.pushes or source.loads for source in sources):
        where = ", ".join(map(str, folders))
        raise FolderError(
            f"no push and no load is recorded in {where}: set trace_dir in kv_connector_extra_config of P and D, "
            "send a request with both in it, and name that directory"
        )
    return sources


def read_lines(path: Path, lines: Iterable[bytes], outlines: bool = False) -> list[Source]:
    """The records of each process that wrote this file. A last line without a line end is skipped as unfinished."""
    sources = [Source(path)]
    for line in lines:
        if line.endswith(b"\n") and line.strip():
            _take(sources, line, outlines)
    if sources[0].process is None and len(sources) > 1 and not (sources[0].pushes or sources[0].loads):
        sources[1].unreadable += sources[0].unreadable
        del sources[0]
    return sources


def _take(sources: list[Source], line: bytes, outlines: bool) -> None:
    try:
        kind = _TYPES.get(msgspec.json.decode(line, type=_RecordKind).kind)
        record = None if kind is None else msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        sources[-1].unreadable += 1
        return
    match record:
        case ProcessRecord():
            sources.append(Source(sources[-1].path, record))
        case PushRecord():
            sources[-1].pushes.append(_outline(record) if outlines else record)
        case LoadRecord():
            _take_load(sources[-1].loads, record)
        case FirstTokenRecord():
            sources[-1].first_tokens.append(record)
        case DropRecord():
            sources[-1].dropped = record.records


def _outline(push: PushRecord) -> PushRecord:
    push.ready = []
    if push.mode != PushMode.WHOLE:  # there the WRITEs give the time of the completion
        push.writes = []
    return push


def _take_load(loads: list[LoadRecord], load: LoadRecord) -> None:
    """A load's second record, which has the time when its blocks were freed, replaces its first."""
    if load.t_cleared is not None:
        for index in reversed(range(len(loads))):  # the first is seldom far back
            if (loads[index].request_id, loads[index].t_awaited) == (load.request_id, load.t_awaited):
                loads[index] = load
                return
    loads.append(load)
