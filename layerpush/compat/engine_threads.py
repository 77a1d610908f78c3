"""The threads without which an engine cannot go on. If one of them ends by an error, the engine ends with the reason.

vLLM notices the death of a process. It does not notice that of a thread: requests would wait for it without end.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NOTICE_S = 1.0
"""Seconds within which the main thread of an engine that makes steps calls ``check``."""

logger = logging.getLogger(f"vllm.{__name__}")


class EngineThreadError(RuntimeError):
    """A thread has ended; the text has its name and the reason."""


class EngineThreads:
    """The threads of one worker, or of one scheduler.

    ``check`` raises if a thread has ended by an error. vLLM ends an engine whose step raises. An idle engine makes no
    step: then the thread sends SIGTERM to its own process, if the process is an engine core or a worker of vLLM. The
    front end or the executor notices the end of that process. In another process vLLM does not handle SIGTERM: there
    the next step raises.
    """

    def __init__(self) -> None:
        self._failure: tuple[str, BaseException] | None = None
        self._noticed = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The whole run of a thread. An exception ends the engine, and goes no further."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001  also SystemExit: the thread has gone, and the engine ends
            name = threading.current_thread().name
            self._failure = name, error
            try:
                logger.critical("layerpush: thread %s has ended, and the engine ends", name, exc_info=error)
            finally:
                self._end_idle_engine()

    def check(self) -> None:
        """Raises ``EngineThreadError`` if a thread has ended by an error. Main thread, in each step."""
        if self._failure is not None:
            self._noticed.set()
            name, error = self._failure
            raise EngineThreadError(f"thread {name} has ended: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """The engine ends anyway. Main thread."""
        self._noticed.set()

    def _end_idle_engine(self) -> None:
        main = threading.main_thread().ident
        if not self._noticed.wait(NOTICE_S) and main is not None and _vllm_handles(signal.SIGTERM):
            signal.pthread_kill(main, signal.SIGTERM)


def _vllm_handles(number: signal.Signals) -> bool:
    """Whether vLLM has set the handler of a signal: it does in engine cores and in workers, which are its processes."""
    return str(getattr(signal.getsignal(number), "__module__", "")).startswith("vllm.")
