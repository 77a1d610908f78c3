"""Runs inside an engine host: looks at its worker's staging memory, and spoils copies from and to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from layerpush.transport.packing.calibration import SCRATCH_PIECES
from layerpush.transport.packing.memory import PIECE_BYTES
from tests.e2e import probes

if TYPE_CHECKING:
    from tests.e2e.hostmain import HostedEngine

Copying = Literal["gather", "scatter"]
SIGN, LARGE = 0x80, 0x4F
"""In the last byte of a float32: the sign bit, and bits that make any number large, about 2^32, but never infinite."""


def in_use(host: HostedEngine) -> list[str]:
    """The parts of the ring in use: none if no push and no load is under way."""
    staging = _worker_staging()
    if staging is None or staging._staging is None:
        return []
    used = staging._staging.ring.used_bytes - SCRATCH_PIECES * PIECE_BYTES
    windows = len(staging.unpacker._windows)
    unpacking = len(staging.strategy.packer.unpacking)
    counts = {"bytes": used, "windows": windows, "scatters": len(staging.unpacker._running), "unpackings": unpacking}
    return [f"{count} {what}" for what, count in counts.items() if count]


def wait_until_free(host: HostedEngine, timeout: float) -> list[str]:
    """Poll `in_use` until it is empty, or time is over: the writer thread gives back a bit later."""
    deadline = time.monotonic() + timeout
    while (held := in_use(host)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


def is_timing(operation: str, local: Any, local_ids: Any, *remote: Any) -> bool:
    """Whether these arguments of ``make_prepped_xfer`` are of a WRITE that only times the link."""
    staging = _worker_staging()
    return staging is not None and local is staging._pieces and bool(max(local_ids) < SCRATCH_PIECES)


def has_timed_links(host: HostedEngine) -> bool:
    """Whether a P has timed its links to all D that it knows. It does so when it is idle."""
    staging = _worker_staging()
    return staging is None or staging.strategy is None or not staging.strategy.is_busy


def open_block_writes(host: HostedEngine) -> int:
    """The number of handles, between post and release, of the worker's WRITEs that do more than time a link."""
    worker = probes.connector_worker()
    live = [] if worker is None else list(worker.transport._live.values())
    return sum(not is_timing("WRITE", one.route.local_descriptors, one.local) for one in live)


def plans_under_way(host: HostedEngine) -> list[str]:
    """The plans of the WRITEs that have not ended."""
    worker = probes.connector_worker()
    pushes = list(worker.writer._pushes.values())
    return sorted({transfer.record.plan for push in pushes for transfer in push.transfers})


def fail_copies(host: HostedEngine, copying: Copying, first: int = 0, count: int = 1) -> None:
    """After `first` copies, the next `count` copies of several layers begin, and then fail."""
    copies, numbers, failing = _staging(), iter(range(1 << 30)), iter(range(count))
    real = getattr(copies, copying)

    def fails(layers: slice, *args: Any) -> Any:
        late_enough = next(numbers) >= first
        if late_enough and layers.stop - layers.start > 1 and next(failing, None) is not None:
            return BrokenCopy(copying)
        return real(layers, *args)

    setattr(copies, copying, fails)


class BrokenCopy:
    """The device fails after the copy's begin. Without a begin, P would only write directly."""

    def __init__(self, copying: Copying) -> None:
        self._copying = copying

    def is_over(self) -> bool:
        raise RuntimeError(f"scripted: this {self._copying} fails")

    def device_s(self) -> float:
        return 0.0


def damage(host: HostedEngine, copying: Copying, number: int) -> None:
    """Damage the first block in the ring: after this gather, or before this scatter.

    All its numbers become large and keep their signs. One number is too few: it draws all attention or none, by the
    sign of the query's number.
    """
    copies, numbers = _staging(), iter(range(1 << 30))
    real = getattr(copies, copying)

    def damages(layers: slice, blocks: Any, offset: int) -> Any:
        hit = next(numbers) == number
        last_bytes = copies._memory[offset + 3 : offset + copies.block_bytes : 4]
        if hit and copying == "scatter":
            last_bytes.bitwise_and_(SIGN).bitwise_or_(LARGE)
        copy = real(layers, blocks, offset)
        if hit and copying == "gather":
            last_bytes.bitwise_and_(SIGN).bitwise_or_(LARGE)
        return copy

    setattr(copies, copying, damages)


def reset(host: HostedEngine) -> None:
    """Restore the real copies."""
    staging = _worker_staging()
    if staging is not None and staging._staging is not None:
        for copying in ("gather", "scatter"):
            staging._staging.__dict__.pop(copying, None)


def _staging() -> Any:
    staging = _worker_staging()
    assert staging is not None
    assert staging._staging is not None, "this engine has no staging memory"
    return staging._staging


def _worker_staging() -> Any:
    return getattr(probes.connector_worker(), "_packing", None)
