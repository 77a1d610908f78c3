"""Handshakes: asked in bounded time and memory, without waiting for each other's hosts, then vLLM's own part."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from layerpush.compat import handshake_executor, patches
from layerpush.compat.handshake import MAX_ANSWER_BYTES, HandshakeAnswer, handshake_query, read_answer
from layerpush.compat.handshake_executor import Answers, HandshakeError, HandshakeExecutor
from layerpush.transport import zmtp
from tests.support.waiting import until
from tests.unit.test_probe import GREETING, HOST, PORTS, READY, answer, endlessly, frame, listening, sends

SILENT = "127.0.0.2"
AHEAD_S = 1000.0
REFUSED = msgspec.msgpack.encode({"compatibility_hash": "other settings", "agent_metadata_bytes": b""})


def refusal(answer: HandshakeAnswer | None) -> str | None:
    return None if answer is None else f"P and D must have the same settings, not {answer.compatibility_hash}"


def clock() -> bytes:
    return msgspec.msgpack.encode(time.perf_counter() + AHEAD_S)


def of_vllm(host: str, port: int, tp_size: int, engine_id: str, dcp: int, pp: int, notif: bool) -> tuple[Any, ...]:
    """vLLM's handshake, as far as it uses its socket: the answers, and how far the engine's clock is ahead."""
    answers, best, ahead = [], float("inf"), 0.0
    with base_worker.zmq_ctx(zmq.REQ, f"tcp://{host}:{port}") as one:
        for rank in range(tp_size):
            one.setsockopt(zmq.RCVTIMEO, 5000)
            started = time.perf_counter()
            one.send(handshake_query(0, rank))
            parts = one.recv_multipart()
            received = time.perf_counter()
            assert len(parts) == 2
            answers.append(parts[0])
            if received - started < best:
                best, ahead = received - started, msgspec.msgpack.decode(parts[1]) - (started + received) / 2
    return engine_id, answers, ahead, threading.current_thread().name, (dcp, pp, notif)


@pytest.fixture
def handshakes() -> Iterator[HandshakeExecutor]:
    patches.install(patches.Process.WORKER)
    one = HandshakeExecutor(ThreadPoolExecutor(1, "vllm"), lambda tp_size, _: range(tp_size), refusal)
    yield one
    one.shutdown(wait=False)
    until(lambda: not one._running and not one._waiting)


@pytest.fixture
def silent() -> Iterator[int]:
    """A port of SILENT that accepts connections and says nothing."""
    with socket.create_server((SILENT, PORTS.next_free()), backlog=128) as listener:
        yield listener.getsockname()[1]


Submit = Callable[..., Future[Any]]


def submit(handshakes: HandshakeExecutor, host: str, port: int, engine_id: str = "D", ranks: int = 1) -> Future[Any]:
    return handshakes.submit(of_vllm, host, port, ranks, engine_id, 1, 1, True)


def answers_each(*payloads: bytes) -> Callable[[socket.socket], None]:
    """One payload for each query, with the clock at that time."""

    def talk(connection: socket.socket) -> None:
        inbox, left = zmtp.Frames(2048), list(payloads)
        connection.sendall(GREETING + READY)
        while data := connection.recv(4096):
            inbox.feed(data)
            while inbox.message() is not None:
                connection.sendall(answer(b"", left.pop(0), clock()))

    return talk


def test_vllms_handshake_gets_each_ranks_answer_and_the_clock(handshakes: HandshakeExecutor) -> None:
    with listening(answers_each(b"rank 0", b"rank 1")) as port:
        engine_id, answers, ahead, thread, options = submit(handshakes, HOST, port, "D", ranks=2).result(20)
    assert (engine_id, answers, options) == ("D", [b"rank 0", b"rank 1"], (1, 1, True))
    assert ahead == pytest.approx(AHEAD_S, abs=0.5)
    assert thread == "vllm_0", "NIXL is called by vLLM's one thread"


def test_a_refused_answer_fails_the_handshake_with_the_reason(handshakes: HandshakeExecutor) -> None:
    with listening(answers_each(REFUSED)) as port, pytest.raises(HandshakeError, match="the same settings"):
        submit(handshakes, HOST, port).result(20)


def test_the_clock_is_right_although_vllms_thread_was_busy() -> None:
    with listening(answers_each(b"rank 0")) as port:
        answers = handshake_executor.ask(HOST, port, [handshake_query(0, 0)])
    answered = time.perf_counter()
    until(lambda: time.perf_counter() > answered + 1.0)
    answers.send(handshake_query(0, 0))
    _, encoded = answers.recv_multipart()
    assert msgspec.msgpack.decode(encoded) - time.perf_counter() == pytest.approx(AHEAD_S, abs=0.5)


def test_all_other_code_of_vllm_gets_a_socket(handshakes: HandshakeExecutor) -> None:
    with listening(answers_each(b"rank 0")) as port:
        submit(handshakes, HOST, port).result(20)
    ours = handshakes._executor.submit(lambda: base_worker.zmq_ctx(zmq.REQ, f"tcp://{HOST}:{port}")).result()
    with ours as one:
        assert isinstance(one, zmq.Socket)


def test_a_missing_rank_reaches_vllm_as_it_came(handshakes: HandshakeExecutor) -> None:
    with listening(sends(answer(b"", b""))) as port, pytest.raises(AssertionError):
        submit(handshakes, HOST, port, ranks=3).result(20)


@pytest.mark.parametrize("encoded", [b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode(float("inf"))])
def test_an_odd_clock_reaches_vllm_as_it_came(encoded: bytes) -> None:
    with listening(sends(answer(b"", b"payload", encoded))) as port:
        answers = handshake_executor.ask(HOST, port, [b"query"])
    answers.send(b"query")
    assert answers.recv_multipart() == [b"payload", encoded]


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        pytest.param(None, "timeout", id="silence"),
        pytest.param(sends(b""), "timeout", id="silence after the greeting"),
        pytest.param(endlessly(b"\0"), "no ZMTP 3 greeting", id="no ZMTP"),
        pytest.param(lambda connection: connection.recv(1) and None, "gave no answer", id="closes at once"),
        pytest.param(sends(b"", then=endlessly(frame(b"", zmtp.MORE))), "more than 16 parts", id="frames for ever"),
        pytest.param(sends(b"", then=endlessly(frame(b"", zmtp.COMMAND))), "timeout", id="commands for ever"),
        pytest.param(sends(b"\x02" + b"\x7f" * 8), "more than the", id="a frame of exabytes"),
    ],
)
def test_a_hostile_side_channel_fails_its_handshake_only(
    handshakes: HandshakeExecutor, monkeypatch: pytest.MonkeyPatch, talk: Any, words: str
) -> None:
    with listening(talk) as hostile, listening(answers_each(b"rank 0")) as good:
        monkeypatch.setattr(handshake_executor, "TIMEOUT_S", 1.0 if words == "timeout" else 20.0)
        failing = submit(handshakes, HOST, hostile, "ghost")
        assert submit(handshakes, HOST, good).result(20)[0] == "D"
        with pytest.raises(HandshakeError, match=words):
            failing.result(20)


def test_a_refused_connection_fails_at_once(handshakes: HandshakeExecutor) -> None:
    with pytest.raises(HandshakeError, match="ConnectionRefusedError"):
        submit(handshakes, HOST, PORTS.next_free()).result(4)


@pytest.mark.parametrize(("share", "words"), [(0.8, "bytes in all answers"), (1.1, "left for the answer")])
def test_an_engine_may_answer_so_many_bytes(handshakes: HandshakeExecutor, share: float, words: str) -> None:
    sent: queue.SimpleQueue[int] = queue.SimpleQueue()

    def flood(connection: socket.socket) -> None:
        connection.sendall(GREETING + READY)
        piece, total = answer(b"", bytes(int(MAX_ANSWER_BYTES * share)), clock()), 0
        try:
            while True:
                total += connection.send(piece)
        except OSError:
            sent.put(total)

    with listening(flood) as port, pytest.raises(HandshakeError, match=words):
        submit(handshakes, HOST, port, ranks=100).result(20)
    in_buffers = 16 << 20
    assert sent.get(timeout=10) < handshake_executor.MAX_ANSWERS_BYTES + in_buffers


def test_an_answer_is_read_once(handshakes: HandshakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading of a long one stops the engine's other threads."""
    read, payload = list[bytes](), msgspec.msgpack.encode({**msgspec.msgpack.decode(REFUSED), "layerpush": True})
    monkeypatch.setattr(handshake_executor, "read_answer", lambda payload: read.append(payload) or read_answer(payload))
    monkeypatch.setattr(handshakes, "_refusal", lambda answer: None)
    with listening(answers_each(payload)) as port:
        speaks = handshakes.submit(lambda *_: handshake_executor.answered_by_layerpush(), HOST, port, 1, "D").result(20)
    assert (speaks, read) == (True, [payload])


def test_a_silent_host_delays_no_other_host(handshakes: HandshakeExecutor, silent: int) -> None:
    waiting = [submit(handshakes, SILENT, silent, f"ghost-{number}") for number in range(30)]
    with listening(answers_each(b"rank 0")) as port:
        assert submit(handshakes, HOST, port).result(20)[0] == "D"
    assert not all(each.done() for each in waiting), "vLLM's thread would have asked these first"


class Asked:
    """Stands in for ``ask``: counts the side channels that are asked at the same time, until ``over`` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._counts = threading.Lock()
        self.now = self.most = 0

    def __call__(self, host: str, port: int, queries: object) -> Answers:
        with self._counts:
            self.now += 1
            self.most = max(self.most, self.now)
        assert self.over.wait(60)
        with self._counts:
            self.now -= 1
        raise HandshakeError("over")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    one = Asked()
    monkeypatch.setattr(handshake_executor, "ask", one)
    yield one
    one.over.set()


def test_threads_that_cannot_start_fail_their_handshakes_only(
    handshakes: HandshakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each hears of it: nobody would ask for those that wait for a place."""
    with listening(answers_each(b"rank 0")) as port:
        with monkeypatch.context() as limited:
            limited.setattr(handshake_executor, "MAX_RUNNING_WITH_HOST", 0)
            waiting = [submit(handshakes, HOST, port) for _ in range(3)]
            limited.setattr(handshake_executor, "MAX_RUNNING_WITH_HOST", 1)
            limited.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            waiting.append(submit(handshakes, HOST, port))
        for each in waiting:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                each.result(0)
        assert submit(handshakes, HOST, port).result(20)[0] == "D"


def test_few_handshakes_with_a_host_run_and_too_many_fail(handshakes: HandshakeExecutor, asked: Asked) -> None:
    limit, few = handshake_executor.MAX_WITH_HOST, handshake_executor.MAX_RUNNING_WITH_HOST
    waiting = [submit(handshakes, SILENT, 1, f"ghost-{number}") for number in range(limit)]
    until(lambda: asked.now == few)
    with pytest.raises(HandshakeError, match=f"{limit} other handshakes with host {SILENT}"):
        submit(handshakes, SILENT, 1, "one too many").result(0)
    asked.over.set()
    for each in waiting:
        with pytest.raises(HandshakeError, match="over"):
            each.result(20)
    with pytest.raises(HandshakeError, match="over"):
        submit(handshakes, SILENT, 1, "there is room again").result(20)
    assert asked.most == few


def test_handshakes_with_all_hosts_are_limited(
    handshakes: HandshakeExecutor, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    monkeypatch.setattr(handshake_executor, "MAX_HANDSHAKES", 6)
    monkeypatch.setattr(handshake_executor, "MAX_RUNNING", 2)
    waiting = [submit(handshakes, f"127.0.1.{number}", 1) for number in range(6)]
    until(lambda: asked.now == 2)
    with pytest.raises(HandshakeError, match="6 other handshakes are under way"):
        submit(handshakes, SILENT, 1).result(0)
    asked.over.set()
    assert all(isinstance(each.exception(20), HandshakeError) for each in waiting)
    assert asked.most == 2


def test_silent_hosts_take_no_places_of_hosts_that_have_answered(
    handshakes: HandshakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many a client names. A host that falls silent itself is one of them."""
    asked, over = list[str](), threading.Event()

    def ask(host: str, port: int, queries: object) -> Answers:
        asked.append(host)
        if host.startswith("127.0.7."):
            assert over.wait(60)
            raise HandshakeError("silence")
        return Answers({}, None)

    monkeypatch.setattr(handshake_executor, "ask", ask)

    def begin(host: str) -> Future[Any]:
        return handshakes.submit(lambda *_: host, host, 1, 1, "D")

    try:
        assert begin(HOST).result(20) == HOST
        silent = [begin(f"127.0.7.{number}") for number in range(handshake_executor.MAX_HANDSHAKES)]
        until(lambda: len(asked) == 1 + handshake_executor.MAX_RUNNING_UNPROVEN)
        for _ in range(handshake_executor.MAX_HANDSHAKES):
            assert begin(HOST).result(20) == HOST
        with pytest.raises(HandshakeError, match=f"{handshake_executor.MAX_UNPROVEN} other handshakes are under way"):
            begin(SILENT).result(0)
        monkeypatch.setattr(handshake_executor, "ask", Mock(side_effect=HandshakeError("gone")))
        assert isinstance(begin(HOST).exception(20), HandshakeError)
        with pytest.raises(HandshakeError, match="other handshakes are under way"):
            begin(HOST).result(0)
    finally:
        over.set()
    assert all(isinstance(each.exception(20), HandshakeError) for each in silent)
