"""Runs inside an engine host: looks at its worker's staging memory, and spoils copies into it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tests.e2e import probes
from tests.support.numpy_staging import BrokenCopy

if TYPE_CHECKING:
    from tests.e2e.hostmain import HostedEngine

SIGN, LARGE = 0x80, 0x4F
"""In the last byte of a float32: the sign bit, and bits that make any number large, about 2^32, but never infinite."""


def in_use(host: HostedEngine) -> int:
    """The bytes of the ring in use: none if no push is under way."""
    staging = _worker_staging()
    return 0 if staging is None or staging._staging is None else staging._staging.ring.used_bytes


def wait_until_free(host: HostedEngine, timeout: float) -> int:
    """Poll `in_use` until it is 0, or time is over: the writer thread gives back a bit later."""
    deadline = time.monotonic() + timeout
    while (held := in_use(host)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


def open_writes(host: HostedEngine) -> int:
    """The number of handles of the worker's WRITEs, between post and release."""
    worker = probes.connector_worker()
    return 0 if worker is None else len(worker.transport._live)


def plans_under_way(host: HostedEngine) -> list[str]:
    """The plans of the WRITEs that have not ended."""
    worker = probes.connector_worker()
    pushes = list(worker.pushes._pushes.values())
    return sorted({transfer.record.plan for push in pushes for transfer in push.transfers})


def fail_copies(host: HostedEngine, first: int = 0, count: int = 1) -> None:
    """After `first` copies, the next `count` copies of several layers begin, and then fail."""
    copies, numbers, failing = _staging(), iter(range(1 << 30)), iter(range(count))
    real = copies.gather

    def fails(layers: slice, *args: Any) -> Any:
        late_enough = next(numbers) >= first
        if late_enough and layers.stop - layers.start > 1 and next(failing, None) is not None:
            return BrokenCopy()
        return real(layers, *args)

    copies.gather = fails


def damage(host: HostedEngine, number: int) -> None:
    """Damage the first block in the ring after this gather.

    All its numbers become large and keep their signs. One number is too few: it draws all attention or none, by the
    sign of the query's number.
    """
    copies, numbers = _staging(), iter(range(1 << 30))
    real = copies.gather

    def damages(layers: slice, blocks: Any, offset: int) -> Any:
        copy = real(layers, blocks, offset)
        if next(numbers) == number:
            copies._memory[offset + 3 : offset + copies.block_bytes : 4].bitwise_and_(SIGN).bitwise_or_(LARGE)
        return copy

    copies.gather = damages


def reset(host: HostedEngine) -> None:
    """Restore the real copies."""
    staging = _worker_staging()
    if staging is not None and staging._staging is not None:
        staging._staging.__dict__.pop("gather", None)


def _staging() -> Any:
    staging = _worker_staging()
    assert staging is not None
    assert staging._staging is not None, "this engine has no staging memory"
    return staging._staging


def _worker_staging() -> Any:
    return getattr(probes.connector_worker(), "_gathering", None)
