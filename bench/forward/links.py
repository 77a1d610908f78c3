"""Links by name: those of this machine, and emulated ones of a chosen speed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bench.servers.engines import LOOPBACK, ServerPlace
from bench.servers.interrupts import Interrupts
from bench.servers.link import check_emulation
from bench.servers.workspace import places_of

SIDES = ("prefill", "decode")
CUDA_IPC_TRANSPORTS = "cuda_ipc,cuda_copy,sm,tcp,self"
"""UCX's transports between two processes that share a GPU."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""They may put memory into torch's expandable segments, which CUDA IPC cannot share."""


@dataclass(frozen=True)
class NamedLink:
    """A link by name, UCX's transports over it, and the ``places`` of P's and D's processes, by side.

    ``sgl``: NIXL posts a WRITE's descriptors as one list.
    """

    name: str
    transports: str
    sgl: bool = False
    places: Mapping[str, ServerPlace] = field(default_factory=lambda: dict.fromkeys(SIDES, LOOPBACK), repr=False)


REAL = {
    "shm": NamedLink("shm", "sm,tcp,self"),
    "loopback": NamedLink("loopback", "tcp,self"),
    "cuda_ipc": NamedLink("cuda_ipc", CUDA_IPC_TRANSPORTS),
    "shm+sgl": NamedLink("shm+sgl", "sm,tcp,self", sgl=True),
    "loopback+sgl": NamedLink("loopback+sgl", "tcp,self", sgl=True),
}
"""Links between two processes of this host. NIXL connects over ``lo``; UCX takes the fastest transport."""
RATE = re.compile(r"\d+(\.\d+)?(k|m|g)bit")
HELP = (
    "shm: shared memory and CMA. loopback: TCP over lo. cuda_ipc: between two processes on one GPU. +sgl "
    "after one of the first two: with NIXL_UCX_SGL_ENABLE=1. A rate as tc takes "
    "it, such as 500mbit or 2gbit: TCP over an emulated link of this speed; needs root and iproute2."
)


def links(text: str, device: str) -> list[str]:
    """``"loopback,500mbit"``: each once, fit for the device. Raises ``ValueError`` or ``LinkError``."""
    wanted = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in wanted:
        if name not in REAL and not RATE.fullmatch(name):
            raise ValueError(f"{name!r} is none of {', '.join(REAL)}, and no rate such as 500mbit or 2gbit")
        if name == "cuda_ipc" and device != "cuda":
            raise ValueError(f"{name} connects GPU memory: add --device cuda, or take shm or loopback")
    if any(name not in REAL for name in wanted):
        check_emulation()
    return wanted


@contextlib.contextmanager
def wire_of(name: str, interrupts: Interrupts) -> Iterator[NamedLink]:
    """The link between P and D; an emulated one ends with the block. Raises ``LinkError``."""
    if name in REAL:
        yield REAL[name]
        return
    with places_of(name, interrupts) as (prefill, decode):
        yield NamedLink(name, "tcp,self", places={"prefill": prefill, "decode": decode})
