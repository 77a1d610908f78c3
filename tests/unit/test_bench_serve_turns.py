"""Servers that nobody asks are suspended, and run again when it is their turn."""

from __future__ import annotations

import signal

from bench.serve.turns import Turns


class Server:
    """Runs or does not, as the system would have it."""

    def __init__(self) -> None:
        self.runs = True
        self.signals: list[int] = []

    def signal(self, signum: int) -> None:
        self.runs = signum == signal.SIGCONT
        self.signals.append(signum)


def lineup() -> tuple[Turns, dict[str, Server]]:
    """Two modes share D, as layerpush's do."""
    servers = {name: Server() for name in ("one", "layer-p", "chunk-p", "d")}
    modes = {"aggregated": ["one"], "layer": ["layer-p", "d"], "chunk": ["chunk-p", "d"]}
    return Turns({mode: [servers[name] for name in names] for mode, names in modes.items()}), servers


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


def test_a_server_of_both_modes_is_not_disturbed() -> None:
    turns, servers = lineup()
    turns.only("layer")
    turns.only("chunk")
    turns.only("chunk")
    assert servers["d"].signals == []
    assert servers["chunk-p"].signals == [signal.SIGSTOP, signal.SIGCONT]
