"""D's process in the contract tests: registers memory with a NIXL agent, makes progress, and obeys commands."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from layerpush.transport.acknowledged import AcknowledgedTransport
from layerpush.transport.base import Transport
from layerpush.transport.nixl import NixlTransport
from tests.contract.processes import LOOPBACK, set_ucx
from tests.support import libfabric
from tests.support.fake_pair import POISON

PAUSE_SECONDS = 0.0003


def new_agent(name: str, backend: str, threads: int = 0) -> Any:
    """An agent without a progress thread. ``threads`` is for UCX only."""
    from nixl._api import nixl_agent, nixl_agent_config

    if backend == "UCX":
        return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, num_threads=threads))
    libfabric.load()
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[backend]))


def transport_over(agent: Any, backend: str) -> Transport:
    """The transport that a worker has over this backend."""
    if backend == "UCX":
        return NixlTransport(agent)
    return AcknowledgedTransport(NixlTransport(agent, split_at=0))


def main(commands: Connection, size: int, backend: str, threads: int) -> None:
    """``size``: bytes of memory to register. ``backend`` and ``threads`` are those of the agent."""
    set_ucx(LOOPBACK)
    agent = new_agent("D", backend, threads)
    memory = np.full(size, POISON, np.uint8)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    commands.send((agent.get_agent_metadata(), memory.ctypes.data))
    transport = transport_over(agent, backend)
    while not commands.poll(PAUSE_SECONDS):  # over LIBFABRIC, the other side's handshake needs our progress
        transport.notifications()
    agent.add_remote_agent(commands.recv())
    commands.send(None)

    inbox: list[tuple[str, bytes]] = []
    awaited: bytes | None = None
    snapshot: bytes | None = None
    while True:
        for sender, payload in transport.notifications():
            inbox.append((sender, payload))
            if payload == awaited:
                snapshot = memory.tobytes()
        if not commands.poll(PAUSE_SECONDS):
            continue
        match commands.recv():
            case ("memory",):
                commands.send(memory.tobytes())
            case ("reset",):
                memory[:] = POISON
                inbox.clear()
                commands.send(None)
            case ("inbox",):
                commands.send(inbox)
                inbox.clear()
            case ("notify", agent_name, payload):
                transport.notify(agent_name, payload)
                commands.send(None)
            case ("contact",):
                commands.send(transport.contact())
            case ("snapshot at", payload):
                awaited, snapshot = payload, None
                commands.send(None)
            case ("snapshot",):
                commands.send(snapshot)
            case ("quit",):
                return
            case other:
                raise ValueError(other)
