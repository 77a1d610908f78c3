"""Wakes an engine that rests after an empty step (`busy_wait`) from its worker processes.

The engine's core has a Unix datagram socket in Linux's abstract namespace. Its name is a hash of the engine id, which
the core and its workers know. A message is empty: it means that a worker has something to report in the next step. If
the message is lost, the engine rests for the whole time.
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
    """Wake this engine; if it does not rest now, it skips its next rest. Any thread of a worker.

    Never blocks. Does nothing if no engine listens.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
        out.sendto(b"", _address(engine_id))


def listen(engine_id: str, on_wake: Callable[[], None]) -> None:
    """Call ``on_wake`` for each message of a worker of this engine, on a thread that lives as long as the process.

    If another engine of this host has the same id, that engine keeps the address, and this one logs a warning.
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
