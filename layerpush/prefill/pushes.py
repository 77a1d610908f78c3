"""The pushes of one prefill rank, and what others may ask about them."""

from __future__ import annotations

from layerpush.core.push_protocol import State
from layerpush.prefill.push import Push


class PushTable:
    """Changed by the writer thread only. Any thread may ask ``writes_in_flight``, ``engines_in_use`` and ``waiting``,
    and read ``active``: how many pushes have not ended. One that has may stay in the table for a moment.
    """

    def __init__(self) -> None:
        self.active = 0
        self._pushes: dict[str, Push] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pushes

    def __len__(self) -> int:
        return len(self._pushes)

    def writes_in_flight(self, request_id: str) -> bool:
        """Whether freeing this request's blocks now would free them under a WRITE. Any thread."""
        push = self._pushes.get(request_id)
        return push is not None and push.in_flight

    @property
    def engines_in_use(self) -> set[str]:
        """Decode engines that a live push has registered from."""
        return {
            push.session.registration.decode_engine_id
            for push in list(self._pushes.values())
            if push.session.registration is not None
        }

    @property
    def engines_in_flight(self) -> set[str]:
        """Decode engines that a WRITE is on its way to."""
        return {
            push.record.decode_engine_id
            for push in self._pushes.values()
            if push.in_flight and push.record.decode_engine_id is not None
        }

    @property
    def is_draining(self) -> bool:
        """Whether something is on the wire for a push that is over otherwise."""
        return any(push.session.state in (State.DRAINING, State.CLOSED) for push in self._pushes.values())

    def is_delegated(self, request_id: str) -> bool:
        """Whether a request is upstream's to push whole, and still wanted."""
        push = self._pushes.get(request_id)
        return push is not None and push.session.state is State.DELEGATED and push.session.failure is None

    def serving(self, key: tuple[str, str]) -> str | None:
        """The live request that a registration is served by."""
        for push in self._pushes.values():
            registration = push.session.registration
            if registration is not None and registration.key == key:
                return push.request_id
        return None

    def waiting(self) -> list[str]:
        """Requests that no decode engine has registered yet."""
        return [push.request_id for push in list(self._pushes.values()) if push.is_unclaimed]

    def failure(self, request_id: str) -> str | None:
        """Why a live request will not be pushed, if that is so."""
        push = self._pushes.get(request_id)
        return None if push is None else push.session.failure
