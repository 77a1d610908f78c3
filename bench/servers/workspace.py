"""The folders of a run, and the places of its servers."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.servers.engines import LOOPBACK, ServerPlace
from bench.servers.interrupts import Interrupts
from bench.servers.link import BURST, EmulatedLink


@contextlib.contextmanager
def work_directory(keep: Path | None) -> Iterator[Path]:
    """The folder for logs and traces: ``keep``, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="layerpush-") as directory:
            yield Path(directory)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()


@contextlib.contextmanager
def places_of(
    rate: str | None, interrupts: Interrupts, burst: str = BURST
) -> Iterator[tuple[ServerPlace, ServerPlace]]:
    """The places of P and D: loopback, or the two ends of an emulated link. Raises ``LinkError``."""
    if rate is None:
        yield LOOPBACK, LOOPBACK
        return
    with contextlib.ExitStack() as stack:
        with interrupts.shield():
            link = stack.enter_context(EmulatedLink(rate, burst))
        yield link.prefill, link.decode


def model_cache() -> Path:
    """The default folder of the demo's model."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "layerpush" / "demo-model"
