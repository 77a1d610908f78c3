"""The side channel's listener: real sockets, and every kind of invalid query."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.servers.ports import PortAllocator
from layerpush.compat.nixl_connector import GET_META_MSG
from layerpush.engine.scheduler import side_channel
from layerpush.engine.scheduler.side_channel import (
    MAX_CONNECTIONS,
    MAX_QUERY_BYTES,
    HandshakeAnswers,
    Listener,
)
from layerpush.transport import port as port_module
from layerpush.transport import zmtp
from layerpush.transport.port import SideChannelError, bind
from tests.support.ports import SIDE_CHANNEL_PORTS
from tests.support.waiting import until

PORTS = PortAllocator(SIDE_CHANNEL_PORTS)
ANSWERS = {(0, 0): b"payload of rank 0", (0, 1): b"payload of rank 1"}
DEADLINE_MS = 10_000

Ask = Callable[..., list[bytes]]


def query(pp_rank: object = 0, tp_rank: object = 0, message: object = GET_META_MSG) -> bytes:
    return msgspec.msgpack.encode((message, pp_rank, tp_rank))


class Asker:
    """A peer of the listener: asks as vLLM does, or sends any bytes."""

    cpu_clock: int
    """Of the listener's thread."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.path = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.context = zmq.Context()

    @contextmanager
    def socket(self, kind: int) -> Iterator[zmq.Socket[bytes]]:
        with self.context.socket(kind) as one:
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
            one.setsockopt(zmq.IPV6, ":" in self.host)
            one.connect(self.path)
            yield one

    def ask(self, text: bytes) -> list[bytes]:
        with self.socket(zmq.REQ) as one:
            one.send(text)
            return one.recv_multipart()

    def send(self, *frames: bytes) -> None:
        """Frames as they are, and then a good query on the same connection: the answer shows that they were read."""
        with self.socket(zmq.DEALER) as one:
            one.send_multipart(frames)
            one.send_multipart([b"", query()])
            empty, payload, _clock = one.recv_multipart()
            assert (empty, payload) == (b"", ANSWERS[0, 0])

    def send_bytes(self, *pieces: bytes) -> None:
        """Past ZMQ, straight into the connection. Returns when the listener's side has taken or refused the bytes."""
        with socket.create_connection((self.host, self.port), timeout=10) as raw, suppress(OSError):
            for piece in pieces:
                raw.sendall(piece)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4096):
                pass

    def check_answered(self) -> None:
        payload, clock = self.ask(query())
        assert payload == ANSWERS[0, 0]
        assert isinstance(msgspec.msgpack.decode(clock), float)


@contextmanager
def listening(
    host: str = "127.0.0.1", answers: HandshakeAnswers = ANSWERS, limit: int = MAX_CONNECTIONS
) -> Iterator[Asker]:
    asker, ready, stop = Asker(host, PORTS.next_free()), threading.Event(), threading.Event()
    listener = Listener(bind(host, asker.port), answers, stop, limit)
    thread = threading.Thread(target=listener.run, args=(ready,), daemon=True)
    thread.start()
    assert ready.wait(10)
    asker.cpu_clock = time.pthread_getcpuclockid(thread.ident or 0)
    try:
        yield asker
        assert thread.is_alive(), "the listener died"
    finally:
        stop.set()
        thread.join(10)
        asker.context.destroy(linger=0)
    assert not thread.is_alive(), "the listener does not end"


@pytest.mark.parametrize("method", ["_accept", "_reset"])
def test_the_listener_outlives_a_defect_that_a_peer_meets(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as asker:
        asker.check_answered()
        sound, failed = getattr(Listener, method), threading.Event()

        def once(*args: Any) -> Any:
            if failed.is_set():
                return sound(*args)
            failed.set()
            raise MemoryError

        monkeypatch.setattr(Listener, method, once)
        asker.send_bytes(b"no ZMTP")
        asker.check_answered()
        assert failed.is_set()


@pytest.fixture(scope="module")
def shared() -> Iterator[Asker]:
    with listening() as asker:
        yield asker


def test_each_rank_is_answered_with_its_payload_and_a_clock(shared: Asker) -> None:
    before = msgspec.msgpack.decode(shared.ask(query())[1])
    payload, clock = shared.ask(query(0, 1))
    assert payload == ANSWERS[0, 1]
    assert msgspec.msgpack.decode(clock) > before


@pytest.mark.parametrize("ranks", [(0, 2), (1, 0), (-1, 0), (0, 2**64 - 1), (0, -(2**63))])
def test_a_query_for_a_missing_rank_gets_an_empty_frame_at_once(shared: Asker, ranks: tuple[int, int]) -> None:
    assert shared.ask(query(*ranks)) == [b""]


NO_QUERIES = [
    b"",
    b"\xc1",
    b"\x93",  # a list of three, cut off
    b"\x81" * 1000,  # deep
    msgspec.msgpack.encode([GET_META_MSG, 0]),
    msgspec.msgpack.encode([GET_META_MSG, 0, 0, 0]),
    query(0, 0) + b"more",
    query("0", "0"),
    query(True, False),
    query(message="get_meta_msg"),
    query(message=b"shut_down"),
]
WRONG_FRAMES = [[b""], [query()], [b"x", query()], [b"", b"", query()], [b"", query(), b""]]


@pytest.mark.parametrize("frames", [*([b"", text] for text in NO_QUERIES), *WRONG_FRAMES])
def test_an_invalid_query_is_dropped_and_the_next_is_answered(shared: Asker, frames: list[bytes]) -> None:
    shared.send(*frames)
    shared.check_answered()


def test_an_oversized_query_closes_only_its_own_connection(shared: Asker) -> None:
    with shared.socket(zmq.DEALER) as one:
        events = one.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        one.send_multipart([b"", query() + b"x" * MAX_QUERY_BYTES])
        assert events.poll(DEADLINE_MS), "the listener read the query"
        one.disable_monitor()
    shared.check_answered()


# A ZMTP 3.1 greeting and a READY command of a REQ socket, then a frame that claims to be larger than memory.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(pieces=[b""])
@example(pieces=[b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
@example(pieces=[b"\0" * 10_000])
@example(pieces=[GREETING])
@example(pieces=[GREETING, READY[:10]])
@example(pieces=[GREETING, READY, b"\x02" + struct.pack(">Q", 2**63 - 1), b"x" * 100_000])
@example(pieces=[GREETING, READY, b"\x02" + struct.pack(">Q", 2**64 - 1)])
@example(pieces=[GREETING, b"\x06" + struct.pack(">Q", 2**62)])
@given(pieces=st.lists(st.binary(max_size=300) | st.sampled_from([GREETING, READY]), max_size=4))
def test_the_side_channel_survives_bytes_that_are_not_zmq(shared: Asker, pieces: list[bytes]) -> None:
    shared.send_bytes(*pieces)
    shared.check_answered()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frames=st.lists(
        st.binary(max_size=200)
        | st.recursive(
            st.sampled_from([None, True, 0, 2**64 - 1, 0.5, GET_META_MSG]) | st.integers(-(2**63), 2**63) | st.binary(),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=8,
        ).map(msgspec.msgpack.encode),
        min_size=1,
        max_size=4,
    ),
    enveloped=st.booleans(),
)  # fmt: skip
def test_the_side_channel_survives_fuzzed_frames(shared: Asker, frames: list[bytes], enveloped: bool) -> None:
    message = [b"", *frames] if enveloped else frames
    with shared.socket(zmq.DEALER) as one:
        one.send_multipart(message)
        one.send_multipart([b"", query(0, 1)])
        while (reply := one.recv_multipart())[1] != ANSWERS[0, 1]:
            assert reply[1] in (b"", ANSWERS[0, 0])


def test_garbage_is_logged_in_few_lines_with_the_sender(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.layerpush"), listening() as asker, asker.socket(zmq.DEALER) as one:
        for _ in range(500):
            one.send_multipart([b"", b"garbage"])
        one.send_multipart([b"", query(7, 7)])
        assert one.recv_multipart() == [b"", b""]
    lines = [record.getMessage() for record in caplog.records]
    dropped = [line for line in lines if "dropped a query from 127.0.0.1" in line]
    assert 1 <= len(dropped) < 10
    assert [line for line in lines if "127.0.0.1 asks for pp rank 7, tp rank 7: no such" in line]


def test_an_undeliverable_answer_affects_no_other_query(shared: Asker) -> None:
    """The asker is gone before it is answered."""
    for _ in range(20):
        with shared.socket(zmq.DEALER) as one:
            one.send_multipart([b"", query()])
    shared.check_answered()


@pytest.mark.parametrize(
    ("host", "reached"),
    [("::1", "::1"), ("[::1]", "::1"), ("localhost", "127.0.0.1"), ("lo", "127.0.0.1"), ("*", "127.0.0.1"),
     ("0.0.0.0", "127.0.0.2"), ("::", "127.0.0.1")],
)  # fmt: skip
def test_the_side_channel_listens_where_zeromq_would(host: str, reached: str) -> None:
    with listening(host) as asker:
        there = Asker(reached, asker.port)
        there.check_answered()
        there.context.destroy(linger=0)


# Peers that take what they can get. The constants of the listener are shortened where a test waits for one.


def connected(asker: Asker, host: str = "127.0.0.1") -> socket.socket:
    """A connection from ``host`` after the handshake."""
    one = socket.create_connection((asker.host, asker.port), timeout=10, source_address=(host, 0))
    one.sendall(zmtp.GREETING + zmtp.ready(b"DEALER"))
    received = b""
    while len(received) < len(zmtp.GREETING + zmtp.ready(b"ROUTER")):
        received += one.recv(1024)
    return one


def framed(*parts: bytes) -> bytes:
    flags = [zmtp.MORE] * (len(parts) - 1) + [0]
    return b"".join(zmtp.header(len(part), flag) + part for part, flag in zip(parts, flags, strict=True))


def is_closed(one: socket.socket) -> bool:
    """Whether the listener has closed the connection. Takes what it has sent, and waits up to 10 s."""
    try:
        while one.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("frame", [zmtp.header(0, zmtp.MORE), zmtp.header(1024, zmtp.MORE) + bytes(1024)])
def test_a_message_without_end_closes_its_connection(caplog: pytest.LogCaptureFixture, frame: bytes) -> None:
    with caplog.at_level(logging.WARNING, "vllm.layerpush"), listening() as asker:
        with connected(asker) as one, pytest.raises((ConnectionResetError, BrokenPipeError)):
            one.sendall(frame * ((1 << 24) // len(frame)))  # 16 MiB: more than the kernel keeps for a reader
        asker.check_answered()
    assert f"more than {MAX_QUERY_BYTES} bytes in a message" in caplog.text


@example(data=b"\x01\x00" * 500, sizes=[7])
@example(data=b"\x01\x05hello" * 100, sizes=[7])
@example(data=b"\x03" + struct.pack(">Q", 1 << 40) + bytes(1000), sizes=[100])
@given(
    data=st.binary(max_size=4096)
    | st.lists(st.sampled_from([b"\x01\x00", b"\x01\x05hello", b"\x04\x02ab"])).map(b"".join),
    sizes=st.lists(st.integers(1, 600), min_size=1),
)  # fmt: skip
def test_no_more_is_kept_than_the_limit_and_the_last_bytes(data: bytes, sizes: list[int]) -> None:
    limit = 64
    inbox = zmtp.Frames(limit)
    inbox.feed(zmtp.GREETING)
    with suppress(zmtp.ZmtpError):
        while data:
            piece, data = data[: sizes[0]], data[sizes[0] :]
            inbox.feed(piece)
            while inbox.message() is not None:
                pass
            kept = len(inbox._data) + sum(map(len, inbox._parts)) + 2 * len(inbox._parts)
            assert kept <= limit + len(piece)


@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=3), max_size=4), st.integers(1, 80))
def test_messages_arrive_whole_in_any_pieces(messages: list[list[bytes]], size: int) -> None:
    inbox, arrived = zmtp.Frames(1024), []
    stream = zmtp.GREETING + zmtp.ready(b"REQ") + b"".join(framed(*parts) for parts in messages)
    for start in range(0, len(stream), size):
        inbox.feed(stream[start : start + size])
        while (message := inbox.message()) is not None:
            arrived.append(message)
    assert arrived == messages
    assert inbox.is_idle


def test_an_answer_that_nobody_reads_closes_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(side_channel, "QUERY_S", 0.2)
    large = {(0, 0): bytes(32 << 20), (0, 1): ANSWERS[0, 1]}
    with caplog.at_level(logging.WARNING, "vllm.layerpush"), listening(answers=large) as asker, connected(asker) as one:
        one.sendall(framed(b"", query()) * 50)
        assert asker.ask(query(0, 1))[0] == ANSWERS[0, 1]
        until(lambda: "or to read the answer, took it more than" in caplog.text)
        assert is_closed(one)
        assert asker.ask(query(0, 1))[0] == ANSWERS[0, 1]


def test_answers_larger_than_the_send_buffer_arrive_whole() -> None:
    large = {(0, 0): bytes(range(256)) * (1 << 16)}
    expected = zmtp.header(0, zmtp.MORE) + zmtp.header(1 << 24, zmtp.MORE) + large[0, 0] + zmtp.header(9)
    with listening(answers=large) as asker, connected(asker) as one:
        one.sendall(framed(b"", query()) * 2)
        for _ in range(2):
            received = bytearray()
            while len(received) < len(expected) + 9:
                received += one.recv(len(expected) + 9 - len(received))
            assert received[: len(expected)] == expected


@pytest.mark.parametrize("sent", [b"", zmtp.GREETING[:20], zmtp.GREETING + b"\x00\x09abc"])
def test_a_query_that_does_not_end_closes_its_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(side_channel, "QUERY_S", 0.2)
    with listening() as asker, socket.create_connection(("127.0.0.1", asker.port), timeout=10) as one:
        one.sendall(sent)
        assert is_closed(one)
        asker.check_answered()


def test_an_asker_whose_idle_connection_was_closed_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a decode engine with many ranks does, which needs a while for each answer."""
    monkeypatch.setattr(side_channel, "IDLE_S", 0.1)
    with listening() as asker, asker.socket(zmq.REQ) as one:
        events = one.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for rank in range(2):
            one.send(query(0, rank))
            assert one.recv_multipart()[0] == ANSWERS[0, rank]
            assert events.poll(DEADLINE_MS), "the listener closed the connection"
            events.recv_multipart()
        one.disable_monitor()


def test_the_oldest_connection_of_the_largest_crowd_gives_way() -> None:
    with listening(limit=4) as asker, connected(asker, "127.0.0.2") as other:
        crowd = [connected(asker) for _ in range(6)]
        assert all(is_closed(one) for one in crowd[:3])
        for one in (other, *crowd[3:]):
            one.sendall(framed(b"", query(0, 1)))
            assert one.recv(4096)[4:].startswith(ANSWERS[0, 1])
        asker.check_answered()
        for one in crowd:
            one.close()


def test_a_flood_of_queries_leaves_most_of_a_core_to_the_engine() -> None:
    def flood(one: socket.socket) -> None:
        with suppress(OSError):
            while True:
                one.sendall(framed(b"", b"garbage") * 10_000)

    with listening() as asker:
        floods = [connected(asker) for _ in range(4)]
        for one in floods:
            threading.Thread(target=flood, args=(one,), daemon=True).start()
        started, before = time.monotonic(), time.clock_gettime(asker.cpu_clock)
        until(lambda: time.monotonic() > started + 1)
        used = (time.clock_gettime(asker.cpu_clock) - before) / (time.monotonic() - started)
        asker.check_answered()
        for one in floods:
            one.shutdown(socket.SHUT_RDWR)
            one.close()
    assert used < 0.4


class Fileless:
    """A listening socket. While there are no ``files``, the process may open none."""

    def __init__(self, bound: socket.socket) -> None:
        self._bound, self.files, self.tries = bound, True, 0

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.files:
            return self._bound.accept()
        self.tries += 1
        raise OSError(errno.EMFILE, "Too many open files")

    def __enter__(self) -> Fileless:
        return self

    def __exit__(self, *_: object) -> None:
        self._bound.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)


@pytest.fixture
def fileless(monkeypatch: pytest.MonkeyPatch) -> list[Fileless]:
    """The socket of the next listener."""
    bind, made = port_module._bind, list[Fileless]()

    def bound(host: str, port: int) -> Fileless:
        made.append(Fileless(bind(host, port)))
        return made[0]

    monkeypatch.setattr(port_module, "_bind", bound)
    return made


def test_without_files_the_listener_neither_spins_nor_ends(fileless: list[Fileless]) -> None:
    with listening() as asker, asker.socket(zmq.REQ) as one:
        fileless[0].files = False
        one.send(query())
        until(lambda: fileless[0].tries)
        started, tries = time.monotonic(), fileless[0].tries
        until(lambda: fileless[0].tries >= tries + 5)
        assert time.monotonic() - started > 4 * side_channel.NO_FILE_PAUSE_S
        fileless[0].files = True
        assert one.recv_multipart()[0] == ANSWERS[0, 0]


def test_without_files_old_connections_give_way(fileless: list[Fileless]) -> None:
    with listening() as asker, connected(asker) as old:
        fileless[0].files = False
        with asker.socket(zmq.REQ) as one:
            one.send(query())
            assert is_closed(old)
            fileless[0].files = True
            assert one.recv_multipart()[0] == ANSWERS[0, 0]


def test_the_side_channel_stops_during_a_stream_of_queries() -> None:
    with listening() as asker, asker.socket(zmq.DEALER) as one:
        for _ in range(1000):
            one.send_multipart([b"", b"garbage"])


def test_a_port_that_is_taken_for_long_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(port_module, "BIND_S", 0.3)
    monkeypatch.setattr(port_module, "BIND_RETRY_S", 0.05)
    port = PORTS.next_free()
    with (
        caplog.at_level(logging.WARNING, "vllm.layerpush"),
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(SideChannelError) as refused,
    ):
        bind("127.0.0.1", port)
    for words in (f"127.0.0.1:{port}", "Address already in use", "another program", "VLLM_NIXL_SIDE_CHANNEL_PORT"):
        assert words in str(refused.value)
    assert len(caplog.records) > 1, "it has tried again"


def test_a_port_that_is_free_after_a_while_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that is restarted too soon finds the port of the one before."""
    monkeypatch.setattr(port_module, "BIND_RETRY_S", 0.05)
    port = PORTS.next_free()
    before = socket.create_server(("127.0.0.1", port))
    connected_before = socket.create_connection(("127.0.0.1", port))
    accepted, _ = before.accept()

    def end() -> None:
        until(lambda: "cannot listen" in caplog.text)
        accepted.close()  # in TIME_WAIT from now on
        before.close()

    with caplog.at_level(logging.WARNING, "vllm.layerpush"), connected_before:
        threading.Thread(target=end).start()
        bind("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["10.255.255.9", "no such host", "::9"])
def test_an_address_of_no_interface_ends_the_start(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(port_module, "BIND_S", 0.0)
    with pytest.raises(SideChannelError, match="VLLM_NIXL_SIDE_CHANNEL_HOST must be an address of this machine"):
        bind(host, PORTS.next_free())


def test_a_signal_ends_the_wait_for_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs handlers of signals on the main thread, and so does the wait."""
    port, main, sleep = PORTS.next_free(), threading.get_ident(), time.sleep
    sleeping, interrupted = threading.Event(), threading.Event()

    def slept(seconds: float) -> None:
        sleeping.set()
        sleep(seconds)

    def interrupt() -> None:
        """A signal that comes right before the sleep begins does not end it. So send more of them."""
        assert sleeping.wait(20)
        while not interrupted.wait(0.02):
            signal.pthread_kill(main, signal.SIGUSR1)

    def on_signal(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(port_module, "BIND_RETRY_S", 30.0)
    monkeypatch.setattr(time, "sleep", slept)
    before = signal.signal(signal.SIGUSR1, on_signal)
    thread = threading.Thread(target=interrupt)
    try:
        with socket.create_server(("127.0.0.1", port)):
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                bind("127.0.0.1", port)
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
