"""What the documentation says of UCX's environment variables: UCX reads them, and a range of ports is kept to."""

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

# A process of its own, since UCX reads its settings once. Its listening sockets are those of the UCX backend alone.
AGENT = """
import json, os
import nixl
agent = nixl.nixl_agent("asks-ucx", nixl.nixl_agent_config(num_threads=THREADS))
open_files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
mine = {os.readlink(file)[len("socket:["):-1] for file in open_files if os.path.lexists(file)}
rows = [line.split() for line in open("/proc/self/net/tcp").readlines()[1:]]
print("ports", json.dumps([int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in mine]))
"""


def agent(threads: int = 0, **settings: str) -> tuple[list[int], str]:
    """The ports on which an agent with these settings listens, and all that UCX says."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", AGENT.replace("THREADS", str(threads))],
        env=clean | {f"UCX_{name}": value for name, value in settings.items()},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (ports,) = (line for line in done.stdout.splitlines() if line.startswith("ports "))
    return json.loads(ports.removeprefix("ports ")), done.stdout + done.stderr


def test_ucx_reads_every_variable_that_is_documented() -> None:
    assert set(VALUES) == UCX
    assert UNUSED not in agent(**VALUES)[1]


@pytest.mark.parametrize("misspelt", ["TCP_PORTS_RANGE", "NET_DEVICE"])
def test_ucx_says_which_it_does_not_read(misspelt: str) -> None:
    said = agent(TLS="tcp,self", **{misspelt: "1"})[1]
    assert UNUSED in said
    assert f"UCX_{misspelt}" in said


@pytest.mark.parametrize("threads", [0, 4])
def test_a_range_of_ports_is_kept_to(threads: int) -> None:
    ports, _ = agent(threads, TLS="tcp,self", NET_DEVICES="lo", TCP_PORT_RANGE="21200-21300")
    assert len(ports) == threads + 1
    assert all(21200 <= port <= 21300 for port in ports)
    ports, _ = agent(threads, TLS="tcp,self", NET_DEVICES="lo")
    assert len(ports) == threads + 1
    assert not any(21200 <= port <= 21300 for port in ports)
