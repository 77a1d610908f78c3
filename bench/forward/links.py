"""Links by name: those of this machine, and emulated ones of a chosen speed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from bench.pair.wires import CUDA_IPC, SHM, TCP, Seat, Wire
from bench.servers.engines import Place
from bench.servers.interrupts import Interrupts
from bench.servers.link import check_emulation
from bench.servers.workspace import places_of

LOOPBACK = Wire("loopback", TCP.seats)
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
