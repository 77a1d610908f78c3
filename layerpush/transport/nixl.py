"""The real wire: one-sided WRITEs and notifications through a NIXL agent that somebody else created."""

from __future__ import annotations

import logging
import sys
from typing import Any

from layerpush.transport.base import DescriptorIds, PeerLostError, Route, TransportError, WriteHandle, WriteState
from layerpush.transport.locked import LockedAgent

logger = logging.getLogger("vllm.layerpush.transport")

_STATES = {"DONE": WriteState.LANDED, "PROC": WriteState.PENDING, "ERR": WriteState.FAILED}


class NixlTransport:
    """`Transport` over a ``nixl_agent`` (vLLM's ``nixl_wrapper``), plain or in a `LockedAgent`.

    A route's ``local_descriptors`` and ``remote_descriptors`` are the handles that ``prep_xfer_dlist`` returned.
    Descriptor ids should be contiguous int32 arrays, which the bindings read in place; anything else is copied.

    WRITEs carry no notification of their own: NIXL would send it after that WRITE alone, ahead of earlier ones.

    Raises:
        TypeError: ``agent`` is not an agent of any NIXL build.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._errors = _errors_of(agent)
        # Polling a freed handle crashes NIXL, and a handle that is garbage-collected is released on whichever thread
        # drops it: handles live here from post to release.
        self._live: set[Any] = set()

    def post_write(self, route: Route, local: DescriptorIds, remote: DescriptorIds) -> WriteHandle:
        """Start one WRITE. May take tens of milliseconds with thousands of descriptors: NIXL copies while it posts.

        After a ``TransportError`` some of the bytes may have been sent all the same.
        """
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", route.local_descriptors, local, route.remote_descriptors, remote
            )
        except self._errors as error:
            raise _translated(error, f"cannot prepare a WRITE to {route.agent}") from error
        try:
            state = self._agent.transfer(handle)
        except self._errors as error:
            self._abandon(handle)
            raise _translated(error, f"cannot post a WRITE to {route.agent}") from error
        if state == "ERR":
            self._abandon(handle)
            raise TransportError(f"cannot post a WRITE to {route.agent}")
        self._live.add(handle)
        result: WriteHandle = handle
        return result

    def adopt(self, handle: WriteHandle) -> None:
        """Take over a WRITE that somebody else posted on this agent: it is polled and released here from now on."""
        self._live.add(handle)

    def poll(self, handle: WriteHandle) -> WriteState:
        """Make progress on a WRITE. A WRITE that ``FAILED`` may have landed in part."""
        self._require_live(handle)
        try:
            return _STATES.get(self._agent.check_xfer_state(handle), WriteState.FAILED)
        except self._errors as error:
            lost = _translated(error, "a WRITE was cut off")
            if isinstance(lost, PeerLostError):
                raise lost from error
            logger.warning("NIXL reports a failed WRITE: %s", lost)
            return WriteState.FAILED

    def release(self, handle: WriteHandle) -> None:
        """Forget a WRITE; also wanted after ``PeerLostError``."""
        self._require_live(handle)
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            raise _translated(error, "NIXL keeps the handle of a WRITE") from error
        self._live.remove(handle)

    def notify(self, agent: str, payload: bytes) -> None:
        try:
            self._agent.send_notif(agent, payload)
        except self._errors as error:
            raise _translated(error, f"cannot notify {agent}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        """Take what has arrived: in order of arrival per sender, sender by sender."""
        try:
            arrived = self._agent.get_new_notifs()
        except self._errors as error:
            raise _translated(error, "cannot read notifications") from error
        return [(agent, payload) for agent, payloads in arrived.items() for payload in payloads]

    def _require_live(self, handle: WriteHandle) -> None:
        if handle not in self._live:
            raise TransportError(f"{handle!r} was released, or is no WRITE of this transport")

    def _abandon(self, handle: Any) -> None:
        """Give back the handle of a WRITE that was never posted."""
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            # The caller raises what made the post fail; NIXL releases leftovers together with the agent.
            logger.warning("NIXL keeps the handle of a WRITE that it did not post: %r", error)


def _errors_of(agent: Any) -> tuple[type[Exception], ...]:
    """The exceptions of this agent's bindings: each NIXL build (CUDA 12, 13, ROCm) has classes of its own."""
    if isinstance(agent, LockedAgent):
        agent = agent.unlocked
    for base in type(agent).__mro__:
        bindings = getattr(sys.modules.get(base.__module__), "nixlBind", None)
        if bindings is not None:
            exported = vars(bindings).values()
            return tuple(value for value in exported if isinstance(value, type) and issubclass(value, Exception))
    raise TypeError(f"{agent!r} is not a NIXL agent")


def _translated(error: Exception, failure: str) -> TransportError:
    kind = PeerLostError if type(error).__name__ == "nixlRemoteDisconnectError" else TransportError
    return kind(f"{failure}: {error}")
