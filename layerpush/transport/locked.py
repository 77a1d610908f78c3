"""``LockedAgent``: one lock around a NIXL agent, because the writer and the handshake executor both call it."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


class LockedAgent:
    """A NIXL agent whose methods run one at a time. Its other attributes are the agent's own.

    NIXL agents are created without thread synchronisation and their bindings release the GIL, so two threads inside one
    agent corrupt it. The lock is held for the whole call, up to tens of milliseconds in ``transfer`` with thousands of
    descriptors. So the engine's main thread must not call the agent.

    Finalisers of NIXL handles go around the lock: release handles explicitly.
    Bound methods are remembered on first use: replace a method on this object, not on the agent behind it.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        # Re-entrant: the garbage collector may run a finaliser that calls the agent inside a call of the same thread.
        self._lock = threading.RLock()

    @property
    def unlocked(self) -> Any:
        """The agent itself."""
        return self._agent

    @contextlib.contextmanager
    def postponed(self, *names: str) -> Iterator[list[Callable[[], Any]]]:
        """While it is open, calls of the methods ``names`` are kept in the list, and not made. They must have no result
        that a caller needs. Calls of other threads count as well.
        """
        kept: list[Callable[[], Any]] = []
        methods = {name: getattr(self, name) for name in names}
        for name, method in methods.items():
            self.__dict__[name] = lambda *args, method=method: kept.append(functools.partial(method, *args))
        try:
            yield kept
        finally:
            self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._agent, name)
        if not callable(attribute):
            return attribute
        lock = self._lock

        @functools.wraps(attribute)
        def locked(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return attribute(*args, **kwargs)

        self.__dict__[name] = locked
        return locked
