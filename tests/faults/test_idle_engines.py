"""An engine ends while nothing is under way with it. Its peer forgets it, although no further request comes."""

import contextlib
import os
from pathlib import Path

from tests.e2e import probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Reference
from tests.faults import engines
from tests.faults.checks import LogView, check_serves


def open_files(pid: int) -> list[str]:
    """The open sockets and files of a process."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(each))
    return found


def test_an_idle_engine_forgets_a_dead_one(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """D forgets a P. The next P forgets D."""
    p, other = fleet.get(engines.P_VICTIM, engines.D)
    (d,) = fleet.spawn(engines.D)
    check_serves(p, d, reference, seed=800)
    check_forgets(d, p, log)
    (successor,) = fleet.spawn(engines.P)
    check_serves(successor, d, reference, seed=801)
    check_forgets(successor, d, log)
    check_serves(successor, other, reference, seed=802)


def check_forgets(survivor: EngineHost, ended: EngineHost, log: LogView) -> None:
    assert survivor.pid is not None
    assert ended.engine_id in survivor.call(probes.tables_of_peers)["_remote_agents"]
    connected = len(open_files(survivor.pid))
    survivor.hold()  # the writer thread needs no step of the engine
    survivor.call(probes.look_after_idle_engines, 0.2)
    ended.kill()
    survivor.poll_until(probes.knows_no_peer)
    assert len(open_files(survivor.pid)) < connected
    lines = [line for line in log.lines(survivor) if "the idle connection to engine" in line]
    assert len(lines) == 1
    assert f"engine {ended.engine_id} is dropped: its process has ended" in lines[0]
    survivor.run()
