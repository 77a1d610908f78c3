"""Answers handshake queries on an engine's side channel. Anybody may connect to it and send anything."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import msgspec
import zmq

from layerpush.compat.nixl_connector import GET_META_MSG
from layerpush.telemetry.peer_errors import PeerErrors

MAX_QUERY_BYTES = 1024
WAIT_MS = 500
BIND_RETRY_S = 1.0

logger = logging.getLogger(f"vllm.{__name__}")
_decoder = msgspec.msgpack.Decoder(tuple[bytes, int, int])

Answers = Mapping[tuple[int, int], bytes]
"""(pp rank, tp rank) -> the rank's encoded handshake payload."""


class QueryError(ValueError):
    """A message is no handshake query; the text is the reason."""


def listen(answers: Answers, ready: threading.Event, stop: threading.Event, host: str, port: int) -> None:
    """Runs in vLLM's listener thread instead of vLLM's own loop: good queries get the same answers, bad ones none."""
    bare = host.strip("[]")
    Listener(answers, stop, f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}").run(ready)


class Listener:
    """One ROUTER socket. A good query gets (payload, clock). A query for an unknown rank gets an empty frame.

    The empty frame ends the asker's handshake at once; without an answer it would wait for 5 s.
    """

    def __init__(self, answers: Answers, stop: threading.Event, path: str) -> None:
        self._answers = answers
        self._stop = stop
        self._path = path
        self._peer_errors = PeerErrors(logger)

    def run(self, ready: threading.Event) -> None:
        """Serve until `stop` is set. `ready` is set when the port is bound."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUERY_BYTES)
            socket.setsockopt(zmq.IPV6, "[" in self._path)
            if not self._bind(socket):
                return
            ready.set()
            while not self._stop.is_set():
                self._serve(socket)

    def _bind(self, socket: zmq.Socket[bytes]) -> bool:
        """Try until the port is free; False if `stop` came first. vLLM waits meanwhile, so the log has the reason."""
        while not self._stop.is_set():
            try:
                socket.bind(self._path)
            except zmq.ZMQError as error:
                self._report(
                    "cannot listen",
                    f"cannot listen on {self._path} ({error}): see VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT; trying again",
                )
                self._stop.wait(BIND_RETRY_S)
            else:
                return True
        return False

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        """Answer at most one query; wait at most WAIT_MS for it."""
        asker = "somebody"
        try:
            received = socket.recv_multipart(copy=False)
            asker = _address(received[-1])
            identity, *frames = (frame.bytes for frame in received)
            socket.send_multipart((identity, b"", *self._reply(frames, asker)), zmq.NOBLOCK)
        except zmq.Again:
            return
        except QueryError as error:
            self._report("bad handshake query", f"dropped a query from {asker}: {error}")
        except Exception as error:  # noqa: BLE001  # no other thread answers peers: this one must live on
            self._report("handshake query", f"cannot answer {asker}: {type(error).__name__}: {error}")
            self._stop.wait(WAIT_MS / 1000)  # a socket that fails at once must not spin

    def _reply(self, frames: list[bytes], asker: str) -> tuple[bytes, ...]:
        if len(frames) != 2 or frames[0]:
            raise QueryError(f"{len(frames)} frames where a query has an empty one and one with its text")
        try:
            message, pp_rank, tp_rank = _decoder.decode(frames[1])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise QueryError(str(error)) from None
        if message != GET_META_MSG:
            raise QueryError(f"{message[:32]!r} is not {GET_META_MSG!r}")
        answer = self._answers.get((pp_rank, tp_rank))
        if answer is None:
            self._report("unknown rank", f"{asker} asks for pp rank {pp_rank}, tp rank {tp_rank}: no such")
            return (b"",)
        # The clock of the process that stamps leases: this is a thread of the scheduler's process.
        return answer, msgspec.msgpack.encode(time.perf_counter())

    def _report(self, kind: str, text: str) -> None:
        self._peer_errors.add(kind, f"side channel: {text}", time.perf_counter())


def _address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "somebody"
