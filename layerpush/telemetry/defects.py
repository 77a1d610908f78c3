"""Defects that must not cost more than the work that they are in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(f"vllm.{__name__}")


@contextmanager
def logged(what: str, request_id: str) -> Iterator[None]:
    """An error is logged and goes no further: it must not end another push or load, nor this one once more."""
    try:
        yield
    except Exception:  # the push or load goes on to its end
        logger.exception("layerpush: %s failed (request %s)", what, request_id)
