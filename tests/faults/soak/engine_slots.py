"""The engines of a soak by name, over deaths and restarts."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait

from tests.faults.soak import inhost
from tests.faults.soak.engine import Engine, Event, Memory, Ready
from tests.faults.soak.kinds import Side

Maker = Callable[[str, int, pathlib.Path], Engine]
"""Starts an engine: its id, its port, and the folder for its log."""


@dataclasses.dataclass
class EngineSlot:
    """A place for one engine. ``leaving``: the soak itself ends the engine, so its death is no problem.

    ``usual_threads``: the present process's number of threads at its first idle moment.
    """

    engine: Engine
    incarnation: int = 1
    leaving: bool = False
    usual_threads: int | None = None
    memories: list[Memory] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return self.engine.spec.name

    @property
    def usable(self) -> bool:
        return self.engine.ready and not self.leaving

    @property
    def calm(self) -> bool:
        """Up and not stopped by a fault."""
        return self.usable and not self.engine.paused


class EngineSlots:
    """All engines. ``take_port`` hands out free ports. Each incarnation's logs have a folder of their own."""

    def __init__(self, engines: Mapping[str, Maker], scratch: pathlib.Path, take_port: Callable[[], int]) -> None:
        self._make, self._scratch, self._take_port = engines, scratch, take_port
        self.slots = {name: EngineSlot(self._start(name, f"{name}-1", take_port(), 1)) for name in engines}

    def __getitem__(self, name: str) -> EngineSlot:
        return self.slots[name]

    def __iter__(self) -> Iterator[EngineSlot]:
        return iter(self.slots.values())

    def of(self, side: Side) -> list[EngineSlot]:
        return [slot for slot in self if slot.engine.spec.role == side]

    def usable(self, side: Side) -> list[str]:
        return [slot.name for slot in self.of(side) if slot.usable]

    @property
    def all_calm(self) -> bool:
        return all(slot.calm for slot in self)

    def wait(self, timeout: float) -> list[tuple[EngineSlot, Event]]:
        """Events of the next `timeout` seconds at most. A ready host gets its instruments first."""
        there = [slot for slot in self if not slot.engine.ended]
        wait([thing for slot in there for thing in (slot.engine.pipe, slot.engine.sentinel)], timeout)
        happened: list[tuple[EngineSlot, Event]] = []
        for slot in there:
            for event in slot.engine.events():
                if isinstance(event, Ready):
                    slot.engine.call(inhost.install)
                happened.append((slot, event))
        return happened

    def replace(self, name: str, *, same_id: bool, same_port: bool) -> None:
        """Start a fresh engine for an ended one, under the same id or a new one, at the same port or a new one."""
        slot = self.slots[name]
        old = slot.engine
        old.put_away()
        slot.memories.append(old.memory)
        slot.incarnation += 1
        engine_id = old.engine_id if same_id else f"{name}-{slot.incarnation}"
        slot.engine = self._start(name, engine_id, old.port if same_port else self._take_port(), slot.incarnation)
        slot.leaving, slot.usual_threads = False, None

    def memories(self, name: str) -> list[Memory]:
        """The memory of every process of this slot."""
        return [*self.slots[name].memories, self.slots[name].engine.memory]

    def measure_memory(self, *, idle: bool = False) -> None:
        for slot in self:
            if not slot.engine.ended:
                slot.engine.measure_memory(idle=idle and slot.calm)

    def close(self) -> None:
        for slot in self:
            if slot.engine.paused:
                slot.engine.resume()
            slot.engine.shut_down()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(not slot.engine.ended for slot in self):
            self.wait(0.1)
        for slot in self:
            slot.engine.put_away()

    def _start(self, name: str, engine_id: str, port: int, incarnation: int) -> Engine:
        return self._make[name](engine_id, port, self._scratch / f"{name}-{incarnation}")
