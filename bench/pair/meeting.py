"""How P's and D's processes begin and end: the same for every benchmark."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

from bench.pair.end import End
from bench.pair.orders import Introduction, WrongBytesError
from bench.pair.settings import Settings
from layerpush.apps.demo.ucx import of_this_process

GONE = (EOFError, ConnectionResetError, BrokenPipeError)


class Serving(Protocol):
    """D's process: serves P until P hangs up."""

    def serve(self) -> None: ...


class Obeying(Protocol):
    """P's process."""

    def obey(self, order: Any) -> Any:
        """Answers the command. Raises ``WrongBytesError``."""


def meet_decode(end: End, decode: Connection, digest: bytes) -> Introduction:
    """P's half: D gets to know P, and P D."""
    other: Introduction = decode.recv()
    decode.send(_introduction(end, digest))
    end.agent.add_remote_agent(other.metadata)
    return other


def meet_prefill(end: End, prefill: Connection, digest: bytes) -> None:
    """D's half. ``digest`` is of what P must have, too."""
    prefill.send(_introduction(end, digest))
    other: Introduction = prefill.recv()
    if digest != other.digest:
        raise RuntimeError("P and D were not made from the same bytes")
    end.agent.add_remote_agent(other.metadata)


def run_prefill(make: Callable[[str, Connection, Any], Obeying], command_end: str, decode_end: str) -> None:
    """P's process: ``make(link, decode, settings)``, then answer orders until the command hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command, decode = Connection(int(command_end)), Connection(int(decode_end))
    try:
        link, settings = command.recv()
        decode.send(settings)
        end = make(link, decode, settings)
        command.send(of_this_process())
        while True:
            order = command.recv()
            try:
                command.send(end.obey(order))
            except WrongBytesError as error:
                command.send(error)
    except GONE as error:
        if command.poll(0):  # the command hung up: we are done
            return
        raise RuntimeError("D's process has ended") from error


def run_decode(make: Callable[[Connection, Any], Serving], prefill_descriptor: str) -> None:
    """D's process: ``make(prefill, settings)``, then serve P."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prefill = Connection(int(prefill_descriptor))
    try:
        settings: Settings = prefill.recv()
        make(prefill, settings).serve()
    except GONE:
        return  # P is gone, and with it all that D is for


def _introduction(end: End, digest: bytes) -> Introduction:
    metadata = end.agent.get_agent_metadata()
    return Introduction(metadata, end.memory.data_ptr(), end.ring.data_ptr(), end.device_id, digest)
