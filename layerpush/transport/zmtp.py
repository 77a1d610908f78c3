"""ZMTP 3.0 over plain sockets: a REQ that asks, and the messages that reach a ROUTER.

A peer that we do not trust must not make us wait or fill our memory. ZeroMQ itself cannot promise that: it bounds each
frame (``MAXMSGSIZE``) but not the number of frames, and collects all frames of a message before it returns the first.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from typing import Any

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
CHUNK = 1 << 16
MAX_PARTS = 16


class ZmtpError(Exception):
    """The other end does not speak ZMTP 3, or sends too much."""


def ready(socket_type: bytes) -> bytes:
    """The command that follows a greeting."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type
    return bytes((COMMAND, len(body))) + body


def header(size: int, flags: int = 0) -> bytes:
    """The bytes before a frame of ``size`` bytes."""
    return bytes((flags, size)) if size < 1 << 8 else bytes((flags | LONG,)) + struct.pack(">Q", size)


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first of the host's addresses that accepts. Raises ``ConnectionRefusedError`` if all refuse, else
    another ``OSError``, or ``ValueError`` if it is no host name. Returns by ``deadline`` (``time.monotonic``).
    """
    failure: OSError = ConnectionRefusedError()
    for family, kind, protocol, _, address in _addresses(host, port, deadline):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(address)
        except OSError as error:
            connection.close()
            if not isinstance(error, ConnectionRefusedError):
                failure = error
        except BaseException:  # no caller has the socket yet
            connection.close()
            raise
        else:
            return connection
    raise failure


def _addresses(host: str, port: int, deadline: float) -> list[Any]:
    """Look up the host as ZeroMQ does: names as IPv4. Another thread looks up a name: nothing can cut that short."""
    try:
        return socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except socket.gaierror:
        pass
    answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM))
        except (OSError, ValueError):
            answers.put([])

    threading.Thread(target=look_up, name="layerpush-lookup", daemon=True).start()
    try:
        found = answers.get(timeout=max(deadline - time.monotonic(), 0))
    except queue.Empty:
        raise TimeoutError from None
    if not found:
        raise OSError(f"no address of {host!r}")
    return found


class Req:
    """A REQ on a connection. At most ``limit`` bytes are read of each answer, and nothing after ``deadline``
    (``time.monotonic``). Each method raises ``ZmtpError``, ``TimeoutError`` or another ``OSError``.
    """

    def __init__(self, connection: socket.socket, deadline: float, limit: int) -> None:
        self._connection = connection
        self._deadline = deadline
        self._limit = self._left = limit

    def greet(self) -> None:
        """Exchange greetings. Comes first, once."""
        self._write(GREETING)
        _check_greeting(self._read(len(GREETING)))
        self._write(ready(b"REQ"))

    def ask(self, question: bytes) -> list[bytes]:
        """The parts of the answer."""
        self._left = self._limit
        self._write(header(0, MORE) + header(len(question)) + question)
        parts: list[bytes] = []
        while True:
            flags, body = self._frame()
            if flags & COMMAND:
                continue
            parts.append(body)
            if not flags & MORE:
                if parts[0]:
                    raise ZmtpError("no empty frame before the answer")
                return parts[1:]
            if len(parts) == MAX_PARTS:
                raise ZmtpError(f"more than {MAX_PARTS} parts in an answer")

    def _write(self, data: bytes) -> None:
        self._await()
        self._connection.sendall(data)

    def _frame(self) -> tuple[int, bytes]:
        flags, size = self._read(2)
        if flags & LONG:
            (size,) = struct.unpack(">Q", bytes((size,)) + self._read(7))
        return flags, self._read(size)

    def _read(self, size: int) -> bytes:
        if size > self._left:
            raise ZmtpError(f"more than the {self._left} bytes that are left for the answer")
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


def _check_greeting(greeting: bytes) -> None:
    if greeting[0] != SIGNATURE[0] or greeting[9] != SIGNATURE[9] or greeting[10] < 3 or greeting[12:16] != b"NULL":
        raise ZmtpError("no ZMTP 3 greeting without security")


class Frames:
    """Takes the bytes of one connection, and gives its messages. Commands are skipped. It keeps the bytes of the last
    ``feed``, and at most ``limit`` bytes of an incomplete message, frame headers included.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()
        self._greeted = False
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def is_idle(self) -> bool:
        """Whether the greeting has come, and no part of a message that is incomplete."""
        return self._greeted and not self._data and not self._parts

    def feed(self, data: bytes) -> None:
        """Add bytes that have arrived. Take all messages before the next call."""
        self._data += data

    def message(self) -> list[bytes] | None:
        """The parts of the next message; None if it is incomplete. Raises ``ZmtpError``; then nothing follows."""
        if not self._greeted and not self._greet():
            return None
        while (frame := self._frame()) is not None:
            flags, body = frame
            if flags & COMMAND:
                continue
            self._parts.append(body)
            if not flags & MORE:
                parts, self._parts, self._size = self._parts, [], 0
                return parts
        return None

    def _greet(self) -> bool:
        if self._data and self._data[0] != SIGNATURE[0]:
            raise ZmtpError("no ZMTP")
        if len(self._data) < len(GREETING):
            return False
        _check_greeting(self._take(len(GREETING)))
        self._greeted = True
        return True

    def _frame(self) -> tuple[int, bytes] | None:
        start = 9 if self._data and self._data[0] & LONG else 2
        if len(self._data) < start:
            return None
        flags = self._data[0]
        size = int.from_bytes(self._data[1:start], "big")
        if self._size + start + size > self._limit:
            raise ZmtpError(f"more than {self._limit} bytes in a message")
        if len(self._data) < start + size:
            return None
        if not flags & COMMAND:
            self._size += start + size
        return flags, self._take(start + size)[start:]

    def _take(self, size: int) -> bytes:
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken
