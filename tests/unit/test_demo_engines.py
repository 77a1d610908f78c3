"""Servers as child processes: ready, dead, and above all gone. The servers here are small scripts, not vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.servers import engines, forkclient, forkserver
from bench.servers.engines import EngineFailedError, EngineGroup, EngineSpec, ServerPlace
from bench.servers.interrupts import Interrupted, Interrupts
from bench.servers.ports import PortAllocator
from bench.servers.processes import is_running
from tests.support.ports import ALLOCATOR_PORTS
from tests.support.waiting import until

# A server with a child that ignores SIGTERM, like a worker stuck in native code.
SERVER = """
import http.server, subprocess, sys
stubborn = '''import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("stubborn", flush=True)
while True:
    signal.pause()
'''
subprocess.Popen([sys.executable, "-c", stubborn])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


IDLE = "import signal; signal.pause()"


class ScriptSpec(EngineSpec):
    """Runs ``options[0]`` as Python source instead of vLLM."""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", self.options[0], str(port)]


def script(source: str = SERVER, name: str = "scripted") -> ScriptSpec:
    return ScriptSpec(name=name, role="plain", model=Path("none"), options=(source,))


@contextlib.contextmanager
def servers(folder: Path, **options: Any) -> Iterator[EngineGroup]:
    with Interrupts() as interrupts, EngineGroup(folder, interrupts, **options) as group:
        yield group


def is_free(port: int) -> bool:
    """Whether nothing listens at ``port``."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_leaving_the_group_ends_even_a_child_that_ignores_sigterm(tmp_path: Path):
    ready = []
    with servers(tmp_path, stop_timeout_s=0.5) as group:
        engine = group.start(script())
        group.wait_ready([engine], lambda engine, seconds: ready.append((engine.name, seconds)))
        until(lambda: "stubborn" in engine.log_path.read_text(), "its child runs", pause_s=0.02)
        members = engine.members()
        assert len(members) == 2
        assert not is_free(engine.port)
    assert [name for name, _ in ready] == ["scripted"]
    assert not any(is_running(pid) for pid in members)
    assert is_free(engine.port)


def test_a_suspended_server_still_receives_sigterm(tmp_path: Path):
    says_bye = (
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit('bye'))\nprint('up', flush=True)\n"
    )
    with servers(tmp_path) as group:
        engine = group.start(script(says_bye + "signal.pause()"))
        until(lambda: "up" in engine.log_path.read_text(), "it runs", pause_s=0.02)
        engine.signal(signal.SIGSTOP)
    assert "bye" in engine.log_path.read_text()


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path):
    source = "print('first'); print('the reason'); raise SystemExit(7)"
    with servers(tmp_path) as group:
        engine = group.start(script(source))
        with pytest.raises(EngineFailedError, match="scripted ended with status 7") as caught:
            group.wait_ready([engine])
    assert "the reason" in str(caught.value)
    assert str(engine.log_path) in str(caught.value)


def test_a_server_that_is_never_ready_is_reported(tmp_path: Path):
    with servers(tmp_path) as group:
        engine = group.start(script(IDLE))
        with pytest.raises(EngineFailedError, match="not ready"):
            group.wait_ready([engine], timeout_s=0.5)
    assert engine.members() == []


WITHOUT_FIRST_THREAD = """
import ctypes, http.server, sys, threading
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.BaseHTTPRequestHandler)
threading.Thread(target=server.serve_forever).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_server_is_alive_until_its_last_thread_has_ended(tmp_path: Path):
    """A killed engine's first thread may end long before those of its libraries, which still hold its port."""
    with servers(tmp_path) as group:
        engine = group.start(script(WITHOUT_FIRST_THREAD))
        until(lambda: "up" in engine.log_path.read_text(), "it runs", pause_s=0.02)
        stat = Path(f"/proc/{engine.group}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "its first thread has ended")
        assert not is_free(engine.port)
        assert engine.members() == [engine.group]
    assert engine.members() == []
    assert is_free(engine.port)


RUN = """
import signal, sys
from pathlib import Path
from bench.servers.engines import EngineGroup
from bench.servers.interrupts import Interrupted, Interrupts
from tests.unit.test_demo_engines import script
try:
    with Interrupts() as interrupts, EngineGroup(Path(sys.argv[1]), interrupts, stop_timeout_s=1) as group:
        engine = group.start(script())
        group.wait_ready([engine])
        print(engine.port, *engine.members(), flush=True)
        signal.pause()
except Interrupted as interrupted:
    sys.exit(interrupted.exit_status)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_and_a_second_one_leave_no_process_and_no_open_port(tmp_path: Path, signum: signal.Signals):
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        port, *members = (int(word) for word in process.stdout.readline().split())
        assert members
        process.send_signal(signum)
        until(lambda: not is_running(members[0]), "the server goes first, its stubborn child later", pause_s=0.02)
        process.send_signal(signum)
        assert process.wait(timeout=30) == 128 + signum
        assert not any(is_running(pid) for pid in members)
        assert is_free(port)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_shielded_signal_waits_for_the_end_of_the_block():
    reached = []

    def interrupted_block(interrupts: Interrupts) -> None:
        with interrupts.shield():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end")

    with Interrupts() as interrupts, pytest.raises(Interrupted) as caught:
        interrupted_block(interrupts)
    assert reached == ["the end"]
    assert caught.value.exit_status == 130


def test_ports_are_handed_out_once_and_only_when_free():
    wanted = [port for port in ALLOCATOR_PORTS if is_free(port)]
    with socket.create_server(("127.0.0.1", wanted[0])):
        ports = PortAllocator(wanted)
        taken = [ports.next_free() for _ in wanted[1:]]
        assert sorted(taken) == wanted[1:]
        for exhausted in (ports, PortAllocator(wanted)):
            with pytest.raises(RuntimeError, match="no free TCP port"):
                exhausted.next_free()


def test_a_server_is_not_ready_if_another_one_answers_on_its_port(tmp_path: Path) -> None:
    with servers(tmp_path, stop_timeout_s=0.5) as group:
        other, engine = group.start(script()), group.start(script(IDLE, "idle"))
        group.wait_ready([other])
        engine.port = other.port
        assert not engine.is_ready()
        assert other.is_ready()


def test_a_server_is_ready_though_it_closes_the_last_connection_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.readlink

    def readlink(path: Path) -> str:
        if path.name == "0":
            raise FileNotFoundError("closed meanwhile")
        return read(path)

    with servers(tmp_path, stop_timeout_s=0.5) as group:
        engine = group.start(script())
        group.wait_ready([engine])
        monkeypatch.setattr(engines.os, "readlink", readlink)
        assert engine.is_ready()


def test_the_command_names_the_connector_and_its_module():
    spec = EngineSpec(
        "p", "prefill", Path("m"), connector="C", connector_module="a.b", extra_config={"layerwise": False},
        recomputes=True,
    )  # fmt: skip
    config = spec.transfer_config()
    assert config == {
        "kv_connector": "C",
        "kv_connector_module_path": "a.b",
        "kv_load_failure_policy": "recompute",
        "kv_role": "kv_producer",
        "engine_id": "p",
        "kv_connector_extra_config": {"layerwise": False},
    }
    assert EngineSpec("r", "plain", Path("m")).transfer_config() is None


def test_a_client_that_ends_in_the_middle_of_its_request_ends_its_keeper():
    here, there = socket.socketpair()
    with here:
        with there:
            there.sendall(forkclient.request(["--port", "1"])[:-1])
        with pytest.raises(EOFError, match="in the middle of its request"):
            forkserver._receive(here)


def test_a_server_that_survives_does_not_keep_the_fork_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(_: object) -> None:
        raise RuntimeError("processes survived SIGKILL")

    group = EngineGroup(tmp_path, Interrupts(), forks=True)
    group.preload(ServerPlace(command_prefix=("sleep", "60")))
    (fork_server,) = group._fork_servers.values()
    monkeypatch.setattr(group, "stop", fails)
    with pytest.raises(RuntimeError, match="survived"):
        group.__exit__(None)
    assert not is_running(fork_server._process.pid)


def test_a_failed_fork_server_is_reported_with_its_log(tmp_path: Path):
    place = ServerPlace(command_prefix=("sh", "-c", "echo no vLLM here; exit 3"))
    with servers(tmp_path, forks=True) as group:
        group.preload(place)
        with pytest.raises(EngineFailedError, match=r"fork server ended with status 3.\nno vLLM here"):
            group.start(EngineSpec("p", "prefill", Path("m"), place=place))
