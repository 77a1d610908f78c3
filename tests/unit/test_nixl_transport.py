"""LockedAgent and NixlTransport over agents that are easier to provoke than NIXL's."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layerpush.core.wire import Acknowledged, Landed, encode
from layerpush.transport.acknowledged import AcknowledgedTransport
from layerpush.transport.base import PeerLostError, Route, TransportError, WriteHandle, WriteState
from layerpush.transport.locked import LockedAgent
from layerpush.transport.nixl import CONFIRM_RETRY_S, SPLIT_AT, NixlTransport, NotedPost

ROUTE = Route("D", 0, "local", "remote")
IDS = np.zeros(1, np.int32)


class nixlBackendError(Exception):
    pass


class nixlRemoteDisconnectError(Exception):
    pass


nixlBind = SimpleNamespace(
    nixlBackendError=nixlBackendError,
    nixlRemoteDisconnectError=nixlRemoteDisconnectError,
    nixlRegDList=list[Any],
    DRAM_SEG=(),
)


class AgentWithoutAddress:
    def get_partial_agent_metadata(self, *_: object, inc_conn_info: bool) -> bytes:
        raise nixlBackendError("the backend has no connection data")


def test_an_agent_without_an_address_is_an_error() -> None:
    with pytest.raises(TransportError, match="the agent has no address: the backend has no connection data"):
        NixlTransport(AgentWithoutAddress()).contact()


class CrowdedAgent:
    """Counts the threads inside it."""

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
def test_the_locked_agent_admits_one_thread_at_a_time(lock: bool) -> None:
    crowded = CrowdedAgent()
    agent = LockedAgent(crowded) if lock else crowded
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(agent.enter if i % 2 else agent.leave) for i in range(8)]
    assert {call.result() for call in calls} == {"P"}
    assert (crowded.most == 1) is lock  # without the lock the same calls do meet


def test_the_locked_agent_forwards_other_attributes() -> None:
    crowded = CrowdedAgent()
    agent = LockedAgent(crowded)
    assert agent.name == "P"
    crowded.name = "renamed"
    assert agent.name == "renamed"
    assert agent.unlocked is crowded
    assert not hasattr(agent, "missing")


def test_postponed_calls_are_made_later() -> None:
    scripted = ScriptedAgent()
    agent = LockedAgent(scripted)
    with agent.postponed("release_xfer_handle") as calls:
        agent.release_xfer_handle(7)
    assert scripted.released == []
    agent.release_xfer_handle(8)
    for call in calls:
        call()
    assert scripted.released == [8, 7]


def test_an_error_releases_the_lock() -> None:
    agent = LockedAgent(CrowdedAgent())
    with pytest.raises(TypeError):
        agent.enter("patience", "and more")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(agent.enter, 0.0).result(5) == "P"


class ScriptedAgent:
    """A NIXL agent with scripted failures: all steps of a kind (``transfer``), or one handle's (``transfer 1``).

    A handle is the number of WRITEs that were prepared before it.
    """

    def __init__(self, **failures: Exception | str) -> None:
        self.failures = failures
        self.prepared: list[tuple[object, list[int], object, list[int]]] = []
        self.attached: list[bytes] = []
        """The WRITEs' own notifications."""
        self.posted: list[int] = []
        self.released: list[int] = []

    def _step(self, step: str, handle: int | None, result: object) -> object:
        failure = self.failures.get(f"{step} {handle}", self.failures.get(step, result))
        if isinstance(failure, Exception):
            raise failure
        return failure

    def make_prepped_xfer(
        self, operation: str, local: object, ours: Sequence[int], remote: object, theirs: Sequence[int], **options: Any
    ) -> object:
        assert operation == "WRITE"
        self.attached.append(options.get("notif_msg", b""))
        handle = len(self.prepared)
        self._step("make", handle, None)
        self.prepared.append((local, list(ours), remote, list(theirs)))
        return handle

    def transfer(self, handle: int) -> object:
        assert handle not in self.posted
        self.posted.append(handle)
        return self._step("transfer", handle, "PROC")

    def check_xfer_state(self, handle: int) -> object:
        assert handle in self.posted
        assert handle not in self.released
        return self._step("check", handle, "DONE")

    def release_xfer_handle(self, handle: int) -> None:
        self._step("release", handle, None)
        assert handle not in self.released
        self.released.append(handle)

    def send_notif(self, agent: str, payload: bytes) -> None:
        self._step("send", None, None)

    def get_new_notifs(self) -> object:
        return self._step("get", None, {})


@pytest.mark.parametrize("locked", [True, False])
def test_calls_translate_errors(locked: bool) -> None:
    def transport(**failures: Exception | str) -> NixlTransport:
        agent = ScriptedAgent(**failures)
        return NixlTransport(LockedAgent(agent) if locked else agent)

    for error, kind in ((nixlBackendError("BAD"), TransportError), (nixlRemoteDisconnectError("GONE"), PeerLostError)):
        with pytest.raises(TransportError, match=str(error)) as failure:
            transport(make=error).post_write(ROUTE, IDS, IDS)
        assert type(failure.value) is kind
        assert failure.value.__cause__ is error
        with pytest.raises(TransportError) as failure:
            transport(send=error).notify("D", b"")
        assert type(failure.value) is kind
        with pytest.raises(TransportError) as failure:
            transport(get=error).notifications()
        assert type(failure.value) is kind


def test_a_post_with_a_disconnect_releases_its_handle() -> None:
    agent = ScriptedAgent(transfer=nixlRemoteDisconnectError("GONE"))
    with pytest.raises(PeerLostError, match="cannot post a WRITE to D: GONE"):
        NixlTransport(agent).post_write(ROUTE, IDS, IDS)
    assert agent.released == [0]


def test_a_failed_post_is_reported_even_if_the_release_fails() -> None:
    agent = ScriptedAgent(transfer=nixlRemoteDisconnectError("GONE"), release=nixlBackendError("BUSY"))
    with pytest.raises(PeerLostError, match="GONE"):
        NixlTransport(agent).post_write(ROUTE, IDS, IDS)


def test_a_write_carries_the_notification_that_it_is_given() -> None:
    agent = ScriptedAgent()
    transport = NixlTransport(agent)
    for notification in (b"", b"landed"):
        transport.post_write(ROUTE, IDS, IDS, notification)
    assert agent.attached == [b"", b"landed"]


def test_states_of_a_write() -> None:
    agent = ScriptedAgent()
    transport = NixlTransport(agent)
    handle = transport.post_write(ROUTE, IDS, IDS)
    for said, state in {"PROC": WriteState.PENDING, "DONE": WriteState.LANDED}.items():
        agent.failures = {"check": said}
        assert transport.poll(handle) is state
    agent.failures = {"check": nixlRemoteDisconnectError("GONE")}
    with pytest.raises(PeerLostError):
        transport.poll(handle)
    assert len(agent.prepared) == 1


# A WRITE that failed is not over before a confirmation has landed: NIXL posts descriptor by descriptor.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=5.0)
    monkeypatch.setattr("layerpush.transport.nixl.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


OURS, THEIRS = np.arange(7, 11, dtype=np.int32), np.arange(20, 24, dtype=np.int32)
TEARS: dict[str, dict[str, Exception | str]] = {
    "the post raises": {"transfer 0": nixlBackendError("BAD")},
    "the post raises what is not NIXL's": {"transfer 0": RuntimeError("BAD")},
    "the post says so": {"transfer 0": "ERR"},
    "a check raises": {"check 0": nixlBackendError("BAD")},
    "a check says so": {"check 0": "ERR"},
    "a check says what we do not know": {"check 0": "WHO KNOWS"},
}


def failing(
    agent: ScriptedAgent, tear: str = "a check says so", script: Mapping[str, Exception | str] | None = None
) -> NixlTransport:
    """The transport of an agent whose first WRITE fails. The second one, its confirmation, waits unless scripted."""
    agent.failures = {"check 1": "PROC", **TEARS[tear], **(script or {})}
    return NixlTransport(agent)


def over(transport: NixlTransport, handle: WriteHandle) -> str:
    """The error of a failed WRITE that is over."""
    with pytest.raises(TransportError) as failure:
        transport.poll(handle)
    assert type(failure.value) is TransportError
    return str(failure.value)


@pytest.mark.parametrize("tear", TEARS)
def test_a_failed_write_is_over_after_its_confirmation_has_landed(tear: str, clock: SimpleNamespace) -> None:
    agent = ScriptedAgent()
    transport = failing(agent, tear)
    ours, theirs = OURS.copy(), THEIRS.copy()
    handle = transport.post_write(ROUTE, ours, theirs)
    ours[:] = theirs[:] = 99  # the caller may change them
    for _ in range(3):
        assert transport.poll(handle) is WriteState.PENDING
        clock.now += CONFIRM_RETRY_S
    assert agent.prepared == [("local", [7, 8, 9, 10], "remote", [20, 21, 22, 23]), ("local", [7], "remote", [20])]
    assert agent.released == []

    agent.failures["check 1"] = "DONE"
    reason = over(transport, handle)
    assert ("BAD" in reason) == ("raises" in tear)
    assert ("cannot post a WRITE to D" in reason) == ("post" in tear)
    assert agent.released == [1]
    transport.release(handle)
    assert agent.released == [1, 0]


@pytest.mark.parametrize(
    ("confirmation", "prepared"),
    [
        ({"make 1": nixlBackendError("NO")}, False),
        ({"transfer 1": nixlBackendError("NO")}, True),
        ({"transfer 1": "ERR"}, True),
        ({"check 1": "ERR"}, True),
        ({"check 1": nixlBackendError("NO")}, True),
    ],
    ids=["not prepared", "the post raises", "the post says so", "it ends in an error", "its check raises"],
)
def test_a_failed_confirmation_is_retried_after_a_pause(
    confirmation: dict[str, Exception | str], prepared: bool, clock: SimpleNamespace
) -> None:
    agent = ScriptedAgent()
    transport = failing(agent, script=confirmation)
    handle = transport.post_write(ROUTE, OURS, THEIRS)
    for _ in range(4):
        assert transport.poll(handle) is WriteState.PENDING
        clock.now += CONFIRM_RETRY_S / 8
    assert len(agent.prepared) == 1 + prepared
    assert agent.released == [1] * prepared, "a failed confirmation is released at once"
    agent.failures = {"check 0": "ERR"}
    clock.now += CONFIRM_RETRY_S / 4
    assert transport.poll(handle) is WriteState.PENDING
    assert len(agent.prepared) == 1 + prepared, "too early"
    clock.now += CONFIRM_RETRY_S / 2
    assert transport.poll(handle) is WriteState.PENDING
    assert agent.prepared[-1] == ("local", [7], "remote", [20])
    assert len(agent.prepared) == 2 + prepared
    assert "a WRITE ended in an error" in over(transport, handle)


@pytest.mark.parametrize("step", ["make 1", "transfer 1", "check 1"])
def test_a_confirmation_with_a_disconnect_ends_the_write(step: str, clock: SimpleNamespace) -> None:
    agent = ScriptedAgent()
    transport = failing(agent, script={step: nixlRemoteDisconnectError("GONE")})
    handle = transport.post_write(ROUTE, OURS, THEIRS)
    assert step != "check 1" or transport.poll(handle) is WriteState.PENDING
    with pytest.raises(PeerLostError, match="GONE"):
        transport.poll(handle)
    transport.release(handle)
    assert sorted(agent.released) == list(range(len(agent.prepared)))


@pytest.mark.parametrize(
    ("split_at", "count", "confirmed"),
    [
        (None, SPLIT_AT - 1, True),
        (None, SPLIT_AT, False),
        (4, 3, True),
        (4, 4, False),
        (math.inf, 3 * SPLIT_AT, True),
    ],
)
def test_no_confirmation_covers_a_write_over_several_endpoints(
    split_at: float | None, count: int, confirmed: bool, clock: SimpleNamespace
) -> None:
    """A confirmation goes by one endpoint only, so such a WRITE ends with its peer."""
    agent = ScriptedAgent(**{"check 0": "ERR"})
    transport = NixlTransport(agent) if split_at is None else NixlTransport(agent, split_at)
    ids = np.arange(count, dtype=np.int32)
    handle = transport.post_write(ROUTE, ids, ids)
    assert transport.poll(handle) is WriteState.PENDING
    if confirmed:
        assert over(transport, handle)
        return
    for _ in range(20):
        assert transport.poll(handle) is WriteState.PENDING
        clock.now += CONFIRM_RETRY_S / 2
    assert 5 <= len(agent.posted) <= 12, "confirmations show now and then whether the peer lives"
    assert len(agent.posted) - 2 <= len(agent.released), "each confirmation is released before the next"
    agent.failures = {"check": nixlRemoteDisconnectError("GONE"), "make": nixlRemoteDisconnectError("GONE")}
    clock.now += CONFIRM_RETRY_S
    with pytest.raises(PeerLostError):
        transport.poll(handle)


def test_without_a_flush_there_is_no_confirmation(clock: SimpleNamespace) -> None:
    agent = ScriptedAgent(**{"check 0": "ERR"})
    transport = NixlTransport(agent, split_at=0)
    handle = transport.post_write(ROUTE, IDS, IDS)
    for _ in range(20):
        assert transport.poll(handle) is WriteState.PENDING
        clock.now += CONFIRM_RETRY_S
    assert agent.posted == [0]


def test_the_release_of_a_failed_write_releases_its_confirmation(clock: SimpleNamespace) -> None:
    agent = ScriptedAgent()
    transport = failing(agent, script={"release 0": nixlBackendError("BUSY")})
    handle = transport.post_write(ROUTE, OURS, THEIRS)
    assert transport.poll(handle) is WriteState.PENDING
    with pytest.raises(TransportError, match="BUSY"):
        transport.release(handle)
    assert agent.released == [], "the confirmation is still under way"
    assert transport.poll(handle) is WriteState.PENDING
    del agent.failures["release 0"]
    transport.release(handle)
    assert sorted(agent.released) == [0, 1]
    with pytest.raises(TransportError, match="released"):
        transport.poll(handle)
    assert not transport._failed


# WRITEs that vLLM posts.


def vllm_posts(agent: ScriptedAgent, transport: NixlTransport) -> tuple[WriteHandle, NotedPost]:
    """As vLLM does it: it ignores the state, and logs errors."""
    post = transport.noted()
    handle = post.make_prepped_xfer("WRITE", "local", [7, 8, 9], "remote", [20, 21, 22], notif_msg=b"")
    post.transfer(handle)
    transport.adopt(handle, post, "D", 3)
    return handle, post


@pytest.mark.parametrize("locked", [True, False])
def test_a_vllm_write_is_polled_and_released_by_the_transport(locked: bool) -> None:
    agent = ScriptedAgent(check="PROC")
    transport = NixlTransport(LockedAgent(agent) if locked else agent)
    handle, post = vllm_posts(agent, transport)
    assert post.failure is None
    assert transport.poll(handle) is WriteState.PENDING
    agent.failures = {}
    assert transport.poll(handle) is WriteState.LANDED
    transport.release(handle)
    assert agent.released == [0]
    assert len(agent.prepared) == 1


@pytest.mark.parametrize("tear", TEARS)
def test_a_failed_write_of_vllms_is_confirmed(tear: str, clock: SimpleNamespace) -> None:
    agent = ScriptedAgent()
    transport = failing(agent, tear)
    handle, post = vllm_posts(agent, transport)
    assert (post.failure is not None) == ("post" in tear)
    for _ in range(3):
        assert transport.poll(handle) is WriteState.PENDING
    assert agent.prepared == [("local", [7, 8, 9], "remote", [20, 21, 22]), ("local", [7], "remote", [20])]
    agent.failures["check 1"] = "DONE"
    assert ("BAD" in over(transport, handle)) == ("raises" in tear)


def test_an_acknowledged_write_carries_vllms_notification() -> None:
    agent = ScriptedAgent()
    network = NixlTransport(agent)
    acknowledged = AcknowledgedTransport(network)
    post = network.noted(partial(acknowledged.attached, 7))
    handle = post.make_prepped_xfer("WRITE", "local", [7], "remote", [20], notif_msg=b"request-1:1")
    post.transfer(handle)
    network.adopt(handle, post, "D", 0)
    acknowledged.adopt(handle, "D", 7)
    assert agent.attached == [encode(Landed(7, b"request-1:1"))]
    assert acknowledged.poll(handle) is WriteState.PENDING
    agent.failures["get"] = {"D": [encode(Acknowledged((7,)))]}
    assert acknowledged.poll(handle) is WriteState.LANDED
    acknowledged.release(handle)
    assert agent.released == [0]


def test_a_vllm_write_to_a_lost_peer_is_over_at_once() -> None:
    agent = ScriptedAgent(transfer=nixlRemoteDisconnectError("GONE"))
    transport = NixlTransport(agent)
    handle, _ = vllm_posts(agent, transport)
    with pytest.raises(PeerLostError, match="GONE"):
        transport.poll(handle)
    assert len(agent.prepared) == 1
    transport.release(handle)
    assert agent.released == [0]


def test_errors_of_vllms_preparation_reach_vllm() -> None:
    """All else goes straight to the agent."""
    agent = ScriptedAgent(make=nixlBackendError("BAD"))
    post = NixlTransport(agent).noted()
    with pytest.raises(nixlBackendError):
        post.make_prepped_xfer("WRITE", "local", [7], "remote", [20])
    assert (post.sides, post.failure) == (None, None)
    assert post.get_new_notifs() == {}


# Handles.


def test_a_refused_release_can_be_repeated() -> None:
    agent = ScriptedAgent(release=nixlBackendError("BUSY"))
    transport = NixlTransport(agent)
    handle = transport.post_write(ROUTE, IDS, IDS)
    with pytest.raises(TransportError, match="BUSY"):
        transport.release(handle)
    assert transport.poll(handle) is WriteState.LANDED

    agent.failures = {}
    transport.release(handle)
    assert agent.released == [0]
    with pytest.raises(TransportError, match="released"):
        transport.poll(handle)


def test_the_transport_rejects_other_agents() -> None:
    with pytest.raises(TypeError, match="not a NIXL agent"):
        NixlTransport(object())


def test_importing_the_transport_does_not_import_nixl() -> None:
    import subprocess

    code = "import sys, layerpush.transport.nixl; sys.exit(any(name.startswith('nixl') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
