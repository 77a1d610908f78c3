"""Answers handshake queries on an engine's side channel. Anybody may connect to it and send anything.

It speaks ZMTP over plain sockets, because ZeroMQ bounds neither the frames of a message, nor the answers that nobody
reads, nor the connections.
"""

from __future__ import annotations

import logging
import random
import resource
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from layerpush.compat.engine_threads import EngineThreads
from layerpush.compat.nixl_connector import GET_META_MSG
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.zmtp import GREETING, MORE, Frames, ZmtpError, header, ready

MAX_QUERY_BYTES = 2048
MAX_CONNECTIONS = 256
QUERY_S = 5.0
IDLE_S = 60.0
WAIT_S = 0.5
NO_FILE_PAUSE_S = 0.1
REST = 3.0
"""Seconds of rest after each second of CPU time, so that a flood of queries takes a quarter of a core."""
TURN_S = 0.005
"""CPU time after which a turn ends: the rest after it is short."""

logger = logging.getLogger(f"vllm.{__name__}")
_decoder = msgspec.msgpack.Decoder(tuple[bytes, int, int])

HandshakeAnswers = Mapping[tuple[int, int], bytes]
"""(pp rank, tp rank) -> the rank's encoded handshake payload."""


class QueryError(ValueError):
    """A message is no handshake query; the text is the reason."""


def listen(
    bound: socket.socket,
    threads: EngineThreads,
    answers: HandshakeAnswers,
    ready: threading.Event,
    stop: threading.Event,
    *_: object,
) -> None:
    """Runs in vLLM's listener thread instead of vLLM's own loop: good queries get the same answers, bad ones none.

    ``bound`` is of ``bind``; ``threads`` watches this one; the other arguments are vLLM's.
    """
    with threads.watched():
        Listener(bound, answers, stop).run(ready)


@dataclass(slots=True, eq=False)
class _Asker:
    """One connection. It has sent no whole query since ``seen``, and is closed if it gets no further until ``due``."""

    connection: socket.socket
    host: str
    seen: float
    due: float
    inbox: Frames = field(default_factory=lambda: Frames(MAX_QUERY_BYTES))
    outbox: list[memoryview] = field(default_factory=list)
    """The rest of an answer. Nothing is read from the connection before it is sent."""

    @property
    def is_idle(self) -> bool:
        return not self.outbox and self.inbox.is_idle

    def send(self) -> None:
        """Send as much of the answer as the connection takes. Raises ``OSError``."""
        while self.outbox:
            try:
                sent = self.connection.sendmsg(self.outbox)
            except BlockingIOError:
                return
            while self.outbox and sent >= len(self.outbox[0]):
                sent -= len(self.outbox.pop(0))
            if sent:
                self.outbox[0] = self.outbox[0][sent:]


class Listener:
    """A good query gets (payload, clock). A query for an unknown rank gets an empty frame.

    The empty frame ends the asker's handshake at once; without an answer it would wait for 5 s.

    At most ``limit`` connections are open. Beyond, and when the process may open no more files, one is closed: of the
    host with the most connections, the one whose last query is oldest. One thread runs all of it.

    After a defect it closes all connections and goes on: anybody may connect, and none may end the engine.
    """

    def __init__(
        self, bound: socket.socket, answers: HandshakeAnswers, stop: threading.Event, limit: int = MAX_CONNECTIONS
    ) -> None:
        self._bound = bound
        self._answers = answers
        self._stop = stop
        self._limit = min(limit, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._askers: dict[_Asker, None] = {}
        self._peer_errors = PeerErrors(logger)

    def run(self, ready: threading.Event) -> None:
        """Serve until ``stop`` is set, and close the socket. ``ready`` is set at the beginning."""
        ready.set()  # connections wait in the socket's queue; the engine's start would wait for this without end
        with self._bound:
            self._bound.setblocking(False)
            while not self._stop.is_set():
                try:
                    self._serve_all()
                except Exception as error:  # noqa: BLE001  no connection and no defect of a turn ends the listener
                    self._report("defect", f"closed all connections: {type(error).__name__}: {error}")
                    self._stop.wait(NO_FILE_PAUSE_S)

    def _serve_all(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._bound, selectors.EVENT_READ)
            try:
                while not self._stop.is_set():
                    self._turn()
            finally:
                askers, self._askers = self._askers, {}
                for asker in askers:
                    asker.connection.close()

    def _turn(self) -> None:
        """Wait up to WAIT_S for events, and serve each once, or as many as there is time for. Then rest."""
        events = self._selector.select(WAIT_S)
        random.shuffle(events)  # in a flood each has the same chance to be served
        began = time.thread_time()
        for key, _ in events:
            if key.data is None:
                self._accept()
            elif key.data in self._askers:  # it may have been closed in favour of a new one
                self._serve(key.data)
            if time.thread_time() - began > TURN_S:
                break
        now = time.monotonic()
        for asker in [asker for asker in self._askers if asker.due <= now]:
            if asker.is_idle:
                self._close(asker)
            else:
                self._drop(asker, f"its query, or to read the answer, took it more than {QUERY_S:g} s")
        self._stop.wait(REST * (time.thread_time() - began))

    def _accept(self) -> None:
        try:
            connection, address = self._bound.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone
        except OSError as error:  # no file is left, or no memory
            self._report("no file left", f"cannot accept a connection: {error}")
            if self._askers:
                self._make_room()
            self._stop.wait(NO_FILE_PAUSE_S)  # the next call would fail as fast
            return
        if len(self._askers) >= self._limit:
            self._report("too many connections", f"more than {self._limit} connections; closed an old one")
            self._make_room()
        now = time.monotonic()
        asker = _Asker(connection, str(address[0]), now, now + QUERY_S)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.send(GREETING + ready(b"ROUTER"))  # an empty send buffer takes all of it
            self._selector.register(connection, selectors.EVENT_READ, asker)
        except OSError:
            connection.close()
        else:
            self._askers[asker] = None

    def _make_room(self) -> None:
        """Close one connection."""
        crowd = Counter(asker.host for asker in self._askers)
        self._reset(min(self._askers, key=lambda asker: (-crowd[asker.host], asker.seen)))

    def _serve(self, asker: _Asker) -> None:
        """Read from a connection, or send it the rest of its answer. Answer the queries that are complete."""
        was_idle = asker.is_idle
        try:
            if not asker.outbox:
                data = asker.connection.recv(MAX_QUERY_BYTES)
                if not data:
                    self._close(asker)
                    return
                asker.inbox.feed(data)
            goes_on = self._answer_all(asker)
            now = time.monotonic()
            if asker.is_idle:
                asker.due = now + IDLE_S
            elif goes_on or was_idle:
                asker.due = now + QUERY_S
            wanted = selectors.EVENT_WRITE if asker.outbox else selectors.EVENT_READ
            self._selector.modify(asker.connection, wanted, asker)
        except BlockingIOError:
            return
        except ZmtpError as error:
            self._drop(asker, str(error))
        except OSError:
            self._close(asker)
        except Exception as error:  # noqa: BLE001  # no other thread answers peers: this one must live on
            self._report("handshake query", f"cannot answer {asker.host}: {type(error).__name__}: {error}")
            self._reset(asker)

    def _answer_all(self, asker: _Asker) -> bool:
        """Answer one query after the other, as long as the connection takes the answers. Whether one was complete."""
        goes_on = bool(asker.outbox)
        asker.send()
        goes_on &= not asker.outbox
        while not asker.outbox and (message := asker.inbox.message()) is not None:
            goes_on, asker.seen = True, time.monotonic()
            try:
                asker.outbox = _message(b"", *self._reply(message, asker.host))
            except QueryError as error:
                self._report("bad handshake query", f"dropped a query from {asker.host}: {error}")
            asker.send()
        return goes_on

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

    def _drop(self, asker: _Asker, reason: str) -> None:
        self._report("bad connection", f"closed a connection of {asker.host}: {reason}")
        self._reset(asker)

    def _reset(self, asker: _Asker) -> None:
        """Close a connection, and drop the part of an answer that the kernel still holds."""
        asker.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(asker)

    def _close(self, asker: _Asker) -> None:
        del self._askers[asker]
        self._selector.unregister(asker.connection)
        asker.connection.close()

    def _report(self, kind: str, text: str) -> None:
        self._peer_errors.count(kind, f"side channel: {text}", time.perf_counter())


def _message(*parts: bytes) -> list[memoryview]:
    """The bytes of a message. A part is not copied: many connections may wait for the same one."""
    last = len(parts) - 1
    pieces = ((header(len(part), 0 if index == last else MORE), part) for index, part in enumerate(parts))
    return [memoryview(each) for piece in pieces for each in piece if each]
