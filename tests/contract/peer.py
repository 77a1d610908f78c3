"""D's process in the contract tests: registers memory with a NIXL agent, makes progress, and obeys commands.

A script. Arguments: file descriptor of its end of a socket pair, bytes of memory to register, threads of the agent.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import numpy as np

from layerpush.transport.nixl import NixlTransport

POISON = 0xEE
PAUSE_SECONDS = 0.0003


def main(commands: Connection, size: int, threads: int) -> None:
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("D", nixl_agent_config(enable_prog_thread=False, num_threads=threads))
    memory = np.full(size, POISON, np.uint8)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    commands.send((agent.get_agent_metadata(), memory.ctypes.data))
    agent.add_remote_agent(commands.recv())
    transport = NixlTransport(agent)

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


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
