"""The ports of the tests: xdist runs any two parts at the same time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from bench.servers.ports import DEMO_PORTS
from tests.support import ports

RANGES = {name: value for name, value in vars(ports).items() if isinstance(value, range)}


def test_no_two_parts_share_a_port() -> None:
    assert len(RANGES) > 10
    taken = Counter(port for one in (*RANGES.values(), DEMO_PORTS) for port in one)
    assert [port for port, parts in taken.items() if parts > 1] == []


def test_the_ports_lie_outside_the_kernels_ephemeral_range() -> None:
    lowest_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(max(one) for one in (*RANGES.values(), DEMO_PORTS)) < lowest_ephemeral
