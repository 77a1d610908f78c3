"""Wakes an engine that rests after an empty step (`busy_wait`) from its worker processes.

The engine's core has a Unix datagram socket in Linux's abstract namespace. Its name follows from the engine id, which
the core and its workers have in common. A message has no content: it only says that an empty step has something to
report. If it is lost, the engine rests to the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import threading
from collections.abc import Callable

THREAD_NAME = "layerpush-wake"


def _address(engine_id: str) -> str:
    return f"\0layerpush-{hashlib.blake2b(engine_id.encode(), digest_size=16).hexdigest()}"


def wake(engine_id: str) -> None:
    """End the rest of this engine, or keep it from its next one. Never blocks; nothing happens if nobody listens.

    Any thread of a worker.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        out.sendto(b"", _address(engine_id))


def listen(engine_id: str, on_wake: Callable[[], None]) -> None:
    """Call ``on_wake`` for each message of a worker of this engine, on a thread that lives as long as the process.

    If another engine of this host has the same id, it keeps the address, and a line in the log says so.
    """
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        inbox.bind(_address(engine_id))
    except OSError as error:
        inbox.close()
        logger = logging.getLogger(f"vllm.{__name__}")
        logger.warning("workers of engine %s cannot wake it, so it rests a little longer: %s", engine_id, error)
        return

    def run() -> None:
        while True:
            inbox.recv(1)
            on_wake()

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
