"""LockedAgent and NixlTransport over agents that are easier to provoke than NIXL's."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from layerpush.transport.base import PeerLostError, Route, TransportError, WriteState
from layerpush.transport.locked import LockedAgent
from layerpush.transport.nixl import NixlTransport

ROUTE = Route("D", 0, "local", "remote")
IDS = np.zeros(1, np.int32)


class nixlBackendError(Exception):
    pass


class nixlRemoteDisconnectError(Exception):
    pass


nixlBind = SimpleNamespace(nixlBackendError=nixlBackendError, nixlRemoteDisconnectError=nixlRemoteDisconnectError)


class CrowdedAgent:
    """Notices two threads inside it."""

    name = "P"

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.met = threading.Event()

    def enter(self, patience: float = 0.02) -> str:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.inside > 1:
            self.met.set()
        self.met.wait(patience)  # gives another thread the time to come in
        self.inside -= 1
        return self.name

    def leave(self) -> str:
        return self.enter()


@pytest.mark.parametrize("lock", [True, False])
def test_one_thread_at_a_time(lock: bool) -> None:
    crowded = CrowdedAgent()
    agent = LockedAgent(crowded) if lock else crowded
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(agent.enter if i % 2 else agent.leave) for i in range(8)]
    assert {call.result() for call in calls} == {"P"}
    assert (crowded.most == 1) is lock  # without the lock the same calls do meet


def test_the_rest_of_the_agent_shows_through() -> None:
    crowded = CrowdedAgent()
    agent = LockedAgent(crowded)
    assert agent.name == "P"
    crowded.name = "renamed"
    assert agent.name == "renamed"
    assert agent.unlocked is crowded
    assert not hasattr(agent, "missing")


def test_an_error_leaves_the_lock_open() -> None:
    agent = LockedAgent(CrowdedAgent())
    with pytest.raises(TypeError):
        agent.enter("patience", "and more")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(agent.enter, 0.0).result(5) == "P"


class ScriptedAgent:
    """A NIXL agent whose steps fail as told."""

    def __init__(self, **failures: Exception | str) -> None:
        self.failures = failures
        self.released: list[object] = []

    def _step(self, step: str, result: object) -> object:
        failure = self.failures.get(step, result)
        if isinstance(failure, Exception):
            raise failure
        return failure

    def make_prepped_xfer(self, *arguments: object, **options: object) -> object:
        assert not options.get("notif_msg")
        return self._step("make", "handle")

    def transfer(self, handle: object) -> object:
        return self._step("transfer", "PROC")

    def check_xfer_state(self, handle: object) -> object:
        return self._step("check", "DONE")

    def release_xfer_handle(self, handle: object) -> None:
        self._step("release", None)
        self.released.append(handle)

    def send_notif(self, agent: str, payload: bytes) -> None:
        self._step("send", None)

    def get_new_notifs(self) -> object:
        return self._step("get", {})


@pytest.mark.parametrize("locked", [True, False])
def test_calls_translate_errors(locked: bool) -> None:
    def transport(**failures: Exception | str) -> NixlTransport:
        agent = ScriptedAgent(**failures)
        return NixlTransport(LockedAgent(agent) if locked else agent)

    for error, kind in ((nixlBackendError("BAD"), TransportError), (nixlRemoteDisconnectError("GONE"), PeerLostError)):
        for step in ("make", "transfer"):
            with pytest.raises(TransportError, match=str(error)) as failure:
                transport(**{step: error}).post_write(ROUTE, IDS, IDS)
            assert type(failure.value) is kind
            assert failure.value.__cause__ is error
        with pytest.raises(TransportError) as failure:
            transport(send=error).notify("D", b"")
        assert type(failure.value) is kind
        with pytest.raises(TransportError) as failure:
            transport(get=error).notifications()
        assert type(failure.value) is kind


@pytest.mark.parametrize("failure", [nixlBackendError("BAD"), nixlRemoteDisconnectError("GONE"), "ERR"])
def test_a_failed_post_gives_its_handle_back(failure: Exception | str) -> None:
    agent = ScriptedAgent(transfer=failure)
    with pytest.raises(TransportError):
        NixlTransport(agent).post_write(ROUTE, IDS, IDS)
    assert agent.released == ["handle"]


def test_a_failed_post_reports_itself_even_if_the_handle_stays() -> None:
    agent = ScriptedAgent(transfer=nixlRemoteDisconnectError("GONE"), release=nixlBackendError("BUSY"))
    with pytest.raises(PeerLostError, match="GONE"):
        NixlTransport(agent).post_write(ROUTE, IDS, IDS)


def test_states_of_a_write() -> None:
    agent = ScriptedAgent()
    transport = NixlTransport(agent)
    handle = transport.post_write(ROUTE, IDS, IDS)
    for failure, state in {"PROC": WriteState.PENDING, "DONE": WriteState.LANDED, "ERR": WriteState.FAILED}.items():
        agent.failures = {"check": failure}
        assert transport.poll(handle) is state
    agent.failures = {"check": nixlBackendError("BAD")}
    assert transport.poll(handle) is WriteState.FAILED
    agent.failures = {"check": nixlRemoteDisconnectError("GONE")}
    with pytest.raises(PeerLostError):
        transport.poll(handle)


def test_a_handle_that_nixl_keeps_can_be_released_later() -> None:
    agent = ScriptedAgent(release=nixlBackendError("BUSY"))
    transport = NixlTransport(agent)
    handle = transport.post_write(ROUTE, IDS, IDS)
    with pytest.raises(TransportError, match="BUSY"):
        transport.release(handle)
    assert transport.poll(handle) is WriteState.LANDED

    agent.failures = {}
    transport.release(handle)
    assert agent.released == ["handle"]
    with pytest.raises(TransportError, match="released"):
        transport.poll(handle)


def test_only_nixl_agents() -> None:
    with pytest.raises(TypeError, match="not a NIXL agent"):
        NixlTransport(object())


def test_importing_the_transport_does_not_import_nixl() -> None:
    import subprocess

    code = "import sys, layerpush.transport.nixl; sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
