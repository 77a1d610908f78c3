"""What P and D can be connected by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SIDES = ("prefill", "decode")


@dataclass(frozen=True)
class Seat:
    """Where one side's process runs: UCX's settings there, and what goes before its command."""

    environment: Mapping[str, str]
    command_prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wire:
    name: str
    seats: Mapping[str, Seat] = field(repr=False)

    @classmethod
    def on_one_host(cls, name: str, transports: str) -> Wire:
        """Over ``lo``, or past it: NIXL needs TCP to get to know its peer, UCX then takes the fastest one."""
        seat = Seat({"UCX_TLS": transports, "UCX_NET_DEVICES": "lo"})
        return cls(name, dict.fromkeys(SIDES, seat))


SHM = Wire.on_one_host("shm", "sm,tcp,self")
TCP = Wire.on_one_host("tcp", "tcp,self")
CUDA_IPC = Wire.on_one_host("cuda_ipc", "cuda_ipc,cuda_copy,sm,tcp,self")
"""Between two processes on one GPU."""
