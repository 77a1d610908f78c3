"""A side channel whose answers to handshakes come from no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

Answer = Callable[[list[bytes], str], list[bytes]]
"""(an honest engine's answer, the engine id that D expects) -> frames."""


def _payload(honest: list[bytes], **changes: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(msgspec.msgpack.decode(honest[0]) | changes), honest[1]]


def _metadata(**changes: Any) -> Answer:
    """The honest metadata in the expected engine's name, except for these fields."""

    def answer(honest: list[bytes], engine_id: str) -> list[bytes]:
        agent = msgspec.msgpack.decode(msgspec.msgpack.decode(honest[0])["agent_metadata_bytes"])
        return _payload(honest, agent_metadata_bytes=msgspec.msgpack.encode(agent | {"engine_id": engine_id} | changes))

    return answer


HOSTILE_ANSWERS: dict[str, Answer] = {
    "one empty frame": lambda _honest, _: [b""],
    "no msgpack": lambda honest, _: [b"\xc1\xc1", honest[1]],
    "five frames": lambda honest, _: [*honest, b"", b"", b""],
    "no clock": lambda honest, _: [honest[0], b"\xc1"],
    "a clock that is a list": lambda honest, _: [honest[0], msgspec.msgpack.encode([1, 2])],
    "an infinite clock": lambda honest, _: [honest[0], msgspec.msgpack.encode(float("inf"))],
    "another hash": lambda honest, _: _payload(honest, compatibility_hash="0"),
    "metadata that is no msgpack": lambda honest, _: _payload(honest, agent_metadata_bytes=b"\xff" * 9),
    "the honest engine's own": lambda honest, _: honest,
    "an agent that is none": _metadata(agent_metadata=b"\0" * 64),
    "an agent that is empty": _metadata(agent_metadata=b""),
    "wrong types": _metadata(num_blocks="many"),
}


@contextmanager
def side_channel(port: int, answer: Answer, honest_port: int, engine_id: str) -> Iterator[Callable[[], bool]]:
    """Listens on the port. Yields a function: has a handshake come?"""
    asked, stop = threading.Event(), threading.Event()
    context = zmq.Context()

    def run() -> None:
        with context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port}")
            while not stop.is_set():
                if socket.poll(50):
                    identity, empty, _query = socket.recv_multipart()
                    asked.set()
                    socket.send_multipart([identity, empty, *answer(honest, engine_id)])

    thread = threading.Thread(target=run, daemon=True)
    try:
        with context.socket(zmq.REQ) as asker:
            asker.setsockopt(zmq.RCVTIMEO, 10_000)
            asker.connect(f"tcp://127.0.0.1:{honest_port}")
            asker.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
            honest = asker.recv_multipart()
        thread.start()
        yield asked.is_set
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join(10)
        context.destroy(linger=0)
