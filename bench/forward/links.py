"""Links by name: those of this machine, and emulated ones of a chosen speed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bench.servers.engines import Place
from bench.servers.interrupts import Interrupts
from bench.servers.link import check_emulation
from bench.servers.workspace import places_of

SIDES = ("prefill", "decode")
CUDA_IPC_TRANSPORTS = "cuda_ipc,cuda_copy,sm,tcp,self"
"""UCX's transports between two processes that share a GPU."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""They may put memory into torch's expandable segments, which CUDA IPC cannot share."""


@dataclass(frozen=True)
class Seat:
    """The place of one side's process: UCX's settings, and a prefix of its command."""

    environment: Mapping[str, str]
    command_prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wire:
    """A link by name, and the ``seats`` of P's and D's processes, by side."""

    name: str
    seats: Mapping[str, Seat] = field(repr=False)

    @classmethod
    def on_one_host(cls, name: str, transports: str) -> Wire:
        """A link between two processes of this host. NIXL connects over ``lo``; UCX takes the fastest transport."""
        seat = Seat({"UCX_TLS": transports, "UCX_NET_DEVICES": "lo"})
        return cls(name, dict.fromkeys(SIDES, seat))


SHM = Wire.on_one_host("shm", "sm,tcp,self")
LOOPBACK = Wire.on_one_host("loopback", "tcp,self")
CUDA_IPC = Wire.on_one_host("cuda_ipc", CUDA_IPC_TRANSPORTS)
"""A link between two processes on one GPU."""
REAL = {wire.name: wire for wire in (SHM, LOOPBACK, CUDA_IPC)}
NEEDS_CUDA = {CUDA_IPC.name}
RATE = re.compile(r"\d+(\.\d+)?(k|m|g)bit")
HELP = (
    "shm: shared memory and CMA. loopback: TCP over lo. cuda_ipc: between two processes on one GPU. A rate as tc takes "
    "it, such as 500mbit or 2gbit: TCP over an emulated link of this speed; needs root and iproute2."
)


def links(text: str, device: str) -> list[str]:
    """``"loopback,500mbit"``: each once, fit for the device. Raises ``ValueError`` or ``LinkError``."""
    wanted = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in wanted:
        if name not in REAL and not RATE.fullmatch(name):
            raise ValueError(f"{name!r} is none of {', '.join(REAL)}, and no rate such as 500mbit or 2gbit")
        if name in NEEDS_CUDA and device != "cuda":
            raise ValueError(f"{name} connects GPU memory: add --device cuda, or take shm or loopback")
    if any(name not in REAL for name in wanted):
        check_emulation()
    return wanted


@contextlib.contextmanager
def wire_of(name: str, interrupts: Interrupts) -> Iterator[Wire]:
    """The link between P and D; an emulated one ends with the block. Raises ``LinkError``."""
    if name in REAL:
        yield REAL[name]
        return
    with places_of(name, interrupts) as (prefill, decode):
        yield Wire(name, {"prefill": _seat(prefill), "decode": _seat(decode)})


def _seat(place: Place) -> Seat:
    return Seat({"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": place.device}, place.command_prefix)
