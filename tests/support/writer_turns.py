"""Turns of a worker's writer thread, so that a simulated device can wait for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from layerpush.engine.worker.worker import LayerwisePushWorker
from tests.support.waiting import until


class WriterTurns:
    """Counts the turns for which a worker's writer thread was woken."""

    def __init__(self, worker: LayerwisePushWorker) -> None:
        self._worker, self._begun = worker, 0
        thread = worker._writer_thread
        assert thread is not None
        thread.turn = partial(self._counted, thread.turn)

    def let_pass(self) -> None:
        """If the writer has work: wait until it has done all that it can, and until no WRITE reads from the memory."""
        pushes = self._worker.pushes
        if not len(pushes) and not self._worker.step_events.pending:
            return
        before = self._begun
        for turns in (1, 2):  # the first has ended when the second begins
            self._worker._waker.wake()
            until(partial(self._has_begun, before + turns), "a turn of the writer")
        until(lambda: not any(push.in_flight for push in list(pushes._pushes.values())), "the end of the WRITEs")

    def _has_begun(self, turn: int) -> bool:
        return self._begun >= turn

    def _counted(self, turn: Callable[[bool], None], woken: bool) -> None:
        self._begun += woken
        turn(woken)
