"""Keeps the writer thread alive when a call fails."""

from __future__ import annotations

import logging
from collections.abc import Callable

from layerpush.core.write import MismatchError
from layerpush.transport.base import TransportError

logger = logging.getLogger(f"vllm.{__name__}")


class Guard:
    """Calls a function that may raise. ``fail(request_id, reason)`` ends the push that a failure belongs to.

    Writer thread.
    """

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail

    def __call__(self, what: str, request_id: str | None, call: Callable[[], None]) -> None:
        """``what`` names the call in the log. Raises nothing. The cause of a push's failure is logged with the push."""
        try:
            call()
        except Exception as error:  # vLLM's code may raise anything: the push fails, the thread lives on
            reason = str(error)
            if request_id is None or not isinstance(error, MismatchError | TransportError):
                logger.exception("layerpush: %s failed (request %s)", what, request_id)
                reason = f"{type(error).__name__}: {error}"
            if request_id is not None:
                self._fail(request_id, reason)
