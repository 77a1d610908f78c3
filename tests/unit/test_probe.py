"""A probe comes back in time, leaves nothing open and proves nothing by mistake, for any answer."""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from bench.servers.ports import PortAllocator
from layerpush.compat.engine_threads import EngineThreads
from layerpush.compat.handshake import MAX_ANSWER_BYTES, signed
from layerpush.core.liveness import Verdict
from layerpush.engine.worker import side_channel_probe as probe_module
from layerpush.engine.worker.side_channel_probe import Prober, contact_of, probe
from layerpush.transport import zmtp
from tests.support.ports import PROBE_PORTS
from tests.support.waiting import until

PORTS = PortAllocator(PROBE_PORTS)
HOST = "127.0.0.1"
NAME = "594a7c88-b288-4e20-b390-9eb5cc2d00b7"
OTHER = "0f5f5c5e-9d3d-4a44-a8e7-2a2a3c1cf0aa"
PATIENCE_S = 10.0
TIMEOUT_S = 0.4
SLACK_S = 5.0
GREETING = zmtp.GREETING
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"

Talk = Callable[[socket.socket], None]


@contextmanager
def listening(talk: Talk | None) -> Iterator[int]:
    """A port where ``talk`` serves each connection on a thread of its own; None: nothing accepts connections."""
    listener = socket.create_server((HOST, PORTS.next_free()))
    threads: list[threading.Thread] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
            threads[-1].start()

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                assert talk is not None
                talk(connection)
            except OSError:
                pass  # the probe has gone

    accepting = threading.Thread(target=accept, daemon=True)
    if talk is not None:
        accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        if talk is not None:
            accepting.join()
        for thread in threads:
            thread.join()


def ask(
    port: int, name: str = NAME, host: str = HOST, timeout_s: float = PATIENCE_S, engine_id: str | None = None
) -> Verdict:
    """Probe, and fail unless it comes back in time."""
    started = time.monotonic()
    verdict = probe(host, port, name, 0, timeout_s=timeout_s, engine_id=engine_id)
    assert time.monotonic() - started < timeout_s + SLACK_S
    return verdict


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | zmtp.LONG,)) + struct.pack(">Q", len(body)) + body


def answer(*parts: bytes) -> bytes:
    return b"".join(frame(part, zmtp.MORE) for part in parts[:-1]) + frame(parts[-1])


def metadata(name: str, **changes: Any) -> bytes:
    return msgspec.msgpack.encode(payload(name, **changes))


def payload(name: str, **changes: Any) -> NixlHandshakePayload:
    """A stock engine's answer."""
    agent = {"engine_id": "p", "agent_metadata": b"nixlSerDes|Agent$" + name.encode() + b"|"} | changes
    return NixlHandshakePayload("abc", msgspec.msgpack.encode(agent))


TIME = msgspec.msgpack.encode(123.5)
SIGNED = msgspec.msgpack.encode(signed(payload(NAME), {}))


GOOD = answer(b"", metadata(NAME), TIME)


def sends(data: bytes, *, greeting: bytes = GREETING, then: Talk | None = None) -> Talk:
    """A handshake, then ``data``."""

    def talk(connection: socket.socket) -> None:
        connection.sendall(greeting + READY + data)
        if then is not None:
            then(connection)
        while connection.recv(1 << 16):
            pass

    return talk


def endlessly(data: bytes, pause_s: float = 0.0) -> Talk:
    def talk(connection: socket.socket) -> None:
        while True:
            connection.sendall(data)
            if pause_s:
                time.sleep(pause_s)

    return talk


def test_stock_engines_decode_the_answer_of_a_layerpush_engine() -> None:
    assert msgspec.msgpack.decode(SIGNED, type=NixlHandshakePayload) == payload(NAME)


@pytest.mark.parametrize(("named", "verdict"), [("p", Verdict.REPLACED), ("another", Verdict.ENDED)])
def test_another_process_may_have_the_name_of_the_agents_engine(named: str, verdict: Verdict) -> None:
    with listening(sends(answer(b"", metadata(OTHER), TIME))) as port:
        assert ask(port, engine_id=named) is verdict


def test_a_closed_port_proves_the_end_of_the_agent() -> None:
    assert ask(PORTS.next_free()) is Verdict.ENDED


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        pytest.param(GOOD, Verdict.ALIVE, id="the agent"),
        pytest.param(answer(b"", SIGNED, TIME), Verdict.SPEAKS_LAYERPUSH, id="the agent of a layerpush engine"),
        pytest.param(answer(b"", metadata(OTHER), TIME), Verdict.ENDED, id="another agent"),
        pytest.param(answer(b"", b""), Verdict.ENDED, id="our listener, of a rank that its engine has not got"),
        pytest.param(
            answer(b"", metadata(NAME, region_names=["region"] * 30_000), TIME), Verdict.ALIVE, id="a long answer"
        ),
        pytest.param(frame(b"\x04PING\x00\x00", zmtp.COMMAND) + GOOD, Verdict.ALIVE, id="a command before it"),
    ],
)
def test_the_verdict_follows_the_agent_in_the_answer(said: bytes, verdict: Verdict) -> None:
    with listening(sends(said)) as port:
        assert ask(port) is verdict


@pytest.mark.parametrize(
    "talk",
    [
        pytest.param(None, id="nobody accepts, as in a stopped process"),
        pytest.param(sends(b""), id="silence after the handshake"),
        pytest.param(lambda connection: connection.recv(1) and None, id="closes at once"),
        pytest.param(endlessly(b"HTTP/1.1 400 Bad Request\r\n\r\n"), id="no ZMTP"),
        pytest.param(endlessly(b"\0"), id="zeros for ever"),
        pytest.param(endlessly(b"\xff", 0.05), id="a byte now and then"),
        pytest.param(sends(GOOD, greeting=GREETING.replace(b"NULL", b"PLAI")), id="asks for a password"),
        pytest.param(sends(GOOD, greeting=GREETING.replace(b"\x03", b"\x01", 1)), id="ZMTP 1"),
        pytest.param(sends(GOOD, greeting=b"\xfe" + GREETING[1:]), id="another signature"),
        pytest.param(sends(GOOD, greeting=GREETING[:9] + b"\x7e" + GREETING[10:]), id="half a signature"),
        pytest.param(sends(b"", then=endlessly(frame(b"x" * 60_000, zmtp.MORE))), id="frames for ever"),
        pytest.param(sends(b"", then=endlessly(frame(b"", zmtp.MORE))), id="empty frames for ever"),
        pytest.param(sends(b"", then=endlessly(frame(b"", zmtp.COMMAND))), id="commands for ever"),
        pytest.param(sends(b"\x02" + b"\x7f" * 8 + b"x" * 100), id="a frame of exabytes"),
        pytest.param(sends(b"\x02" + struct.pack(">Q", 7 << 20), then=endlessly(b"x", 0.02)), id="a slow large frame"),
        pytest.param(sends(answer(b"not empty", metadata(NAME), TIME)), id="no empty frame"),
        pytest.param(sends(answer(b"", metadata(NAME))), id="one part"),
        pytest.param(sends(answer(b"", metadata(NAME), TIME, TIME)), id="three parts"),
        pytest.param(sends(answer(b"")), id="no part"),
        pytest.param(sends(answer(b"", b"not empty")), id="one other part"),
        pytest.param(sends(answer(b"", b"\xc1" * 9, TIME)), id="no msgpack"),
        pytest.param(sends(answer(b"", msgspec.msgpack.encode([1, 2]), TIME)), id="no handshake"),
        pytest.param(sends(answer(b"", metadata(OTHER, agent_metadata="text"), TIME)), id="a name in no bytes"),
        pytest.param(sends(answer(b"", metadata(OTHER, engine_id=5), TIME)), id="an engine id that is none"),
        pytest.param(sends(answer(b"", b"\x81\xa1x" + b"\x91" * 100_000, TIME)), id="nested for ever"),
        pytest.param(sends(answer(b"", b"\x81\xa4\xff\xff\xff\xff\x01", TIME)), id="a key that is no UTF-8"),
        pytest.param(sends(GOOD.replace(b"\xa3abc", b"\xa3\xff\xff\xff")), id="a hash that is no UTF-8"),
    ],
)  # fmt: skip
def test_any_other_answer_gives_an_unknown_verdict(talk: Talk | None) -> None:
    with listening(talk) as port:
        assert ask(port, timeout_s=TIMEOUT_S) is Verdict.UNKNOWN


def test_the_probe_reads_at_most_the_largest_answer() -> None:
    sent: queue.SimpleQueue[int] = queue.SimpleQueue()

    def flood(connection: socket.socket) -> None:
        connection.sendall(GREETING + READY + frame(b"", zmtp.MORE))
        piece, total = frame(b"x" * (1 << 20), zmtp.MORE), 0
        try:
            while True:
                total += connection.send(piece)
        except OSError:
            sent.put(total)

    with listening(flood) as port:
        assert ask(port) is Verdict.UNKNOWN
        in_buffers = 16 << 20
        assert sent.get(timeout=10) < MAX_ANSWER_BYTES + in_buffers


@pytest.mark.parametrize("host", ["", "\0", "a..b", "x" * 300, "300.1.1.1.", "[", "-"])
def test_invalid_hosts_give_an_unknown_verdict(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch)
    assert ask(PORTS.next_free(), host=host) is Verdict.UNKNOWN


@pytest.mark.parametrize("port", [0, -1, 1 << 16])
def test_invalid_ports_give_an_unknown_verdict(port: int) -> None:
    assert ask(port) is Verdict.UNKNOWN


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_an_invalid_agent_name_gives_an_unknown_verdict(name: str) -> None:
    with listening(sends(GOOD)) as port:
        assert ask(port, name=name) is Verdict.UNKNOWN


def offline(monkeypatch: pytest.MonkeyPatch, look_up: Callable[[], list[Any]] | None = None) -> None:
    """Numeric addresses work as usual; ``look_up`` resolves names."""
    system = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            return list(system(host, port, *args, **options))
        if look_up is None:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return look_up()

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_a_name_lookup_that_hangs_gives_an_unknown_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang() -> list[Any]:
        over.wait(20)
        return []

    offline(monkeypatch, hang)
    assert ask(PORTS.next_free(), host="p.example", timeout_s=TIMEOUT_S) is Verdict.UNKNOWN
    over.set()


def addresses(*ports: int) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOST, port)) for port in ports]


def test_every_address_of_a_name_must_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = [PORTS.next_free(), PORTS.next_free()]
    offline(monkeypatch, lambda: addresses(*refusing))
    assert ask(1, host="p.example") is Verdict.ENDED
    with listening(None) as silent:
        offline(monkeypatch, lambda: addresses(refusing[0], silent))
        assert ask(1, host="p.example", timeout_s=TIMEOUT_S) is Verdict.UNKNOWN
    with listening(sends(GOOD)) as port:
        offline(monkeypatch, lambda: addresses(refusing[0], port))
        assert ask(1, host="p.example") is Verdict.ALIVE


def test_an_unreachable_address_does_not_count_as_refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("255.255.255.255", 1))
    refusing = PORTS.next_free()
    for found in ([unreachable, *addresses(refusing)], [*addresses(refusing), unreachable]):
        offline(monkeypatch, lambda found=found: found)
        assert ask(1, host="p.example") is Verdict.UNKNOWN


def test_a_probe_leaves_no_file_or_thread_open() -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    hostile_talk = sends(b"\x02" + b"\x7f" * 8)
    signed_talk = sends(answer(b"", SIGNED, TIME))
    with (
        listening(sends(GOOD)) as alive,
        listening(signed_talk) as ours,
        listening(None) as silent,
        listening(hostile_talk) as hostile,
    ):
        refused = PORTS.next_free()
        probe(HOST, alive, NAME, 0)
        before, threads = files(), threading.active_count()
        verdicts = set()
        for _ in range(60):
            verdicts.add(probe(HOST, alive, NAME, 0))
            verdicts.add(probe(HOST, ours, NAME, 0))
            verdicts.add(probe(HOST, ours, OTHER, 0, engine_id="p"))
            verdicts.add(probe(HOST, refused, NAME, 0))
            verdicts.add(probe(HOST, hostile, NAME, 0))
            verdicts.add(probe(HOST, silent, NAME, 0, timeout_s=0.01))
        assert verdicts == set(Verdict)
        until(lambda: threading.active_count() <= threads)  # the servers' threads end with their connections
        until(lambda: files() <= before)


@pytest.fixture
def prober() -> Iterator[Prober]:
    one = Prober(EngineThreads())
    yield one
    one.close()
    until(lambda: not probing())


def probing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "layerpush-probe"]


def test_verdicts_come_on_the_probers_thread(prober: Prober) -> None:
    assert probing() == []
    verdicts: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def hear(key: int, verdict: Verdict) -> None:
        verdicts.put((key, verdict, threading.current_thread().name))

    for key in range(3):
        prober.start(HOST, PORTS.next_free(), NAME, 0, partial(hear, key))
    assert [verdicts.get(timeout=10) for _ in range(3)] == [(key, Verdict.ENDED, "layerpush-probe") for key in range(3)]
    (thread,) = probing()
    assert thread.daemon


class HeldProbe:
    """Probes wait until ``let`` is called; then each finds that the agent has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._let, self._probing = threading.Event(), threading.Event()
        self.verdicts: list[tuple[int, Verdict]] = []
        self.let = self._let.set
        monkeypatch.setattr(probe_module, "probe", self._probe)

    def _probe(self, *_: Any, **__: Any) -> Verdict:
        self._probing.set()
        self._let.wait(20)
        return Verdict.ENDED

    def _hear(self, key: int, verdict: Verdict) -> None:
        self.verdicts.append((key, verdict))

    def start(self, prober: Prober, *keys: int) -> None:
        """Returns when one of these probes runs."""
        for key in keys:
            prober.start(HOST, 1, NAME, 0, partial(self._hear, key))
        assert self._probing.wait(10)


def test_a_probe_beyond_the_queue_limit_gets_its_verdict_at_once(
    prober: Prober, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldProbe(monkeypatch)
    held.start(prober, -1)
    held.start(prober, *range(probe_module.MAX_PENDING + 1))
    assert held.verdicts == [(probe_module.MAX_PENDING, Verdict.UNKNOWN)]
    held.let()
    until(lambda: len(held.verdicts) == probe_module.MAX_PENDING + 2)


def test_a_defect_costs_one_verdict_only(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ZeroDivisionError(), Verdict.ALIVE])

    def answered(*_: Any, **__: Any) -> Verdict:
        one = next(answers)
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(probe_module, "probe", answered)
    verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    for _ in range(2):
        prober.start(HOST, 1, NAME, 0, verdicts.put)
    assert [verdicts.get(timeout=10) for _ in range(2)] == [Verdict.UNKNOWN, Verdict.ALIVE]


def test_a_thread_that_cannot_start_costs_one_verdict_only(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: queue.SimpleQueue[Verdict] = queue.SimpleQueue()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        prober.start(HOST, PORTS.next_free(), NAME, 0, verdicts.put)
        prober.search(HOST, PORTS.next_free(), 0, lambda _: None)
    prober.start(HOST, PORTS.next_free(), NAME, 0, verdicts.put)
    assert [verdicts.get(timeout=10) for _ in range(2)] == [Verdict.UNKNOWN, Verdict.ENDED]


def test_a_closed_prober_starts_and_reports_nothing() -> None:
    prober, verdicts = Prober(EngineThreads()), []
    prober.close()
    for _ in range(probe_module.MAX_PENDING + 2):
        prober.start(HOST, 1, NAME, 0, verdicts.append)
    assert probing() == []
    assert verdicts == []


def test_close_drops_waiting_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    held, prober = HeldProbe(monkeypatch), Prober(EngineThreads())
    held.start(prober, *range(5))
    prober.close()
    held.let()
    until(lambda: not probing())
    assert [key for key, _ in held.verdicts] == [0]


def test_a_contact_is_nixls_description_of_the_agent() -> None:
    with listening(sends(GOOD)) as port:
        assert contact_of(HOST, port, 0) == b"nixlSerDes|Agent$" + NAME.encode() + b"|"
    with listening(sends(answer(b"", b""))) as port:
        assert contact_of(HOST, port, 0) is None
    assert contact_of(HOST, PORTS.next_free(), 0) is None


def test_a_search_ends_with_the_contact_or_with_nothing(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    found: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with listening(sends(GOOD)) as port:
        prober.search(HOST, PORTS.next_free(), 0, found.put)
        prober.search(HOST, port, 0, found.put)
        assert found.get(timeout=PATIENCE_S).endswith(NAME.encode() + b"|")
    assert found.empty()


def test_searches_leave_room_for_probes(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldProbe(monkeypatch)
    held.start(prober, 0)
    for _ in range(2 * probe_module.MAX_SEARCHING):
        prober.search(HOST, PORTS.next_free(), 0, lambda _: None)
    assert prober._jobs.qsize() == probe_module.MAX_SEARCHING
    held.let()


def test_a_probe_does_not_wait_for_queued_searches(prober: Prober, monkeypatch: pytest.MonkeyPatch) -> None:
    held, done = HeldProbe(monkeypatch), list[object]()
    monkeypatch.setattr(probe_module, "contact_of", lambda *_: b"contact")
    held.start(prober, 0)
    for _ in range(2):
        prober.search(HOST, 1, 0, done.append)
    for _ in range(2):
        prober.start(HOST, 1, NAME, 0, done.append)
    held.let()
    until(lambda: len(done) == 4)
    assert done == [Verdict.ENDED, Verdict.ENDED, b"contact", b"contact"]
