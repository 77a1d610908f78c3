"""The port of a side channel: how an engine comes to listen on it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import struct
import time

BIND_S = 10.0
BIND_RETRY_S = 2.0
BACKLOG = 128
SIOCGIFADDR = 0x8915
"""Linux's request for the address of a network interface."""

logger = logging.getLogger(f"vllm.{__name__}")
_IN_USE = (
    "another program has this port; end it, or set VLLM_NIXL_SIDE_CHANNEL_PORT to a free port below the ephemeral range"
)
_NO_ADDRESS = (
    "VLLM_NIXL_SIDE_CHANNEL_HOST must be an address of this machine, and VLLM_NIXL_SIDE_CHANNEL_PORT a port that this"
    " user may open"
)


class SideChannelError(RuntimeError):
    """The port of the side channel cannot be had, with the reason and the cure."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(f"layerpush: {reason}: {cure}")
        self.reason = reason
        self.cure = cure


def bind(host: str, port: int) -> socket.socket:
    """Listen on the side channel's port. Tries for BIND_S: an engine that has just ended may still have the port.

    Raises ``SideChannelError``. The engine core's main thread, so that a signal or the error ends the engine's start.
    """
    deadline = time.monotonic() + BIND_S
    while True:
        try:
            return bind_at_once(host, port)
        except SideChannelError as error:
            if time.monotonic() >= deadline:
                raise
            logger.warning("%s; trying for %.0f s", error, max(0.0, deadline - time.monotonic()))
        time.sleep(BIND_RETRY_S)


def bind_at_once(host: str, port: int) -> socket.socket:
    """Listen, at the first try. Raises ``SideChannelError``."""
    bare = host.strip("[]")
    try:
        return _bind(bare, port)
    except (OSError, ValueError, OverflowError) as error:
        code = getattr(error, "errno", None) or 0
        why, cure = os.strerror(code) if code > 0 else error, _IN_USE if code == errno.EADDRINUSE else _NO_ADDRESS
        raise SideChannelError(f"the side channel cannot listen on {bare}:{port} ({why})", cure) from None


def _bind(host: str, port: int) -> socket.socket:
    """Listen on an address, a name, a network interface or, with ``*``, on all IPv4 addresses, as ZeroMQ does."""
    if ":" in host:
        return socket.create_server((host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    if host in {name for _, name in socket.if_nameindex()}:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            found = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", host.encode()))
        host = socket.inet_ntoa(found[20:24])
    return socket.create_server(("" if host == "*" else host, port), backlog=BACKLOG)
