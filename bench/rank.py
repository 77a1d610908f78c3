"""The objects of one rank's writer, as ``engine/worker/worker.py`` builds them, without vLLM and without NIXL."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from layerpush.core.config import LayerPushConfig
from layerpush.core.layout import CacheLayout
from layerpush.core.liveness import PeerWatch
from layerpush.core.push_mode import PushMode
from layerpush.decode.loads import Loads
from layerpush.decode.outcomes import Outcomes
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.engine.unreported_aborts import UnreportedAborts
from layerpush.engine.worker.inbox import Inbox
from layerpush.engine.worker.wake import Waker
from layerpush.engine.worker.writer_thread import WriterThread
from layerpush.prefill.claims import Claims
from layerpush.prefill.links import Links
from layerpush.prefill.push import Identity
from layerpush.prefill.pushes import Pushes
from layerpush.prefill.step_events import StepEvents
from layerpush.telemetry.metrics.loop_lag import LoopLag
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.telemetry.trace_file import TraceFile
from layerpush.transport.connections import Connections
from layerpush.transport.idle_connections import IdleConnections
from layerpush.transport.writes import Writes


class Defects(logging.Handler):
    """Exceptions that the product logs instead of raising."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self.seen.append(self.format(record))


class Rank:
    """``worker`` plays vLLM's worker, NIXL (``worker.transport``) and the side channels of other engines. ``base_id``
    strips the suffix of an engine's request id. ``delay``: see ``IdleConnections``.
    """

    def __init__(
        self,
        worker: Any,
        layout: CacheLayout,
        mode: PushMode,
        waker: Waker,
        lag: LoopLag,
        trace: TraceFile,
        base_id: Callable[[str], str] = str,
        delay: Callable[[], float] = float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config, recorder, errors = LayerPushConfig(), Recorder(), PeerErrors(logging.getLogger("bench"))
        self.waker, self.engine_id = waker, worker.engine_id
        self.steps = StepEvents(layout.index_of, waker.wake, None, wake_lazily=waker.wake_lazily)
        connections = Connections(worker, worker.transport, None, worker.search, worker.probe, clock)
        links, writes = Links(worker, connections), Writes(worker.transport, layout, timeout_s=config.write_timeout_s)
        identity, meter = Identity(self.engine_id, 0), PushMeter(recorder)
        self.pushes = Pushes(identity, mode, writes, self.steps, links, trace, meter)
        unknown_s, steps = float(config.unknown_request_timeout_s), self.steps
        self.claims = Claims(self.pushes, connections, worker.probe, errors, base_id, lambda: steps.steps, unknown_s)
        self.pushes.registry = self.claims
        peers = PrefillPeers(worker, connections, PeerWatch(config.peer_timeout_s), worker.probe, recorder)
        outcomes = Outcomes(worker, 0, worker.reported, trace, recorder)
        self.loads = Loads(worker, config.peer_timeout_s, peers, outcomes, errors)
        idle = IdleConnections(self.engine_id, connections, worker.probe, lambda: self.engines_in_use, delay)
        inbox = Inbox(worker.transport, self.claims, self.loads, idle, worker.heartbeat, errors, worker.flush)
        self.timed = (connections, self.claims, self.loads, idle)
        self.writer = WriterThread(worker, waker, lag, inbox, self.pushes, self.loads, self.timed, UnreportedAborts())

    @property
    def engines_in_use(self) -> set[str]:
        return self.pushes.engines_in_use | self.loads.engines_in_use
