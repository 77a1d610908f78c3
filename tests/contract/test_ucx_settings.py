"""UCX reads its environment variables in the documentation. Its ports, and connections that strangers close there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.docprograms import UCX

VALUES = {
    "LOG_LEVEL": "warn",
    "MAX_RNDV_RAILS": "1",
    "NET_DEVICES": "lo",
    "PROTO_INFO": "n",
    "RCACHE_MAX_UNRELEASED": "1024",
    "TCP_PORT_RANGE": "21000-21100",
    "TLS": "tcp,self",
}
UNUSED = "unused environment variable"

# A process of its own, because UCX reads its settings once. Only its UCX backends listen.
LISTENS = """
import json, os
import nixl

def listens():
    open_files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(file)[len("socket:["):-1] for file in open_files if os.path.lexists(file)}
    rows = [line.split() for line in open("/proc/self/net/tcp").readlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in mine}

"""
ASK = """
ports, agents = [], []
for threads in (0, 4):
    before = listens()
    agents.append(nixl.nixl_agent(f"asks-ucx-{threads}", nixl.nixl_agent_config(num_threads=threads)))
    ports.append(sorted(listens() - before))
print("ports", json.dumps(ports))
"""

# Strangers connect to an agent's ports and close at once. The agent polls, as an engine does.
STRANGERS = """
import os, socket, sys, time

def closed():
    rows = [line.split() for line in open("/proc/self/net/tcp").readlines()[1:]]
    return sum(row[3] == "08" and int(row[1].split(":")[1], 16) in ports for row in rows)

threads, ports = int(sys.argv[1]), listens()
agent = nixl.nixl_agent("asked", nixl.nixl_agent_config(enable_prog_thread=False, num_threads=threads))
ports = listens() - ports
for port in ports:
    for _ in range(20):
        socket.create_connection(("127.0.0.1", port)).close()
expected, deadline = 20 * threads, time.monotonic() + 30
while closed() != expected and time.monotonic() < deadline:
    agent.get_new_notifs()
    time.sleep(0.01)
print("closed", closed())
"""


def agents(**settings: str) -> tuple[list[int], str]:
    """The ports of two agents with these settings, one of them with four threads, and UCX's output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENS + ASK],
        env=clean | {f"UCX_{name}": value for name, value in settings.items()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("ports "))
    ports = json.loads(said.removeprefix("ports "))
    assert [len(each) for each in ports] == [1, 5], "each thread and the agent itself must listen"
    return [port for each in ports for port in each], done.stdout + done.stderr


def test_ucx_reads_every_documented_variable_and_keeps_to_the_port_range() -> None:
    assert set(VALUES) == UCX
    ports, said = agents(**VALUES)
    assert UNUSED not in said
    assert all(21000 <= port <= 21100 for port in ports)


def test_ucx_logs_unused_variables() -> None:
    ports, said = agents(TLS="tcp,self", NET_DEVICES="lo", NET_DEVICE="lo", TCP_PORTS_RANGE="21000-21100")
    assert UNUSED in said
    assert "UCX_NET_DEVICE" in said
    assert "UCX_TCP_PORTS_RANGE" in said
    assert not any(21000 <= port <= 21100 for port in ports)


@pytest.mark.parametrize("threads", [0, 4])
def test_only_threads_of_ucx_keep_connections_that_strangers_have_closed(threads: int) -> None:
    """So the pages recommend `num_threads` 0 over TCP. Each thread has a port, and the agent itself has one."""
    done = subprocess.run(
        [sys.executable, "-c", LISTENS + STRANGERS, str(threads)],
        env=os.environ | {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"closed {20 * threads}" in done.stdout.splitlines()
