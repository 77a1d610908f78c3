"""One worker process of a simulated engine: the product's writer and all its objects, which think that they run.

``Worker`` plays vLLM's worker, the side channels and the threads beside the writer. It gives the writer a turn when the
real loop would: when it is woken, when a part is due, and at the poll that finds a notification or a WRITE's end. Polls
that find nothing are left out. While WRITEs of earlier prompts are on the wire, a step's layers are then looked for
every ``LONGEST_S``.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bench.fleet.presets import ANSWER_S, CONNECT_S, MESSAGE_S, WAKE_S
from bench.rank import Rank
from layerpush.core.layout import CacheLayout, LayerSlots, Region, descriptor_ids, descriptor_offsets
from layerpush.core.liveness import Verdict
from layerpush.core.push_mode import PushMode
from layerpush.core.wire import Registration, encode_completion, read
from layerpush.engine.worker.wake import Waker
from layerpush.prefill.layer_interval import LONGEST_S
from layerpush.prefill.pushes import WRITE_POLL_S
from layerpush.telemetry.metrics.loop_lag import LoopLag
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import PushRecord, Record, WriteRecord
from layerpush.transport.base import Route
from layerpush.transport.idle_connections import PING_EVERY_S
from layerpush.transport.link import Link
from layerpush.transport.peers import Address, Handshake, Peers
from layerpush.transport.peers import Rank as AgentRank
from layerpush.transport.transfer import Transfer

if TYPE_CHECKING:
    from bench.fleet.engines import FleetEngine

HANDSHAKE_TIMEOUT_S, PROBE_TIMEOUT_S = 5.0, 2.0


class Alarm(Waker):
    """Wakes the simulated writer."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def wake(self) -> None:
        self._worker.woken = True
        self._worker.turn_in(WAKE_S)

    def wake_lazily(self) -> None:
        if not self._worker.rank.pushes.polls_layers:
            self.wake()


class Records(TraceFile):
    """Hands the record of each push to the engine."""

    def __init__(self, engine: FleetEngine) -> None:
        super().__init__(None, engine.engine_id, 0)
        self._engine = engine

    def write_record(self, record: Record) -> None:
        if isinstance(record, PushRecord):
            self._engine.fleet.push_ended(record)


class _Stats:
    """vLLM's statistics of transfers."""

    def pushed(self, *_: object) -> None: ...

    def failed(self) -> None: ...


class Worker:
    acknowledges, world_size, tp_rank = False, 1, 0
    transfer_stats = _Stats()

    def __init__(self, engine: FleetEngine, name: str, mode: PushMode, blocks: tuple[int, int]) -> None:
        """``blocks`` of P's and of D's KV cache."""
        self.engine, self.engine_id, self.clock = engine, engine.engine_id, engine.fleet.clock
        model, (ours, self._theirs) = engine.fleet.model, blocks
        own = ours if engine.is_prefill else self._theirs
        self.transport = engine.fleet.endpoint(name, self, model.layers, own)
        self.peers, self.connected = Peers(), dict[str, str]()
        self.woken, self.handshakes = False, 0
        self._due, self._last, self._polled = math.inf, self.clock.now, False
        self._tasks: deque[tuple[str, Callable[[], None]]] = deque()
        self._ended: list[str] = []
        self._whole: dict[int, Registration] = {}
        self._listens_from = self._connects_from = self._probes_from = 0.0
        self._draw = random.Random(name)
        size = model.token_bytes * model.block_tokens
        self._layers = tuple(LayerSlots(f"layers.{layer}", 0, (layer,)) for layer in range(model.layers))
        layout = CacheLayout(self._layers, tuple(Region(layer << 40, size, own) for layer in range(model.layers)))
        delay = partial(self._draw.uniform, 0.0, PING_EVERY_S)
        alarm, records, base_id = Alarm(self), Records(engine), engine.fleet.base_id
        self.rank = Rank(self, layout, mode, alarm, LoopLag(), records, base_id, delay, self.clock.time)
        self.turn_in(0.0)

    # The writer's turns.

    def turn_in(self, seconds: float) -> None:
        at = self.clock.now + seconds
        if at < self._due:
            self._due = at
            self.clock.after(seconds, partial(self._turn, at))

    def _turn(self, at: float) -> None:
        if at == self._due and self.engine.is_alive:
            self._due = math.inf
            self._take_turn()

    def _take_turn(self) -> None:
        woken, self.woken, self._last = self.woken, False, self.clock.now
        writer, now = self.rank.writer, self.clock.now
        writer.turn(woken)
        due = writer.due
        if due == now + WRITE_POLL_S:  # ``write_lands`` takes its place
            others = (at for part in self.rank.timed if (at := part.next_due(now)) is not None)
            due = min(now + LONGEST_S if self.rank.steps.steps[1] else math.inf, *others)
        if due < math.inf:
            self.turn_in(max(due - now, 1e-6))
        if self.transport.inbox:
            self.message_arrived()

    def message_arrived(self) -> None:
        """The writer's next poll for notifications finds it."""
        every = self.rank.writer.poll_s(self.clock.now)
        polls = math.ceil(max(1e-9, self.clock.now - self._last) / every)
        self.turn_in(max(0.0, self._last + polls * every - self.clock.now))

    def write_lands(self) -> None:
        """The last poll before a WRITE's end finds it on the wire."""
        if self.engine.is_alive:
            self.rank.writer.turn(True)
            self._last = self.clock.now

    def write_ended(self) -> None:
        """The next poll finds the end of a WRITE."""
        self.woken = True
        self.turn_in(self._draw.uniform(0.0, WRITE_POLL_S))

    # layerpush.engine.worker.writer_thread, and layerpush.transport.connections.Network

    def tasks(self) -> list[tuple[str, Callable[[], None]]]:
        return [self._tasks.popleft() for _ in range(len(self._tasks))]

    def task(self, task: Callable[[], None]) -> None:
        self._tasks.append(("", task))
        self.rank.waker.wake()

    def ended_requests(self) -> list[str]:
        ended, self._ended = self._ended, []
        return ended

    def deferred_pushes(self) -> tuple[()]:
        return ()

    def engines(self) -> list[str]:
        return list(self.connected)

    def agents_of(self, engine_id: str) -> dict[str, AgentRank]:
        agent = self.connected.get(engine_id)
        return {} if agent is None else {agent: (0, 0)}

    def disconnect(self, engine_id: str) -> None:
        self.connected.pop(engine_id, None)
        self.peers[engine_id].handshake = self.peers[engine_id].link = None

    def end_pushes(self, engine_id: str, reason: str) -> bool:
        self.rank.pushes.fail_engine(engine_id, reason)
        return engine_id not in self.rank.pushes.engines_in_flight

    # Side channels: this engine's thread gives one answer at a time.

    def handshake(self, address: Address) -> Handshake | None:
        if address.engine_id in self.connected:
            return None
        peer = self.peers[address.engine_id]
        if peer.handshake is None:
            peer.handshake = Handshake(Future(), address)
            self.handshakes += 1
            seconds, agent, refused = self._ask(address, HANDSHAKE_TIMEOUT_S)
            self.engine.after(seconds, partial(self._answered, peer.handshake, self.clock.now, agent, refused))
        return peer.handshake

    def _ask(self, address: Address, timeout_s: float) -> tuple[float, str | None, bool]:
        """Seconds until the answer, the agent that it names, and whether nobody listens there."""
        other = self.engine.fleet.engines[address.engine_id]
        if not other.is_alive:
            return 2 * MESSAGE_S, None, True
        now, worker = self.clock.now, other.worker
        worker._listens_from = answered = max(now + MESSAGE_S, worker._listens_from) + ANSWER_S
        if answered - now > timeout_s:
            return timeout_s, None, False
        return answered - now, worker.transport.name, False

    def _answered(self, handshake: Handshake, began: float, agent: str | None, refused: bool) -> None:
        if agent is None:
            self._connected(handshake, began, ConnectionRefusedError() if refused else TimeoutError())
            return
        self._connects_from = max(self.clock.now, self._connects_from) + CONNECT_S
        self.engine.after(self._connects_from - self.clock.now, partial(self._connected, handshake, began, agent))

    def _connected(self, handshake: Handshake, began: float, agent: str | Exception) -> None:
        self.engine.fleet.handshake_ended(self.handshakes, self.clock.now - began)
        self.handshakes -= 1
        engine_id = handshake.address.engine_id
        if isinstance(agent, Exception):
            self.peers[engine_id].handshake = None
            handshake.pending.set_exception(agent)
        else:
            self.connected[engine_id] = agent
            handshake.pending.set_result(None)

    def probe(self, agent: str, _: AgentRank, address: Address, on_verdict: Callable[[Verdict, float], None]) -> None:
        self.engine.fleet.probes += 1
        seconds, found, refused = self._ask(address, PROBE_TIMEOUT_S)
        self._probes_from = max(self.clock.now, self._probes_from) + seconds
        verdict = Verdict.ENDED if refused or found not in (agent, None) else Verdict.UNKNOWN
        verdict = Verdict.SPEAKS_LAYERPUSH if found == agent else verdict
        report = partial(self.task, lambda: on_verdict(verdict, self.clock.now))
        self.engine.after(self._probes_from - self.clock.now, report)

    def search(self, address: Address, on_contact: Callable[[bytes], None]) -> None:
        seconds, found, _ = self._ask(address, PROBE_TIMEOUT_S)
        if found is not None:
            self.engine.after(seconds, partial(self.task, partial(on_contact, found.encode())))

    # layerpush.compat.push_worker.VllmPushWorker

    def discover_link(self, engine_id: str) -> Link:
        route = Route(self.connected[engine_id], 0, "kv", "kv")
        return Link(engine_id, (route,), (self._theirs,) * len(self._layers))

    def push_whole(self, request_id: str, blocks: Sequence[Sequence[int]], data: dict[str, Any]) -> None:
        """As vLLM does it: one WRITE, whose end sends the completion."""
        registration = msgspec.convert(data, Registration)
        targets = registration.local_block_ids[0]
        sources = list(blocks[0])[-len(targets) :]
        slots, now = range(len(self._layers)), self.clock.now
        ours = descriptor_offsets([self.transport.blocks] * len(slots))
        theirs = descriptor_offsets([self._theirs] * len(slots))
        local = descriptor_ids(ours, slots, np.asarray(sources, np.int32))
        remote = descriptor_ids(theirs, slots, np.asarray(targets, np.int32))
        engine_id = registration.decode_engine_id
        handle = self.transport.post_write(Route(self.connected[engine_id], 0, "kv", "kv"), local, remote)
        record = WriteRecord(0, (0, slots[-1]), (0, 0), len(local), 0, now, now)
        self._whole[id(handle)] = registration
        self.rank.pushes.adopt(request_id, Transfer(self.transport, record, handle), engine_id, registration.request_id)

    def whole_write_ended(self, _: str, transfer: Transfer, landed: bool) -> None:
        registration = self._whole.pop(id(transfer.handle))
        agent = self.connected.get(registration.decode_engine_id)
        if landed and agent is not None:
            self.transport.notify(agent, encode_completion(registration.request_id, 1))

    def report_sent(self, request_id: str) -> None:
        self._ended.append(request_id)
        self.engine.after(0.0, partial(self.engine.sent, request_id))

    def loaded(self, completions: Sequence[bytes]) -> None:
        self.engine.loaded(read(completions[0]).request_id)  # type: ignore[union-attr]

    def failed(self, request_id: str) -> None:
        self.engine.failed(request_id)

    def reported(self, news: object) -> None:
        self.engine.reported(news)

    def knows(self, _: str) -> bool:
        return True

    def counts_blocks_like(self, _: str) -> bool:
        return True

    def has_equal_block_size(self, _: str) -> bool:
        return True

    def mismatch(self, *_: object) -> None:
        """The engines fit each other; other facts that are not there: clocks, devices, vLLM's own connections."""

    clock_offset = touch_engine = check_targets = heartbeat = flush = mismatch
