"""Asks a ZeroMQ ROUTER one question over a plain socket: ZMTP 3.0, as a REQ does.

A peer that we do not trust must not make us wait or fill our memory. ZeroMQ itself cannot promise that: it bounds each
frame (``MAXMSGSIZE``) but not the number of frames, and collects all frames of a message before it returns the first.
"""

from __future__ import annotations

import socket
import struct
import time

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ"
MORE, LONG, COMMAND = 1, 2, 4
CHUNK = 1 << 16


class ZmtpError(Exception):
    """The other end does not speak ZMTP 3, or sends too much."""


def ask(connection: socket.socket, question: bytes, deadline: float, limit: int) -> list[bytes]:
    """The parts of the answer. At most ``limit`` bytes are read, and nothing after ``deadline`` (``time.monotonic``).

    Raises ``ZmtpError``, ``TimeoutError`` or another ``OSError``.
    """
    stream = _Stream(connection, deadline, limit)
    stream.write(GREETING)
    greeting = stream.read(len(GREETING))
    if greeting[0] != SIGNATURE[0] or greeting[9] != SIGNATURE[9] or greeting[10] < 3 or greeting[12:16] != b"NULL":
        raise ZmtpError("no ZMTP 3 greeting without security")
    stream.write(bytes((COMMAND, len(READY))) + READY)
    stream.write(bytes((MORE, 0)) + bytes((0, len(question))) + question)
    parts: list[bytes] = []
    while True:
        flags, body = stream.frame()
        if flags & COMMAND:
            continue
        parts.append(body)
        if not flags & MORE:
            if parts[0]:
                raise ZmtpError("no empty frame before the answer")
            return parts[1:]


class _Stream:
    def __init__(self, connection: socket.socket, deadline: float, limit: int) -> None:
        self._connection = connection
        self._deadline = deadline
        self._left = limit

    def write(self, data: bytes) -> None:
        self._await()
        self._connection.sendall(data)

    def frame(self) -> tuple[int, bytes]:
        flags, size = self.read(2)
        if flags & LONG:
            (size,) = struct.unpack(">Q", bytes((size,)) + self.read(7))
        return flags, self.read(size)

    def read(self, size: int) -> bytes:
        if size > self._left:
            raise ZmtpError("too long an answer")
        self._left -= size
        data = bytearray()
        while len(data) < size:
            self._await()
            piece = self._connection.recv(min(size - len(data), CHUNK))
            if not piece:
                raise ZmtpError("closed in the middle")
            data += piece
        return bytes(data)

    def _await(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
