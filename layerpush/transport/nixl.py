"""The real transport: WRITEs and notifications through vLLM's NIXL agent.

Only the writer thread may call it. An agent has no lock and its bindings release the GIL, so two threads in one agent
corrupt it; ``LockedAgent`` keeps the handshake executor out. ``transfer`` may copy for tens of milliseconds before it
returns, so the engine's main thread must never call NIXL, or wait for that lock.

NIXL promises (1.5.1 over UCX, measured; ``transport.acknowledged`` has the promises over LIBFABRIC):

- ``DONE`` means that every byte is in the peer's memory. A notification that is sent after ``DONE`` cannot overtake it.
- A WRITE to a process that died fails with ``nixlRemoteDisconnectError``, and nothing of it lands any more.

NIXL does not promise:

- Order. A later WRITE or a notification may overtake a WRITE on the wire. NIXL sends a WRITE's own notification after
  that WRITE alone, ahead of earlier ones.
- Progress. A WRITE may move, and end, only while this side polls its handle. The target must make progress as well.
- An end. To a stopped process, or over a cut link, a WRITE stays ``PROC`` for minutes: callers have deadlines.
- Cancellation. ``release_xfer_handle`` returns at once. The bytes still land, as the source then has them.
- The end of a WRITE that failed. While the connection lives, UCX may still send parts of it, even after the handle was
  released and the peer removed. So ``poll`` returns ``PENDING`` until a *confirmation* has landed: one descriptor of
  the WRITE, written once more to the same place. NIXL ends each WRITE with a flush of its UCX endpoint. The flush
  covers all earlier posts there. A thread has one endpoint for each peer, but NIXL spreads a WRITE of ``SPLIT_AT``
  descriptors or more over several. No confirmation covers such a WRITE: it ends with its peer. Other backends flush
  nothing, so there is no confirmation at all (``split_at`` 0).
- Safe handles. Polling a released handle crashes NIXL. A handle that is garbage-collected is released on whichever
  thread drops it. So ``NixlTransport`` keeps each handle from post to release.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerpush.transport.base import DescriptorIds, PeerLostError, Route, TransportError, WriteHandle, WriteState
from layerpush.transport.locked import LockedAgent

logger = logging.getLogger(f"vllm.{__name__}")

SPLIT_AT = 1024
"""Number of descriptors from which on NIXL spreads a WRITE over its pool's threads; each has its own endpoint."""
CONFIRM_RETRY_S = 1.0
MET_KEPT = 256

_STATES = {"DONE": WriteState.LANDED, "PROC": WriteState.PENDING}


@dataclass(slots=True)
class _PostedWrite:
    """A WRITE on the wire: its route, its first descriptor on each side, and its number of descriptors."""

    route: Route
    local: DescriptorIds
    remote: DescriptorIds
    descriptors: int


@dataclass(slots=True)
class _FailedWrite:
    """A WRITE that failed while parts of it may be on the wire. ``due``: the earliest time of its next confirmation."""

    failure: TransportError
    posted: _PostedWrite
    confirmation: Any = None
    due: float = 0.0
    over: bool = False


class NotedPost:
    """Stands in for the agent while vLLM posts one WRITE: notes its descriptors, and whether it failed.

    ``attach`` makes the notification of the WRITE out of vLLM's.
    """

    def __init__(self, agent: Any, attach: Callable[[bytes], bytes] | None = None) -> None:
        self._agent = agent
        self._attach = attach
        self.sides: tuple[Any, DescriptorIds, Any, DescriptorIds] | None = None
        self.failure: TransportError | None = None

    def make_prepped_xfer(
        self, operation: str, local: Any, local_ids: Any, remote: Any, remote_ids: Any, **options: Any
    ) -> Any:
        """Prepare the WRITE as the agent does, and note its descriptors."""
        if self._attach is not None:
            options["notif_msg"] = self._attach(options.get("notif_msg", b""))
        handle = self._agent.make_prepped_xfer(operation, local, local_ids, remote, remote_ids, **options)
        self.sides = local, _ids(local_ids), remote, _ids(remote_ids)
        return handle

    def transfer(self, handle: Any) -> Any:
        """Post the WRITE. Returns NIXL's state; ``failure`` has the error. Raises none: vLLM would release it."""
        self.failure = _start(self._agent, handle, "a WRITE could not be posted")
        return "PROC" if self.failure is None else "ERR"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class NixlTransport:
    """`Transport` over a ``nixl_agent`` (vLLM's ``nixl_wrapper``), plain or in a `LockedAgent`.

    A route's ``local_descriptors`` and ``remote_descriptors`` are the handles that ``prep_xfer_dlist`` returned.
    Descriptor ids should be contiguous int32 arrays, which the bindings read in place; anything else is copied.

    Raises:
        TypeError: ``agent`` is not an agent of any NIXL build.
    """

    def __init__(self, agent: Any, split_at: float = SPLIT_AT) -> None:
        self._agent = agent
        self._split_at = split_at
        self._errors = _errors_of(agent)
        self._live: dict[Any, _PostedWrite] = {}
        self._failed: dict[Any, _FailedWrite] = {}
        self._met: set[bytes] = set()

    def post_write(
        self, route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b""
    ) -> WriteHandle:
        """Start one WRITE. May take tens of milliseconds with thousands of descriptors: NIXL copies while it posts."""
        handle = self._prepare(route, local, remote, notification)
        posted = _PostedWrite(route, local[:1].copy(), remote[:1].copy(), len(local))
        failure = _start(self._agent, handle, f"cannot post a WRITE to {route.agent}")
        if isinstance(failure, PeerLostError):
            self._abandon(handle)
            raise failure
        self._live[handle] = posted
        if failure is not None:
            self._failed[handle] = _FailedWrite(failure, posted)
        result: WriteHandle = handle
        return result

    def noted(self, attach: Callable[[bytes], bytes] | None = None) -> NotedPost:
        """A stand-in for the agent, for vLLM to post one WRITE with on this thread. ``attach``: see ``NotedPost``."""
        return NotedPost(self._agent, attach)

    def adopt(self, handle: WriteHandle, post: NotedPost, agent: str, remote_rank: int) -> None:
        """Take over a WRITE that vLLM has posted through ``post``, well or not. From now on it is polled here."""
        assert post.sides is not None
        local, local_ids, remote, remote_ids = post.sides
        route = Route(agent, remote_rank, local, remote)
        posted = self._live[handle] = _PostedWrite(route, local_ids[:1].copy(), remote_ids[:1].copy(), len(local_ids))
        if post.failure is not None:
            self._failed[handle] = _FailedWrite(post.failure, posted)

    def poll(self, handle: WriteHandle) -> WriteState:
        """Make progress on a WRITE. Raises ``TransportError`` with the reason when it has failed and is over."""
        self._require_live(handle)
        if handle not in self._failed:
            state = self._poll_once(handle)
            if isinstance(state, WriteState):
                return state
            self._failed[handle] = _FailedWrite(state, self._live[handle])
        failed = self._failed[handle]
        failed.over = failed.over or isinstance(failed.failure, PeerLostError) or self._is_over(failed)
        if not failed.over:
            return WriteState.PENDING
        raise failed.failure

    def release(self, handle: WriteHandle) -> None:
        """Forget a WRITE; necessary after ``PeerLostError``, too."""
        self._require_live(handle)
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            raise _translated(error, "NIXL keeps the handle of a WRITE") from error
        self._forget(handle)

    def notify(self, agent: str, payload: bytes) -> None:
        """Send a notification to a peer. Raises ``TransportError`` or ``PeerLostError``."""
        try:
            self._agent.send_notif(agent, payload)
        except self._errors as error:
            raise _translated(error, f"cannot notify {agent}") from error

    def contact(self) -> bytes:
        """The address of this agent: NIXL's connection data, without any memory. A backend may have none."""
        bindings = _bindings_of(self._agent)
        nothing = bindings.nixlRegDList(bindings.DRAM_SEG)
        try:
            contact: bytes = self._agent.get_partial_agent_metadata(nothing, inc_conn_info=True)
        except self._errors as error:
            raise _translated(error, "the agent has no address") from error
        return contact

    def meet(self, contact: bytes) -> str:
        """Prepare for notifications to an agent. NIXL keeps its address, so there is a limit to such agents."""
        if contact not in self._met and len(self._met) >= MET_KEPT:
            raise TransportError(f"{MET_KEPT} agents were met already")
        try:
            name = self._agent.add_remote_agent(contact)
        except self._errors as error:
            raise _translated(error, "cannot use the address of an agent") from error
        agent: str = name.decode() if isinstance(name, bytes) else name
        self._met.add(contact)
        return agent

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take the notifications that have arrived: sender by sender, each in order of arrival."""
        try:
            arrived = self._agent.get_new_notifs()
        except self._errors as error:
            raise _translated(error, "cannot read notifications") from error
        return [(agent, payload) for agent, payloads in arrived.items() for payload in payloads]

    def _require_live(self, handle: WriteHandle) -> None:
        if handle not in self._live:
            raise TransportError(f"{handle!r} was released, or is no WRITE of this transport")

    def _prepare(self, route: Route, local: DescriptorIds, remote: DescriptorIds, notification: bytes = b"") -> Any:
        options = {"notif_msg": notification} if notification else {}
        try:
            return self._agent.make_prepped_xfer(
                "WRITE", route.local_descriptors, local, route.remote_descriptors, remote, **options
            )
        except self._errors as error:
            raise _translated(error, f"cannot prepare a WRITE to {route.agent}") from error

    def _poll_once(self, handle: Any) -> WriteState | TransportError:
        try:
            state = self._agent.check_xfer_state(handle)
        except self._errors as error:
            return _translated(error, "a WRITE was cut off")
        return _STATES.get(state) or TransportError("a WRITE ended in an error")

    def _is_over(self, failed: _FailedWrite) -> bool:
        """Whether nothing of a failed WRITE can land any more. Raises ``PeerLostError`` when its connection is gone."""
        if not self._split_at or (failed.confirmation is None and time.perf_counter() < failed.due):
            return False
        state = self._post_confirmation(failed) if failed.confirmation is None else self._poll_once(failed.confirmation)
        if state is WriteState.PENDING:
            return False
        if failed.confirmation is not None:
            self._abandon(failed.confirmation)
            failed.confirmation = None
        if isinstance(state, PeerLostError):
            raise state
        failed.due = time.perf_counter() + CONFIRM_RETRY_S
        return state is WriteState.LANDED and failed.posted.descriptors < self._split_at

    def _post_confirmation(self, failed: _FailedWrite) -> WriteState | TransportError:
        route = failed.posted.route
        try:
            failed.confirmation = self._prepare(route, failed.posted.local, failed.posted.remote)
        except TransportError as error:
            return error
        failure = _start(self._agent, failed.confirmation, f"cannot post a confirmation to {route.agent}")
        return failure or WriteState.PENDING

    def _forget(self, handle: Any) -> None:
        del self._live[handle]
        failed = self._failed.pop(handle, None)
        if failed is not None and failed.confirmation is not None:
            self._abandon(failed.confirmation)

    def _abandon(self, handle: Any) -> None:
        """Release the handle of a WRITE that has no caller: a confirmation, or one whose post failed."""
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            # The caller raises the error of the post; NIXL releases leftovers together with the agent.
            logger.warning("NIXL keeps the handle of a WRITE that nobody waits for: %r", error)


def _errors_of(agent: Any) -> tuple[type[Exception], ...]:
    exported = vars(_bindings_of(agent)).values()
    return tuple(value for value in exported if isinstance(value, type) and issubclass(value, Exception))


def _bindings_of(agent: Any) -> Any:
    """The bindings of this agent: each NIXL build (CUDA 12, 13, ROCm) has classes of its own."""
    if isinstance(agent, LockedAgent):
        agent = agent.unlocked
    for base in type(agent).__mro__:
        bindings = getattr(sys.modules.get(base.__module__), "nixlBind", None)
        if bindings is not None:
            return bindings
    raise TypeError(f"{agent!r} is not a NIXL agent")


def _start(agent: Any, handle: Any, failure: str) -> TransportError | None:
    try:
        state = agent.transfer(handle)
    except Exception as error:  # noqa: BLE001  whatever it is, a part of the WRITE may be on the wire: it has failed
        return _translated(error, failure)
    return TransportError(failure) if state == "ERR" else None


def _ids(ids: Any) -> DescriptorIds:
    return np.asarray(ids, dtype=np.int32)


def _translated(error: Exception, failure: str) -> TransportError:
    kind = PeerLostError if type(error).__name__ == "nixlRemoteDisconnectError" else TransportError
    return kind(f"{failure}: {error}")
