"""Signals that end a run, raised as exceptions where that is safe."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The signal ``signum`` ends the run."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_status(self) -> int:
        """The status that a shell reports for a process that the signal ended."""
        return 128 + self.signum


class Interrupts:
    """Within ``with Interrupts():`` the first SIGINT, SIGTERM or SIGHUP raises :class:`Interrupted` in the main thread.

    Further signals raise nothing: a second Ctrl-C must not cut the teardown short. Inside ``shield()`` the signal is
    kept and raised at its end; after ``ignore()`` none is raised. Main thread only (Python's rule for handlers).
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._shielded = False
        self._ignoring = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        for signum in SIGNALS:
            self._previous[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        """Restore the old handlers. After an interruption, ignore the signals instead: the process is about to end."""
        interrupted = exception_type is not None and issubclass(exception_type, Interrupted)
        for signum, handler in self._previous.items():
            signal.signal(signum, signal.SIG_IGN if interrupted else handler)
        self._previous.clear()

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._ignoring:
            return
        self._ignoring = True
        if self._shielded:
            self._pending = signum
        else:
            raise Interrupted(signum)

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Hold a signal back until the block is done."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
        if self._pending is not None:
            pending, self._pending = self._pending, None
            raise Interrupted(pending)

    def ignore(self) -> None:
        """Raise nothing from now on."""
        self._ignoring = True
