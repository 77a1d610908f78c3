"""Two hosts on one machine: network namespaces for P and D, with a link of a chosen speed between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.servers.engines import ServerPlace

NAMESPACES = Path("/run/netns")
TOOLS = ("ip", "tc")
BURST, LATENCY = "1mb", "50ms"


class LinkError(RuntimeError):
    """The emulated link cannot be set up here; the message says why and what to do."""


@dataclass(frozen=True)
class Host:
    """One end. P and D reach each other over ``data_device`` only; requests come in over a second, unshaped pair."""

    namespace: str
    data_device: str
    data_address: str
    control_device: str
    control_address: str
    outer_device: str
    outer_address: str

    @property
    def place(self) -> ServerPlace:
        """The place of this host's servers. ``ip netns exec`` also remounts /sys, from which UCX reads the devices."""
        return ServerPlace(
            host=self.data_address,
            http_host=self.control_address,
            device=self.data_device,
            command_prefix=("ip", "netns", "exec", self.namespace),
        )


class EmulatedLink:
    """``with EmulatedLink("2gbit") as link:`` gives ``link.prefill`` and ``link.decode``; both are gone afterwards.

    Needs root and iproute2, else ``LinkError``. The rate is written as ``tc`` takes it: 10gbit, 500mbit. After a
    rest ``burst`` bytes pass at once. Stop the servers before leaving the block: a namespace lives as long as a process
    in it.
    """

    def __init__(self, rate: str, burst: str = BURST) -> None:
        self.rate, self.burst = rate, burst
        self._prefill, self._decode = _host("p", 1), _host("d", 2)
        self._undo: list[tuple[str, ...]] = []

    @property
    def prefill(self) -> ServerPlace:
        return self._prefill.place

    @property
    def decode(self) -> ServerPlace:
        return self._decode.place

    def __enter__(self) -> EmulatedLink:
        check_emulation()
        for host in (self._prefill, self._decode):
            if (NAMESPACES / host.namespace).exists():
                raise LinkError(
                    f"there is a network namespace {host.namespace} already, and it is not ours: remove it with "
                    f"`ip netns del {host.namespace}` if nobody uses it, or try again"
                )
        try:
            self._set_up()
        except BaseException:  # Ctrl-C, too: half a link would stay for ever
            self._tear_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._tear_down()

    def _set_up(self) -> None:
        p, d = self._prefill, self._decode
        for host in (p, d):
            self._make("ip", "netns", "add", host.namespace, undo=("ip", "netns", "del", host.namespace))
        data_ends = ("netns", p.namespace, "type", "veth", "peer", "name", d.data_device, "netns", d.namespace)
        _run("ip", "link", "add", p.data_device, *data_ends)
        for host in (p, d):
            inside = ("ip", "-n", host.namespace)
            control_ends = ("type", "veth", "peer", "name", host.control_device, "netns", host.namespace)
            undo = ("ip", "link", "del", host.outer_device)
            self._make("ip", "link", "add", host.outer_device, *control_ends, undo=undo)
            _run("ip", "addr", "add", f"{host.outer_address}/30", "dev", host.outer_device)
            _run("ip", "link", "set", host.outer_device, "up")
            _run(*inside, "addr", "add", f"{host.control_address}/30", "dev", host.control_device)
            _run(*inside, "addr", "add", f"{host.data_address}/24", "dev", host.data_device)
            for device in ("lo", host.control_device, host.data_device):
                _run(*inside, "link", "set", device, "up")
            shape = ("root", "tbf", "rate", self.rate, "burst", self.burst, "latency", LATENCY)
            _run("tc", "-n", host.namespace, "qdisc", "add", "dev", host.data_device, *shape)

    def _make(self, *command: str, undo: tuple[str, ...]) -> None:
        """Run a command, and keep ``undo`` for the teardown unless the command fails."""
        self._undo.append(undo)
        try:
            _run(*command)
        except LinkError:
            self._undo.pop()
            raise

    def _tear_down(self) -> None:
        """Undo all commands. Errors do not count: a device goes with its pair or its namespace."""
        while self._undo:
            _run(*self._undo.pop(), check=False)


def check_emulation() -> None:
    """Raise ``LinkError`` if links cannot be emulated here. Its message says what to do."""
    if os.geteuid() != 0:
        raise LinkError(
            "an emulated link needs root, for network namespaces: run this as root, or without an emulated link"
        )
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise LinkError(f"an emulated link needs the command {tool!r}: install iproute2")


def _host(letter: str, number: int) -> Host:
    """Names and control addresses differ between runs at the same time; data addresses are private to their pair."""
    tag = os.getpid() % 100_000
    control = f"10.77.{16 + tag % 200}"
    return Host(
        namespace=f"layerpush-{letter}-{tag}",
        data_device=f"lpd{letter}{tag}",
        data_address=f"10.76.0.{number}",
        control_device=f"lpc{letter}{tag}",
        control_address=f"{control}.{4 * number + 2}",
        outer_device=f"lpo{letter}{tag}",
        outer_address=f"{control}.{4 * number + 1}",
    )


def _run(*command: str, check: bool = True) -> None:
    """Run a command in a session of its own: Ctrl-C on the terminal must not cut a teardown short."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if check and result.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {result.stderr.strip()}")
