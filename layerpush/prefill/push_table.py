"""The pushes of one prefill rank by request id, and those that a turn of the writer is about. Writer thread only, but
for reads of single entries and copies.
"""

from __future__ import annotations

from layerpush.prefill.push import Push
from layerpush.prefill.push_protocol import State


class PushTable(dict[str, Push]):
    """A turn looks at pushes that have had an event or have WRITEs in flight. All others cost it nothing.

    ``changed`` and ``take_eventful`` alone write the attributes below. A push reports each change of its state and
    of its transfers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streaming: dict[str, Push] = {}
        self.eventful: dict[str, Push] = {}
        """They stream, and something has happened to them since the last turn."""
        self.in_flight: dict[str, Push] = {}
        self.unclaimed: dict[str, Push] = {}
        self.awaiting: dict[str, Push] = {}
        """They wait for a registration or a handshake."""
        self.draining: dict[str, Push] = {}
        """They have ended, but for their WRITEs."""
        self.serving: dict[tuple[str, str], dict[str, Push]] = {}
        """Pushes with a registration, by its key. Several have one key for a moment, if a stock engine's request came
        again.
        """

    def add(self, push: Push) -> None:
        """A push begins."""
        self[push.request_id] = push
        self.changed(push)

    def remove(self, push: Push) -> None:
        """A push is over."""
        if self.get(push.request_id) is push:
            del self[push.request_id]
            self._sort(push, State.CLOSED, lives=False)

    def changed(self, push: Push) -> None:
        """The state of a push, its registration or its transfers may have changed."""
        if self.get(push.request_id) is push:
            self._sort(push, push.state, lives=True)

    def take_eventful(self) -> dict[str, Push]:
        """Remove and return the pushes of ``eventful``, by request id."""
        pushes, self.eventful = self.eventful, {}
        return pushes

    def _sort(self, push: Push, state: State, *, lives: bool) -> None:
        _keep(self.streaming, push, state is State.STREAMING)
        _keep(self.eventful, push, state is State.STREAMING and push.dirty)
        _keep(self.in_flight, push, lives and push.in_flight)
        _keep(self.unclaimed, push, push.is_unclaimed and lives)
        _keep(self.awaiting, push, push.awaits_peer and lives)
        _keep(self.draining, push, lives and state in (State.DRAINING, State.CLOSED))
        key = push.key
        if key is not None:
            pushes = self.serving.setdefault(key, {})
            _keep(pushes, push, lives)
            if not pushes:
                del self.serving[key]


def _keep(pushes: dict[str, Push], push: Push, belongs: bool) -> None:
    if belongs:
        pushes[push.request_id] = push
    else:
        pushes.pop(push.request_id, None)
