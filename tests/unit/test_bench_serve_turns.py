"""Only the servers of the measured mode run; all others are suspended."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.serve.site import ServerTurns
from bench.servers.engines import EngineServer, EngineSpec
from tests.support.waiting import until


class Server:
    """Runs or is suspended, as the last signal says."""

    def __init__(self) -> None:
        self.runs = True
        self.signals: list[int] = []

    def signal(self, signum: int) -> None:
        self.runs = signum == signal.SIGCONT
        self.signals.append(signum)


def lineup() -> tuple[ServerTurns, dict[str, Server]]:
    """Two modes share D, as layerpush's modes do."""
    servers = {name: Server() for name in ("one", "layer-p", "chunk-p", "d")}
    modes = {"aggregated": ["one"], "layer": ["layer-p", "d"], "chunk": ["chunk-p", "d"]}
    return ServerTurns({mode: [servers[name] for name in names] for mode, names in modes.items()}), servers


def running(servers: dict[str, Server]) -> set[str]:
    return {name for name, server in servers.items() if server.runs}


def test_only_the_servers_of_a_mode_run_in_its_turn() -> None:
    turns, servers = lineup()
    for mode, wanted in [
        ("layer", {"layer-p", "d"}),
        ("chunk", {"chunk-p", "d"}),
        ("aggregated", {"one"}),
        ("layer", {"layer-p", "d"}),
    ]:
        turns.only(mode)
        assert running(servers) == wanted


def test_a_server_of_both_modes_gets_no_signal() -> None:
    turns, servers = lineup()
    turns.only("layer")
    turns.only("chunk")
    turns.only("chunk")
    assert servers["d"].signals == []
    assert servers["chunk-p"].signals == [signal.SIGSTOP, signal.SIGCONT]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_forked_server_is_suspended_and_its_client_is_not(tmp_path: Path) -> None:
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    spec = EngineSpec("p", "plain", Path("m"), server=("sh", "-c", "sleep 600"))
    forks: Any = SimpleNamespace(group_of=lambda client: server.pid)
    client = EngineServer(spec, 1, 2, tmp_path / "log", forks)
    try:
        assert server.pid in client.members()
        client.signal(signal.SIGSTOP)
        until(lambda: state(server.pid) == "T")
        assert state(client.group) != "T"
        client.signal(signal.SIGCONT)
        until(lambda: state(server.pid) != "T")
        client.signal(signal.SIGTERM)
        until(lambda: client.group not in client.members())
        assert server.poll() is None, "only a real client passes the signal on"
    finally:
        server.kill()
        server.wait()
        client.signal(signal.SIGKILL)
