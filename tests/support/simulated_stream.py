"""A device's stream on the CPU: work in order, done later than its call returns, and events that pass late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

Work = Callable[[], None]


class SimulatedStream:
    """``put`` returns before the work is done. ``run`` does it. So ``run`` is the device, and its caller the clock."""

    current: ClassVar[SimulatedStream | None] = None
    """The stream that events are recorded on, as torch's current stream."""

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()

    def put(self, work: Work) -> None:
        """Any thread."""
        self._queue.append(work)

    def run(self, count: int | None = None) -> None:
        """Do the next ``count`` pieces of work, or all."""
        while self._queue and count != 0:
            self._queue.popleft()()
            count = None if count is None else count - 1

    @contextmanager
    def as_current(self) -> Iterator[None]:
        before, SimulatedStream.current = SimulatedStream.current, self
        try:
            yield
        finally:
            SimulatedStream.current = before


class SimulatedEvent:
    """In the place of ``torch.Event`` and of ``torch.cuda.Event``. It has passed if it was never recorded, as theirs.

    ``open_queries`` counts the queries of events that had not passed.
    """

    open_queries: ClassVar[int] = 0
    ELAPSED_MS = 0.1

    def __init__(self, *_: object, **__: object) -> None:
        self._open = 0
        self._stream: SimulatedStream | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._stream = stream or SimulatedStream.current
        assert self._stream is not None, "nothing computes on this thread"
        self._open += 1
        self._stream.put(self._pass)

    def query(self) -> bool:
        if isinstance(self._stream, CopyStream):
            self._stream.queried()
        if self._open:
            SimulatedEvent.open_queries += 1
        return not self._open

    def elapsed_time(self, _: SimulatedEvent) -> float:
        return self.ELAPSED_MS

    def _pass(self) -> None:
        self._open -= 1


class CopyStream(SimulatedStream):
    """A stream whose work is done while its user waits for it: at every ``PATIENCE``-th query of an event."""

    PATIENCE = 3

    def __init__(self) -> None:
        super().__init__()
        self._queries = 0

    def queried(self) -> None:
        self._queries += 1
        if self._queries % self.PATIENCE == 0:
            self.run()

    def synchronize(self) -> None:
        self.run()
