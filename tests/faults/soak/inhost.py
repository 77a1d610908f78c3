"""The soak's functions inside an engine host (`Engine.call`); the first argument is the HostedEngine."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.e2e import probes, wirefaults
from tests.e2e.enginespec import BLOCK_SIZE
from tests.e2e.results import KvDigest
from tests.faults.soak import scripted

if TYPE_CHECKING:
    from tests.e2e.hostmain import HostedEngine

WAITING_REGISTRATIONS = "._claims.waiting."
"""Claims on P without a request yet. P keeps them for some minutes unless D cancels them."""


@dataclasses.dataclass(frozen=True)
class Record:
    """An engine's record of a finished request. ``kept``: a part of what had landed of a failed load was kept."""

    digest: KvDigest | None
    load_failed: bool
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class Audit:
    """The holdings of an engine. An idle engine has only threads."""

    missing_blocks: int
    requests: tuple[str, ...]
    mentions: tuple[str, ...]
    open_handles: int
    threads: tuple[str, ...]
    os_threads: int
    awaited: tuple[str, ...] = ()
    """Open loads, the prefill processes that they await, and the prober of those processes."""


class Notebook:
    """Remembers facts that the scheduler does not report."""

    def __init__(self, scheduler: Any, free_blocks: int) -> None:
        self.free_blocks = free_blocks
        self.failed_loads: set[str] = set()
        self.kept: set[str] = set()
        handle_failed = scheduler._handle_failed_recving

        def remember_failed(request_ids: set[str]) -> Any:
            self.failed_loads |= set(request_ids)
            return handle_failed(request_ids)

        scheduler._handle_failed_recving = remember_failed
        from layerpush.compat.patches import our_connectors

        for connector, _ in our_connectors(scheduler.connector):
            self._watch_kept(connector.connector_scheduler)

    def _watch_kept(self, connector: Any) -> None:
        keep = connector._keep_prefix

        def remember_kept(request: Any, cached: int, tokens: int) -> None:
            if tokens - tokens % BLOCK_SIZE > cached:
                self.kept.add(request.request_id)
            keep(request, cached, tokens)

        connector._keep_prefix = remember_kept


_NOTEBOOKS: list[Notebook] = []  # this process has one


def install(host: HostedEngine) -> None:
    """Call this once per process, before its first request."""
    _NOTEBOOKS.append(Notebook(host.scheduler, probes.free_blocks(host)))
    if host.scheduler.connector is not None:
        scripted.install(host)


def collect(host: HostedEngine, request_ids: Sequence[str]) -> dict[str, Record]:
    """Return and forget the records of these requests in the tests' own watchers."""
    notebook = _NOTEBOOKS[0]
    watch = host.watch
    records = {}
    for request_id in request_ids:
        internal = host._internal.pop(request_id, None)
        mine = [known for known in _known_ids(host) if known.startswith(f"{request_id}-") or known == request_id]
        digest = watch.digests.get(internal) if watch is not None and internal is not None else None
        failed, kept = (not noted.isdisjoint(mine) for noted in (notebook.failed_loads, notebook.kept))
        records[request_id] = Record(digest, failed, kept)
        for known in mine:
            notebook.failed_loads.discard(known)
            notebook.kept.discard(known)
            if watch is not None:
                for table in (watch.digests, watch._tables, watch._registered):
                    table.pop(known, None)
    host.notifications._sent.clear()
    if host.faults is not None:
        host.faults.sent.clear()
        host.faults.landed &= host.faults.open
    return records


def audit(host: HostedEngine, texts: list[str], orphans: list[str], allowed: tuple[str, ...]) -> Audit:
    """The holdings of this engine. For ``texts``, ``orphans`` and ``allowed`` see ``left_in``."""
    scripted.settle(host)
    _wake_for_turns(host)
    notebook = _NOTEBOOKS[0]
    return Audit(
        missing_blocks=notebook.free_blocks - probes.free_blocks(host),
        requests=tuple(f"{request_id} {status}" for request_id, status in probes.request_statuses(host).items()),
        mentions=tuple(left_in(probes.connectors(host), texts, orphans, allowed)),
        open_handles=wirefaults.open_handles(host),
        threads=tuple(sorted(thread.name for thread in threading.enumerate())),
        os_threads=len(os.listdir("/proc/self/task")),
        awaited=tuple(awaited(probes.connectors(host))),
    )


def _wake_for_turns(host: HostedEngine) -> None:
    """An idle engine makes no step when the time of a kept turn ends."""
    from layerpush.compat.patches import our_connectors

    for connector, _ in our_connectors(host.scheduler.connector):
        connector.connector_scheduler._step_is_due = True


def awaited(roots: Mapping[str, Any]) -> Iterator[str]:
    """The state of each prefill process that a load of this D still awaits, of the loads and of the prober."""
    worker = probes.nixl_worker() if roots.get("worker") is not None else None
    if not hasattr(worker, "loads"):
        return
    watch = worker.loads.peers._watch
    for engine_id, engine in list(watch._engines.items()):
        connected = worker.agents_of(engine_id)
        yield f"it awaits {engine_id}, connected to {connected}: {engine} at {time.perf_counter():.1f}"
    for request_id, load in list(worker.loads._open.items()):
        yield f"its load {request_id} is {load.session.state.name}, of {load.address}, ranks {load.ranks}"
    prober = worker._prober
    frame = sys._current_frames().get(getattr(prober._thread, "ident", 0))
    if frame is not None:
        yield f"its prober has {prober._jobs.qsize()} jobs and stands at {traceback.format_stack(frame)}"


def left_in(
    roots: Mapping[str, Any], texts: Sequence[str], orphans: Sequence[str], allowed: Sequence[str]
) -> list[str]:
    """Paths of forbidden mentions of ended requests.

    No table may mention the ids ``texts`` and ``orphans``, except at paths that contain one of ``allowed``. An orphan's
    D has died, so its registration may stay: no D can cancel it.
    """
    found = probes.mentions_in(roots, texts, allowed)
    return found + probes.mentions_in(roots, orphans, (*allowed, WAITING_REGISTRATIONS))


def _known_ids(host: HostedEngine) -> set[str]:
    notebook = _NOTEBOOKS[0]
    known = notebook.failed_loads | notebook.kept
    if host.watch is not None:
        known |= set(host.watch.digests) | set(host.watch._tables) | set(host.watch._registered)
    return known
