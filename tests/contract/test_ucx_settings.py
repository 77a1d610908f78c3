"""UCX reads its environment variables in the documentation. Its ports, and connections that strangers close there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.processes import LOOPBACK, context
from tests.contract.ucxagents import STRANGERS, closed_by_strangers, run, two_agents
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


def asked(tmp_path: Path, settings: dict[str, str], question: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """The answer of a process with these settings, and UCX's output."""
    forking, log = context(), tmp_path / "log"
    ours, theirs = forking.Pipe()
    process = forking.Process(target=run, args=(theirs, log, settings, question, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
        process.join(20)
    except EOFError:
        pytest.fail(log.read_text())
    assert process.exitcode == 0, log.read_text()
    return answer, log.read_text()


def agents(tmp_path: Path, **settings: str) -> tuple[list[int], str]:
    """The ports of two agents with these settings, one of them with four threads, and UCX's output."""
    ports, said = asked(tmp_path, {f"UCX_{name}": value for name, value in settings.items()}, two_agents)
    assert [len(each) for each in ports] == [1, 5], "each thread and the agent itself must listen"
    return [port for each in ports for port in each], said


def test_ucx_reads_every_documented_variable_and_keeps_to_the_port_range(tmp_path: Path) -> None:
    assert set(VALUES) == UCX
    ports, said = agents(tmp_path, **VALUES)
    assert UNUSED not in said
    assert all(21000 <= port <= 21100 for port in ports)


def test_ucx_logs_unused_variables(tmp_path: Path) -> None:
    ports, said = agents(tmp_path, TLS="tcp,self", NET_DEVICES="lo", NET_DEVICE="lo", TCP_PORTS_RANGE="21000-21100")
    assert UNUSED in said
    assert "UCX_NET_DEVICE" in said
    assert "UCX_TCP_PORTS_RANGE" in said
    assert not any(21000 <= port <= 21100 for port in ports)


@pytest.mark.parametrize("threads", [0, 4])
def test_only_threads_of_ucx_keep_connections_that_strangers_have_closed(tmp_path: Path, threads: int) -> None:
    """So the pages recommend `num_threads` 0 over TCP. Each thread has a port, and the agent itself has one."""
    assert asked(tmp_path, LOOPBACK, closed_by_strangers, threads)[0] == STRANGERS * threads


@pytest.mark.exhaustive
def test_nixl_reads_the_variable_for_lists_of_descriptors() -> None:
    """`make test-all` repeats tests of WRITEs with it. NIXL reads its log level when it is imported."""
    program = "from nixl._api import nixl_agent as new; new('asked')"
    environment = os.environ | LOOPBACK | {"NIXL_UCX_SGL_ENABLE": "1", "NIXL_LOG_LEVEL": "DEBUG"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "UCX SGL offload enabled" in done.stdout + done.stderr
