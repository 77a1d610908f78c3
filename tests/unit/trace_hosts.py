"""Trace records and files, made by hand, or of two hosts: a real writer and real loads play requests by two clocks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from layerpush.core.wire import Completion, Fail
from layerpush.telemetry.trace_records import (
    SCHEDULER_RANK,
    DropRecord,
    FirstTokenRecord,
    LoadRecord,
    ProcessRecord,
    PushRecord,
    Record,
)
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld
from tests.unit.test_loads import EXTRA, World
from tests.unit.test_loads import P as P_ADDRESS

TOKENS = 16
WALL = 1_700_000_000.0


def process(engine: str, clock: str, t: float = 0.0, unix: float = 0.0, rank: int = 0) -> ProcessRecord:
    return ProcessRecord(engine_id=engine, rank=rank, pid=1, host=clock, clock=clock, t=t, unix=unix)


def push(name: str = "r", **fields: Any) -> PushRecord:
    known: dict[str, Any] = {
        "request_id": f"cmpl-{name}-0-aaaaaaaa",
        "decode_request_id": f"cmpl-{name}-0-bbbbbbbb",
        "engine_id": "P",
        "decode_engine_id": "D",
        "rank": 0,
        "mode": "layer",
        "outcome": "completed",
    }
    return PushRecord(**known | fields)


def load(name: str = "r", **fields: Any) -> LoadRecord:
    known: dict[str, Any] = {
        "request_id": f"cmpl-{name}-0-bbbbbbbb",
        "engine_id": "D",
        "prefill_engine_id": "P",
        "outcome": "completed",
        "t_awaited": 1.0,
    }
    return LoadRecord(**known | fields)


def first_token(name: str = "r", **fields: Any) -> FirstTokenRecord:
    known: dict[str, Any] = {"request_id": f"cmpl-{name}-0-bbbbbbbb", "engine_id": "D", "t_all_reported": 2.0}
    return FirstTokenRecord(**known | fields)


@dataclass
class Host:
    """A clock ``ahead`` seconds ahead of this machine's, and a wall clock ``wrong`` seconds off."""

    name: str
    ahead: float = 0.0
    wrong: float = 0.0

    def now(self) -> float:
        return time.perf_counter() + self.ahead

    def process(self, engine_id: str, rank: int = 0) -> ProcessRecord:
        t = time.perf_counter()
        return ProcessRecord(
            engine_id=engine_id,
            rank=rank,
            pid=7,
            host=self.name,
            clock=f"boot-of-{self.name}",
            t=t + self.ahead,
            unix=WALL + t + self.wrong,
        )


@dataclass
class TwoHosts:
    """P's and D's hosts, and their workers' records. P's times are this machine's own."""

    p: Host = field(default_factory=lambda: Host("p-host"))
    d: Host = field(default_factory=lambda: Host("d-host", ahead=-5000.0))
    pushes: list[PushRecord] = field(default_factory=list)
    loads: list[LoadRecord] = field(default_factory=list)
    first_tokens: list[FirstTokenRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.p.ahead == 0.0, "the writer reads the clock itself"

    @property
    def offset(self) -> float:
        """Seconds that P's clock is ahead of D's."""
        return self.p.ahead - self.d.ahead

    def play(self, name: str = "p-1", measured: float | None = None, fails: str | None = None) -> None:
        """D registers, P prefills two chunks and pushes them layer by layer, D gets the completion or the failure."""
        pushing, world = ScriptedWorld(), World()
        world.engine.records = self.loads
        prompt = ScriptedRequest(name, TOKENS, list(range(1, 9)))
        wanted = pushing.registers(prompt, pushing.decoder())
        world.engine.known.add(wanted.request_id)
        world.now = self.d.now()
        world.loads.register(wanted, P_ADDRESS, EXTRA, world.now)
        world.settle()
        for _ in range(2):
            pushing.step((prompt, TOKENS // 2))
        pushing.settle()
        pushing.finish(prompt)
        self.pushes += pushing.trace.records
        world.now = self.d.now()
        word = Completion(wanted.request_id, 1) if fails is None else Fail(wanted.request_id, 0, fails, True)
        world.receives(word)
        self.loads[-1].clock_offset = measured
        if fails is None:
            times = {time: self.d.now() for time in ("t_all_reported", "t_scheduled", "t_first_token")}
            self.first_tokens.append(FirstTokenRecord(request_id=wanted.request_id, engine_id="D", **times))

    def write(self, folder: Path) -> Path:
        """One file for P, two for D."""
        write(folder / "P-rank0-7.jsonl", self.p.process("P"), *self.pushes)
        write(folder / "D-rank0-7.jsonl", self.d.process("D"), *self.loads)
        write(folder / "D-scheduler-7.jsonl", self.d.process("D", SCHEDULER_RANK), *self.first_tokens)
        return folder


def write(path: Path, *records: ProcessRecord | Record | DropRecord) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
