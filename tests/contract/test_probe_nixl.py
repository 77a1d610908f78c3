"""The probe of real agents behind real side channels: a stock engine's and ours."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.servers.ports import PortAllocator
from layerpush.core.liveness import Verdict
from layerpush.engine.worker.side_channel_probe import probe
from tests.contract import sidechannel
from tests.contract.sidechannel import agent, handshake, listener
from tests.e2e.enginehost import fork_server
from tests.support.ports import NIXL_PROBE_PORTS
from tests.support.waiting import until

PORTS = PortAllocator(NIXL_PROBE_PORTS)
HOST = "127.0.0.1"

Serve = Callable[[bytes], int]


@pytest.fixture(scope="module")
def ours() -> tuple[str, bytes]:
    """An agent's name and metadata."""
    name = str(uuid.uuid4())
    return name, agent(name).get_agent_metadata()


@pytest.fixture(params=["vllm", "layerpush"])
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    stop, threads = threading.Event(), []

    def start(agent_metadata: bytes) -> int:
        port, ready = PORTS.next_free(), threading.Event()
        answers = {(0, 0): handshake(agent_metadata), (1, 3): handshake(agent(str(uuid.uuid4())).get_agent_metadata())}
        threads.append(
            threading.Thread(target=listener(request.param), args=(answers, ready, stop, HOST, port), daemon=True)
        )
        threads[-1].start()
        assert ready.wait(20)
        return port

    yield start
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_an_agents_metadata_has_its_name_in_it(ours: tuple[str, bytes]) -> None:
    """The probe relies on this."""
    name, metadata = ours
    assert metadata.count(name.encode()) == 1
    assert str(uuid.uuid4()).encode() not in metadata


def test_the_side_channel_answers_for_its_own_agents_only(serve: Serve, ours: tuple[str, bytes]) -> None:
    name, metadata = ours
    port = serve(metadata)
    assert probe(HOST, port, name, 0) is Verdict.ALIVE
    assert probe(HOST, port, str(uuid.uuid4()), 0) is Verdict.ENDED
    assert probe(HOST, port, name, 3, 1) is Verdict.ENDED, "another rank's agent"
    assert probe(HOST, port, name, 0) is Verdict.ALIVE


@pytest.mark.slow
def test_verdicts_about_a_stopped_a_continued_and_a_dead_process() -> None:
    ports = {"vllm": PORTS.next_free(), "layerpush": PORTS.next_free()}
    pipe, theirs = fork_server().Pipe()
    process = fork_server().Process(target=sidechannel.serve, args=(theirs, *ports.values()), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        name = pipe.recv()

        def verdicts(timeout_s: float = 10.0) -> dict[str, Verdict]:
            return {whose: probe(HOST, port, name, 0, timeout_s=timeout_s) for whose, port in ports.items()}

        assert verdicts() == dict.fromkeys(ports, Verdict.ALIVE)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: stopped(process.pid))
        assert verdicts(0.5) == dict.fromkeys(ports, Verdict.UNKNOWN)
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: verdicts() == dict.fromkeys(ports, Verdict.ALIVE))

        process.kill()
        process.join(20)
        assert verdicts() == dict.fromkeys(ports, Verdict.ENDED)
    finally:
        process.kill()
        process.join(20)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_bad_query_crashes_stock_vllms_side_channel(ours: tuple[str, bytes]) -> None:
    """So a refused connection alone proves no death: the process lives on, and may write."""
    import msgspec
    import zmq

    _, metadata = ours
    port, ready, stop = PORTS.next_free(), threading.Event(), threading.Event()
    crashed: list[object] = []

    def run() -> None:
        try:
            listener("vllm")({(0, 0): handshake(metadata)}, ready, stop, HOST, port)
        except KeyError as error:
            crashed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(20)
    with zmq.Context() as context, context.socket(zmq.REQ) as bad:
        bad.setsockopt(zmq.LINGER, 0)
        bad.connect(f"tcp://{HOST}:{port}")
        bad.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 7)))
        thread.join(20)
    assert crashed
    assert probe(HOST, port, ours[0], 0) is Verdict.ENDED
