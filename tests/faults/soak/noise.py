"""Sends garbage to an engine's side channel."""

from __future__ import annotations

import contextlib
import random
import socket

import msgspec
import zmq

TIMEOUT_S = 0.5


def send_noise(host: str, port: int, rng: random.Random) -> None:
    """Send raw bytes that are no ZMTP, then ZMTP messages that are no handshake. Reads no answer."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), TIMEOUT_S) as raw:
        raw.sendall(rng.choice((rng.randbytes(64), b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\0" * 8 + b"\x7f", b"")))
    sender: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    sender.setsockopt(zmq.LINGER, 200)
    sender.setsockopt(zmq.SNDTIMEO, 200)
    sender.connect(f"tcp://{host}:{port}")
    with contextlib.suppress(zmq.ZMQError):
        for _ in range(rng.randint(1, 5)):
            sender.send_multipart(frames(rng))
    sender.close()


def frames(rng: random.Random) -> list[bytes]:
    """A bad message for a ROUTER that expects an empty frame and a msgpack pair."""
    payloads = (
        rng.randbytes(rng.choice((0, 1, 100, 10_000))),
        msgspec.msgpack.encode((b"get_meta_msg", 99, 99)),
        msgspec.msgpack.encode((b"get_meta_msg", -1, "x")),
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode((b"get_meta_msg",)),
        b"\xdd\xff\xff\xff\xff",
    )
    return rng.choice(([b"", rng.choice(payloads)], [rng.choice(payloads)], [b"", b"", b""], [b"", *payloads]))
