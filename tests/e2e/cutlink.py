"""Runs inside an engine host: cuts its network links.

A cut socket's packets vanish on their way in: neither end sees an error, and the kernels send them again and again. A
new connection gets no answer. Both ends of a link are cut for both directions. It needs no rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.enginehost import EngineHost
    from tests.e2e.hostmain import HostedEngine

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Linux's, which Python lacks."""
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The packet filter "return 0": it keeps no byte of a packet."""


@contextlib.contextmanager
def cut_off(*hosts: EngineHost) -> Iterator[None]:
    """No packet reaches these hosts. At the end the links work again, and packets that were lost are sent again."""
    for host in hosts:
        host.call(_cut)
    try:
        yield
    finally:
        for host in hosts:
            host.call(_mend)


def _cut(_: HostedEngine) -> None:
    program = ctypes.create_string_buffer(DROP_ALL)
    for each in _sockets():
        each.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _mend(_: HostedEngine) -> None:
    for each in _sockets():
        with contextlib.suppress(FileNotFoundError):  # a socket of a later time
            each.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def _sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, listening ones among them. The test's pipe is none."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(entry).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        yield each
