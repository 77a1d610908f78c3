"""An idle engine and 10 lives of its peer, each under a new name: sockets and mapped memory do not grow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerpush.core.liveness import Verdict
from layerpush.core.wire import PEER_PREFIX
from layerpush.transport.connections import Connections
from layerpush.transport.idle_connections import PING_EVERY_S, IdleConnections
from layerpush.transport.locked import LockedAgent
from layerpush.transport.nixl import NixlTransport
from layerpush.transport.peers import Address, Handshake, Peers, Rank
from tests.contract import restarted
from tests.contract.processes import context
from tests.support.waiting import until

LIVES = 10
PIECE = 64 << 10


class Idle:
    """An engine with a NIXL agent, and its network. As vLLM does, a P prepares descriptors of a D, and a D of no P."""

    def __init__(self, writes: bool) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent("idle", nixl_agent_config(enable_prog_thread=False, num_threads=restarted.THREADS))
        self.memory = np.zeros(restarted.BYTES, np.uint8)
        self.registered = self.agent.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], "DRAM")
        self.writes = writes
        self.transport = NixlTransport(LockedAgent(self.agent))
        self.peers = Peers()
        self.connected: dict[str, str] = {}
        self.handles: dict[str, Any] = {}
        self.processes: dict[str, Any] = {}
        self.now = 0.0
        connections = Connections(self, self.transport, None, lambda *_: None, self.probe, lambda: self.now)
        self.idle = IdleConnections("idle", connections, self.probe, set, lambda: 0.0)

    # layerpush.transport.connections.Network

    def handshake(self, address: Address) -> Handshake | None:
        return Handshake(Future(), address)

    def engines(self) -> list[str]:
        return list(self.connected)

    def agents_of(self, engine_id: str) -> dict[str, Rank]:
        return {self.connected[engine_id]: (0, 0)} if engine_id in self.connected else {}

    def end_pushes(self, engine_id: str, reason: str) -> bool:
        return True

    def task(self, task: Callable[[], None]) -> None:
        task()

    def disconnect(self, engine_id: str) -> None:
        agent = self.connected.pop(engine_id)
        if self.writes:
            self.agent.release_dlist_handle(self.handles.pop(agent))
        self.agent.remove_remote_agent(agent)

    # The prober.

    def probe(self, agent: str, _: Rank, address: Address, on_verdict: Callable[[Verdict, float], None]) -> None:
        alive = self.processes[address.engine_id].is_alive()
        on_verdict(Verdict.SPEAKS_LAYERPUSH if alive else Verdict.ENDED, self.now + 0.001)

    # The test.

    def connect(self, engine_id: str, process: Any, metadata: bytes, base: int) -> None:
        agent = self.agent.add_remote_agent(metadata)
        self.connected[engine_id], self.processes[engine_id] = agent, process
        self.peers[engine_id].handshake = self.handshake(Address(engine_id, "host", 1, 1))
        if self.writes:
            self.handles[agent] = self.agent.prep_xfer_dlist(agent, pieces(base), "DRAM")

    def write(self, engine_id: str) -> None:
        """Write all of our memory into the peer's."""
        agent = self.connected[engine_id]
        own = self.agent.prep_xfer_dlist("", pieces(self.memory.ctypes.data), "DRAM")
        every = np.arange(restarted.BYTES // PIECE, dtype=np.int32)
        written = self.agent.make_prepped_xfer("WRITE", own, every, self.handles[agent], every, b"")
        self.agent.transfer(written)
        until(lambda: self.agent.check_xfer_state(written) == "DONE")
        self.agent.release_xfer_handle(written)
        self.agent.release_dlist_handle(own)

    def turn(self, seconds: float) -> None:
        """Let so much time pass, and take the answers that have come."""
        self.now += seconds
        self.idle.tick(self.now)
        for agent, payload in self.transport.notifications():
            if payload.startswith(PEER_PREFIX):  # a ping that has come back
                self.idle.on_pong(agent, self.now)


def pieces(base: int) -> Any:
    found = np.zeros((restarted.BYTES // PIECE, 3), np.uint64)
    found[:, 0] = base + np.arange(len(found)) * PIECE
    found[:, 1] = PIECE
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_bytes() -> int:
    """The virtual memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=[True, False], ids=["a P, and 10 D", "a D, and 10 P"])
def idle(request: pytest.FixtureRequest) -> Iterator[Idle]:
    made = Idle(request.param)
    yield made
    made.agent.deregister_memory(made.registered)


@pytest.mark.slow
def test_ended_peers_leave_no_sockets_and_no_memory(idle: Idle) -> None:
    forking = context()
    files, memory = [], []
    for number in range(LIVES):
        engine_id = f"peer-{number}"
        ours, theirs = forking.Pipe()
        process = forking.Process(target=restarted.run, args=(theirs,))
        process.start()
        theirs.close()
        idle.connect(engine_id, process, *ours.recv())
        ours.send(idle.agent.get_agent_metadata())
        received: list[bytes] = []
        until(
            lambda received=received: (
                received.extend(payload for _, payload in idle.transport.notifications()) or received
            )
        )
        if idle.writes:
            idle.write(engine_id)
        idle.turn(1.0)
        connected = open_files()
        process.kill()
        process.join()
        ours.close()
        until(lambda: idle.turn(PING_EVERY_S / 2) or not idle.connected)
        idle.processes.pop(engine_id).close()
        assert open_files() < connected, "its sockets are closed"
        files.append(open_files())
        memory.append(mapped_bytes())
    assert len(idle.idle) == len(idle.handles) == 0
    assert max(files[2:]) <= files[1], files
    assert memory[-1] - memory[LIVES // 2] < LIVES // 2 * restarted.BYTES // 4, memory
