"""A NIXL agent of a process that tests end and replace. Its name is new each time."""

from __future__ import annotations

import uuid
from multiprocessing.connection import Connection

import numpy as np

from tests.contract.processes import LOOPBACK, set_ucx

BYTES = 4 << 20
THREADS = 0
"""NIXL's threads that have nothing to write keep sockets that a dead peer had opened to them."""


def run(commands: Connection) -> None:
    """Send the agent's metadata and the address of its memory; take the peer's metadata; answer notifications."""
    from nixl._api import nixl_agent, nixl_agent_config

    set_ucx(LOOPBACK)
    agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(enable_prog_thread=False, num_threads=THREADS))
    memory = np.zeros(BYTES, np.uint8)
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    commands.send((agent.get_agent_metadata(), memory.ctypes.data))
    peer = agent.add_remote_agent(commands.recv())
    agent.send_notif(peer, b"hello")
    while not commands.poll(0.001):
        for sender, messages in agent.get_new_notifs().items():
            for message in messages:
                agent.send_notif(sender, message)
