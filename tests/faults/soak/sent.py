"""The requests that were sent since the last audit."""

from __future__ import annotations

from tests.faults.soak.engine_slots import EngineSlots
from tests.faults.soak.request import Leg, State


class Sent:
    """Requests that no engine should know after their end."""

    def __init__(self, slots: EngineSlots) -> None:
        self._slots = slots
        self._decode_legs: dict[str, Leg] = {}

    def note(self, request_id: str, decode_leg: Leg) -> None:
        self._decode_legs[request_id] = decode_leg

    def ids(self) -> list[str]:
        return list(self._decode_legs)

    def orphans(self) -> set[str]:
        """Requests with a dead D. A P that keeps such a registration gets no message about it."""
        return {request_id for request_id, leg in self._decode_legs.items() if self._is_dead(leg)}

    def clear(self) -> None:
        self._decode_legs.clear()

    def _is_dead(self, leg: Leg) -> bool:
        if leg.state is State.UNSENT:
            return False
        slot = self._slots[leg.engine]
        return slot.incarnation != leg.incarnation or slot.engine.ended
