"""The links between P and D."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
TCP = Wire.on_one_host("tcp", "tcp,self")
CUDA_IPC = Wire.on_one_host("cuda_ipc", CUDA_IPC_TRANSPORTS)
"""A link between two processes on one GPU."""
