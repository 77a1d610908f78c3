"""NIXL agents in a process of their own: the ports of UCX there, and connections that strangers close."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.contract.processes import set_ucx

LISTENING, CLOSED_BY_PEER = "0A", "08"
STRANGERS = 20


def tcp_rows() -> list[list[str]]:
    return [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]


def port_of(row: list[str]) -> int:
    return int(row[1].split(":")[1], 16)


def listens() -> set[int]:
    """The ports of this process. Only its UCX backends listen."""
    files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(file)[len("socket:[") : -1] for file in files if os.path.lexists(file)}
    return {port_of(row) for row in tcp_rows() if row[3] == LISTENING and row[9] in mine}


def new_ports(threads: int, **options: Any) -> tuple[Any, list[int]]:
    """A new agent, and its ports."""
    from nixl._api import nixl_agent, nixl_agent_config

    before = listens()
    agent = nixl_agent(f"asked-{threads}", nixl_agent_config(num_threads=threads, **options))
    return agent, sorted(listens() - before)


def two_agents() -> list[list[int]]:
    (one, ports), (other, more) = new_ports(0), new_ports(4)
    del one, other
    return [ports, more]


def closed_by_strangers(threads: int) -> int:
    """Strangers connect to an agent's ports and close at once, while the agent polls, as an engine does."""
    agent, ports = new_ports(threads, enable_prog_thread=False)

    def closed() -> int:
        return sum(row[3] == CLOSED_BY_PEER and port_of(row) in ports for row in tcp_rows())

    for port in ports:
        for _ in range(STRANGERS):
            socket.create_connection(("127.0.0.1", port)).close()
    deadline = time.monotonic() + 30
    while closed() != STRANGERS * threads and time.monotonic() < deadline:
        agent.get_new_notifs()
        time.sleep(0.01)
    return closed()


def run(answers: Connection, log: Path, settings: dict[str, str], question: Callable[..., Any], *args: Any) -> None:
    """In a process of its own, because UCX reads its settings once."""
    with log.open("wb") as file:
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
    set_ucx(settings)
    answers.send(question(*args))
    ctypes.CDLL(None).fflush(None)
