"""One push on one prefill rank: a session, its WRITEs on the wire, and its record. Writer thread only.

``Pushes`` opens a ``Push`` for each request, holds it in its table, and calls it when the scheduler, the forward
pass, a decode engine or vLLM's push has changed something. The push turns each change into an event for its
session (``handle``) and performs the actions that the session returns: ``ACTIONS`` has one method for each. The result
of an action is the next event, often within the same call.

Ownership:

- The session decides. Only it writes its fields; the push reads them.
- The push owns ``transfers``, its WRITEs on the wire, vLLM's included. The writer calls ``poll`` each turn. A
  WRITE to several decode ranks is over, for the session, when the last of its transfers is.
- The record has the times and the outcome. It goes to the trace when the push is closed.
- ``PushServices`` has the objects that all pushes of a rank use.

The end: ``fail`` is for errors outside the session, and may come at any time. When the session is ``CLOSED`` and no
WRITE is on the wire, the push leaves the writer's table (``PushServices.closed``). It is counted before its blocks are
released: after the release the engine may stop stepping and reporting.

Other threads may read ``in_flight``, the record's ``outcome``, and the session's ``state`` and ``registration``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from layerpush.core.push_mode import LATE_REGISTRATION, PushMode
from layerpush.core.step_plan import ChunkPlan, whole_prompt
from layerpush.core.wire import Registration
from layerpush.core.write import WHOLE, MismatchError
from layerpush.prefill.coverage import CoverageError
from layerpush.prefill.links import Links
from layerpush.prefill.push_protocol import (
    Action,
    CancelledByD,
    Connect,
    Connected,
    Event,
    Failed,
    LinkRefused,
    Notified,
    Notify,
    Post,
    PostReady,
    PrefixReported,
    PushWhole,
    Registered,
    Release,
    ReportFailure,
    ReportPrefix,
    ReportRewind,
    SendFirstToken,
    State,
    WholePosted,
    WriteLanded,
    WriteLost,
)
from layerpush.prefill.push_session import PushSession
from layerpush.prefill.samples import Sample, Sampler
from layerpush.telemetry.defects import logged
from layerpush.telemetry.metrics.pushes import PushMeter
from layerpush.telemetry.trace_file import TraceFile
from layerpush.telemetry.trace_records import ChunkRecord, PushRecord, WriteSums
from layerpush.transport.base import PeerLostError, TransportError, WriteState
from layerpush.transport.link import Link
from layerpush.transport.transfer import Transfer
from layerpush.transport.writes import Writes

logger = logging.getLogger(f"vllm.{__name__}")

BlockIds = tuple[list[int], ...]


class Registry(Protocol):
    """``Claims``, as far as pushes use it. Writer thread."""

    def take_registration(self, request_id: str, now: float) -> Registration | None:
        """The registration that came before its request, if one did."""

    def is_unwanted(self, request_id: str, now: float) -> bool:
        """Whether D cancelled or declined the request, or P refused its registration, before the request was there."""

    def refusal(self, registration: Registration) -> str | None:
        """The reason why nothing may be written to the connected engine for a registration; None if something may."""

    def report_failure(self, report: ReportFailure, now: float) -> None:
        """Report to the decode engine that no completion will come."""

    def send_first_token(self, action: SendFirstToken, now: float) -> None:
        """Send the decode engine the first token, or None if no token fits its request."""

    def push_ended(self, request_id: str, failure: str | None, now: float) -> None:
        """A push is over, or never began. ``failure`` is the reason if no completion was sent."""


@dataclass(frozen=True)
class Identity:
    """The rank that writes, for records. ``fallback`` is the reason why this engine cannot push by layer or chunk.
    ``model`` is the model's name. A step of at most ``captured_tokens`` tokens may replay a CUDA graph.
    """

    engine_id: str
    rank: int
    fallback: str | None = None
    model: str = ""
    captured_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PushServices:
    """The objects that all pushes of one rank use. ``is_revoked`` returns whether a push's blocks have been taken from
    its request; then it has handed the revocation to the push. ``changed`` takes a push whose state or transfers have
    changed, ``closed`` one that is over.
    """

    links: Links
    writes: Writes
    sampler: Sampler | None
    meter: PushMeter
    trace: TraceFile
    is_revoked: Callable[[Push], bool]
    changed: Callable[[Push], None]
    closed: Callable[[Push], None]


class Push:
    """See the module's text. Times are in seconds of ``time.perf_counter``."""

    def __init__(self, session: PushSession, record: PushRecord, registry: Registry, services: PushServices) -> None:
        self.session = session
        self.record = record
        self.request_id = session.request_id
        self.transfers: list[Transfer] = []
        self.blocks: BlockIds = ()
        self.tokens = 0
        """The blocks and the number of tokens of a prompt whose prefill has ended."""
        self.is_turn = False
        """Whether it is a turn that this decode engine keeps. Nobody need ask for it."""
        self.step = 0
        """The last step that computed a chunk of it."""
        self.dirty = True
        """Whether anything has happened since the session last looked for blocks to post."""
        self._waited = False
        self.finished_at: float | None = None
        self.busy_since: float | None = None
        self.transfer_s = 0.0
        """Seconds for which at least one WRITE was on its way."""
        self.written = WriteSums()
        self._registry = registry
        self._services = services
        self.link: Link | None = None
        self._sample: Sample | None = None
        self._losses: dict[int, _Loss] = {}
        self._polled_at = -math.inf

    @property
    def state(self) -> State:
        """The session's state. Any thread."""
        return self.session.state

    @property
    def is_streaming(self) -> bool:
        """Whether layers are written as they become ready."""
        return self.state is State.STREAMING

    @property
    def mode(self) -> PushMode:
        """The mode in which the request is pushed."""
        return self.session.mode

    @property
    def key(self) -> tuple[str, str] | None:
        """The key of its registration, if it has one. Any thread."""
        registration = self.session.registration
        return None if registration is None else registration.key

    def accepts(self, event: type[Event]) -> bool:
        """Whether the session accepts events of this type now."""
        return self.session.accepts(event)

    @property
    def in_flight(self) -> bool:
        """Whether a WRITE reads from the request's blocks. Any thread."""
        return bool(self.transfers)

    @property
    def awaits_peer(self) -> bool:
        """Whether the push waits for a registration or a handshake."""
        if self.is_unclaimed:
            return not self.is_turn
        return self.session.state in (State.CONNECTING, State.WHOLE)

    @property
    def is_unclaimed(self) -> bool:
        """No decode engine has registered yet, and one may."""
        return self.session.state in (State.WAITING, State.WHOLE) and self.session.registration is None

    @property
    def is_whole(self) -> bool:
        """Whether vLLM is to push the request whole, and has posted no WRITE yet."""
        return self.session.state is State.WHOLE

    @property
    def exposed_s(self) -> float | None:
        """``PushRecord.exposed_s`` from the last ready layer, or from the end of prefill if no layer was reported."""
        last_ready = self.record.t_last_ready
        return self.record.exposed_s(self.finished_at if last_ready is None else last_ready)

    # Events.

    def handle(self, event: Event) -> None:
        """Give an event to the session and perform its actions. Raises nothing: an error ends the push."""
        if type(event) is not PostReady:
            self.dirty = True
        try:
            if self.session.state is not State.CLOSED:
                self._act(event)
        except Exception as error:  # noqa: BLE001  a broken invariant ends this push, never the writer thread
            self._fail_by(error, type(event).__name__)
        self._close_if_over()

    def fail(self, reason: str, *, void: bool = False) -> None:
        """End a push for good. Its session reports the failure to D at once, and again after the last WRITE. ``void``:
        D may not keep what it was told of.
        """
        session = self.session
        if session.accepts(Failed):
            if session.failure is None and WHOLE.id not in self._losses:
                self._log_failure(logging.ERROR, reason)
            self._act(Failed(reason, void))
        self._close_if_over()

    def _fail_by(self, error: Exception, what: str) -> None:
        """An exception of ours or of vLLM's ends the push. ``what`` was being done."""
        if isinstance(error, MismatchError | TransportError):
            self.fail(str(error))
            return
        logger.error("push of %s failed on %s", self.request_id, what, exc_info=error)
        self.fail(f"{type(error).__name__}: {error}", void=isinstance(error, CoverageError))

    def chunk_planned(self, chunk: ChunkPlan, step: int, at: float) -> None:
        """Note in the record that a step took up a chunk."""
        self.step = step
        record = self.record
        if chunk.epoch != record.epoch:
            record.restart(chunk.epoch)
        if record.t_first_planned is None:
            record.t_first_planned = at
        record.tokens = chunk.prompt_tokens
        first, end = chunk.groups[0].first, chunk.groups[0].end
        record.chunks.append(ChunkRecord(first, end, at, chunk.cached))

    def register(self, registration: Registration) -> None:
        """A decode engine asks for the request, or a prefill engine for the first tokens of a kept turn."""
        if registration.prefix_tokens:
            self._keep_first(registration.prefix_tokens)
        self.record.t_registered = time.perf_counter()
        self.handle(Registered(registration))

    def _keep_first(self, tokens: int) -> None:
        """Push only the first tokens, which fill as many whole blocks of each group."""
        self.blocks = tuple(group[: len(group) * tokens // self.tokens] for group in self.blocks)
        self.tokens = tokens

    def handshake_ended(self, error: str | None, _at: float) -> None:
        """The handshake that ``_connect`` began is over; ``error`` is the reason of its failure, or None."""
        if self.session.state is not State.CONNECTING:
            return
        if error is not None:
            self.fail(f"handshake with the decode engine failed: {error}")
        elif self.session.registration is not None:
            self._connect(Connect(self.session.registration))

    def begin_whole(self, begin: Callable[[], None]) -> None:
        """Call ``begin``, which has vLLM push the request whole, if that is still to be done."""
        if not self.is_whole:
            return
        try:
            begin()
        except Exception as error:  # noqa: BLE001  vLLM's code may raise anything: this push cannot go on
            self._fail_by(error, "its whole push")

    def adopt(self, transfer: Transfer, decode_engine_id: str, decode_request_id: str) -> None:
        """vLLM has posted one of its whole WRITEs."""
        self.record.decode_engine_id, self.record.decode_request_id = decode_engine_id, decode_request_id
        self._on_the_wire(transfer)
        self.handle(WholePosted())

    def post_ready(self, *, wait: bool) -> None:
        """Post ready blocks, if anything has changed. ``wait``: only those of chunks that are ready in all layers."""
        if self.dirty or (self._waited and not wait):
            self.dirty, self._waited = False, wait
            self.handle(PostReady(wait))

    def poll(self) -> None:
        """Make progress on each WRITE, and fail if one is overdue. Raises errors that a transport must not raise."""
        for transfer in list(self.transfers):
            if self.session.failure is not None:
                transfer.cancel_unposted()
            error: TransportError | None = None
            try:
                state = transfer.poll()
                if transfer.needs_polling and self.link is not None:  # its copies may have ended just now
                    self.link.speed.write_posted_at((self.request_id, transfer.write), transfer.on_wire_at)
                if state is WriteState.PENDING:
                    continue
            except TransportError as failure:
                error = failure
            self._transfer_ended(transfer, error)
        since = min((transfer.record.t_posted for transfer in self.transfers), default=math.inf)
        self._polled_at, timeout_s = time.perf_counter(), self._services.writes.timeout_s
        if self.session.failure is None and self._polled_at - since >= timeout_s:
            self.fail(f"a WRITE is on the wire for more than {timeout_s:g} s (write_timeout_s)")

    # Actions.

    def _act(self, event: Event) -> None:
        actions = self.session.handle(event, time.perf_counter())
        self._services.changed(self)
        for action in actions:
            self.ACTIONS[type(action)](self, action)

    def _connect(self, action: Connect) -> None:
        registration = action.registration
        self.record.decode_request_id = registration.request_id
        self.record.decode_engine_id = registration.decode_engine_id
        links = self._services.links
        try:
            if not links.is_connected(registration):
                links.connect(registration, self.handshake_ended)
                return
            refusal = self._refusal(registration)
            if refusal is not None:
                self.fail(refusal)
                return
            link = self.link = links.to(registration)
        except Exception as error:  # noqa: BLE001  vLLM's code may raise anything: this push cannot go on
            self._fail_by(error, "its connection")
            return
        if link.refusal is not None:
            self.record.fallback = link.refusal
            self.handle(LinkRefused())
        else:
            self._connected(registration, link)

    def _connected(self, registration: Registration, link: Link, whole: ChunkPlan | None = None) -> None:
        sampler = self._services.sampler
        self._sample = None if sampler is None else sampler.sample(registration, link)
        self.handle(Connected(link.replicas, link.pieces, whole))

    def _refusal(self, registration: Registration) -> str | None:
        """The reason why nothing may be written to the connected engine for a registration; None if something may."""
        return self._registry.refusal(registration) or self._services.links.refusal(registration)

    def _post(self, action: Post) -> None:
        assert self.link is not None
        write, speed, posted = action.write, self.link.speed, list[Transfer]()
        try:
            for transfer in self._services.writes.post(write, self.link):
                posted.append(transfer)
                self._on_the_wire(transfer)
        except Exception as error:  # noqa: BLE001  after any error the session must know that this WRITE is lost
            self._note_loss(write.id, f"a WRITE could not be posted: {error}", isinstance(error, PeerLostError))
            self._services.meter.lost()
        if self._sample is not None and write.id not in self._losses:
            sample, self._sample = self._sample, None  # after an error there is none
            with logged("a checksum", self.request_id):
                sample.take_checksums(write, self.session.ready_blocks)
                self._sample = sample
        if posted:
            descriptors = sum(transfer.record.runs or 0 for transfer in posted)
            at = min(transfer.on_wire_at for transfer in posted)
            speed.write_posted((self.request_id, write.id), write.size, at, descriptors)
        elif write.id not in self._losses:  # it moves no blocks: other ranks do, or the decode engine has them
            self.record.t_last_landed = time.perf_counter()
        self._end_write(write.id, seen=time.perf_counter())

    def _notify(self, action: Notify) -> None:
        if self._services.is_revoked(self):
            return
        assert self.link is not None
        try:
            self._services.links.complete(self.link, action.registration, self._sample)
        except TransportError as error:
            if isinstance(error, PeerLostError):
                self._services.links.lost(self.link.engine_id)
            self.fail(f"the completion could not be sent: {error}")
            return
        self.record.t_notified = time.perf_counter()
        self.handle(Notified())

    def _report_prefix(self, action: ReportPrefix) -> None:
        if self._services.is_revoked(self):
            return
        assert self.link is not None
        self._services.links.report_prefix(self.link, action.registration, action.tokens, self._sample)
        self.handle(PrefixReported(action.chunk))

    def _hand_over(self, action: PushWhole) -> None:
        record, registration = self.record, action.registration
        if registration is None:
            registration = self._registry.take_registration(self.request_id, time.perf_counter())
            if registration is not None:
                self._claim(registration)
            elif self._registry.is_unwanted(self.request_id, time.perf_counter()) and self.is_unclaimed:
                self.handle(CancelledByD())
            return
        record.decode_request_id = registration.request_id
        record.decode_engine_id = registration.decode_engine_id
        if record.mode != PushMode.WHOLE and record.fallback is None:
            record.fallback = LATE_REGISTRATION
        record.mode = PushMode.WHOLE
        self._services.links.connect(registration, partial(self._push_whole, registration))

    def _push_whole(self, registration: Registration, error: str | None, _at: float) -> None:
        """The decode engine is connected, or cannot be for the reason ``error``."""
        if not self.is_whole:
            return
        reason = error or self._refusal(registration)
        if reason is not None:
            self.fail(reason)
            return
        self.begin_whole(partial(self._begin_whole, registration))

    def _begin_whole(self, registration: Registration) -> None:
        links = self._services.links
        if links.has_equal_block_size(registration):
            links.push_whole(self.request_id, self.blocks, registration)
            return
        link = self.link = links.to(registration)
        if link.pieces is None:
            raise MismatchError(link.refusal or "its blocks have another size")
        if not self.tokens:
            raise MismatchError("its block size differs, and a window of ours has blocks behind the prompt")
        size = link.pieces.tokens * link.pieces.ours
        whole = whole_prompt(self.request_id, self.session.epoch, self.tokens, size, self.blocks)
        self._connected(registration, link, whole)

    def _report_failure(self, action: ReportFailure) -> None:
        with logged("a failure report", self.request_id):
            self._registry.report_failure(action, time.perf_counter())

    def _report_rewind(self, action: ReportRewind) -> None:
        logger.error(
            "push of %s: vLLM has taken back a step after its completion; %s may have been computed from wrong KV",
            self.request_id,
            action.registration.request_id,
        )
        self._services.meter.rewound()

    def _send_first_token(self, action: SendFirstToken) -> None:
        with logged("a first token", self.request_id):
            self._registry.send_first_token(action, time.perf_counter())

    def _release(self, _: Release) -> None:
        self._account()
        self._services.links.worker.report_sent(self.request_id)

    ACTIONS: ClassVar[dict[type[Action], Callable[..., None]]] = {
        Connect: _connect,
        Post: _post,
        Notify: _notify,
        PushWhole: _hand_over,
        ReportFailure: _report_failure,
        ReportPrefix: _report_prefix,
        ReportRewind: _report_rewind,
        SendFirstToken: _send_first_token,
        Release: _release,
    }

    def _claim(self, registration: Registration) -> None:
        """Take up a registration that came before prefill had ended, unless the push has ended meanwhile."""
        if self.is_unclaimed:
            self.register(registration)
            return
        reason = self.session.failure or "the prefill request has ended"
        self._report_failure(ReportFailure(registration, self.session.epoch, reason, drained=True))

    # Its WRITEs.

    def _on_the_wire(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)
        self._services.changed(self)
        self.note_busy(transfer.record.t_post)
        if self._services.trace.enabled:
            self.record.writes.append(transfer.record)

    def _transfer_ended(self, transfer: Transfer, error: TransportError | None) -> None:
        """A WRITE to one decode rank has landed, or has failed with ``error``."""
        services, record, whole = self._services, transfer.record, transfer.write == WHOLE.id
        self.transfers.remove(transfer)
        services.changed(self)
        if error is None:
            record.t_landed = self.record.t_last_landed = time.perf_counter()
        else:
            self._note_loss(transfer.write, str(error), isinstance(error, PeerLostError))
        try:
            if whole:
                self._whole_write_ended(transfer, landed=error is None)
            elif error is None:
                self.written.write_landed(record)
            if error is None:
                services.meter.landed(record, record.plan, whole=whole)
            elif not transfer.is_cancelled:
                services.meter.lost()
            services.writes.release(transfer)
        except Exception as defect:  # the session must know of the end, or the push would never end
            logger.exception("push of %s: a WRITE that has ended could not be accounted for", self.request_id)
            self._note_loss(transfer.write, f"{type(defect).__name__}: {defect}", peer_lost=False)
        self.note_idle(time.perf_counter())
        self._end_write(transfer.write, seen=max(self._polled_at, record.t_posted))

    def _whole_write_ended(self, transfer: Transfer, *, landed: bool) -> None:
        if not landed:
            why = self._losses[WHOLE.id].reason
            decode_id = self.record.decode_request_id
            logger.error("whole push of %s to %s failed: %s", self.request_id, decode_id, why)
        try:
            self._services.links.worker.whole_write_ended(self.request_id, transfer, landed)
        except Exception as error:  # noqa: BLE001  vLLM's accounts may fail; the session must know of the end
            self._note_loss(WHOLE.id, f"{type(error).__name__}: {error}", peer_lost=False)

    def _note_loss(self, write: int, reason: str, peer_lost: bool) -> None:
        known = self._losses.setdefault(write, _Loss(reason))
        known.peer_lost |= peer_lost

    def _end_write(self, write: int, seen: float) -> None:
        """Give the session the end of a WRITE, if none of its transfers is on the wire any more. ``seen`` is the last
        time at which one was.
        """
        if any(transfer.write == write for transfer in self.transfers):
            return
        loss = self._losses.pop(write, None)
        if self.link is not None and write != WHOLE.id:
            self.link.speed.write_ended((self.request_id, write), time.perf_counter(), landed=loss is None, seen=seen)
        if loss is None:
            self.handle(WriteLanded(write))
            return
        if loss.peer_lost and self.record.decode_engine_id is not None:
            self._services.links.lost(self.record.decode_engine_id)
        if write != WHOLE.id:  # the first loss is logged already
            self._log_failure(logging.ERROR if self.session.failure is None else logging.DEBUG, loss.reason)
        self.handle(WriteLost(write, loss.reason))

    def note_busy(self, at: float) -> None:
        """A WRITE is posted at ``at``, in seconds. Others may be in flight."""
        if self.busy_since is None:
            self.busy_since = at

    def note_idle(self, at: float) -> None:
        """A WRITE has ended at ``at``, in seconds. Others may be in flight."""
        if self.busy_since is not None and not self.in_flight:
            self.transfer_s += at - self.busy_since
            self.busy_since = None

    # Its end.

    def _log_failure(self, level: int, reason: str) -> None:
        logger.log(
            level,
            "push of %s to %s failed: %s; its completion will not be sent",
            self.request_id,
            self.record.decode_request_id,
            reason,
        )

    def _close_if_over(self) -> None:
        if self.session.state is State.CLOSED and not self.in_flight:
            self._account()
            self._services.closed(self)

    def _account(self) -> None:
        """Count a push that has ended, once. Comes before the report to the engine, which may then stop stepping."""
        with logged("its account", self.request_id):
            self._count()

    def _count(self) -> None:
        record = self.record
        if record.outcome != "pending":
            return
        record.outcome, record.reason = self.session.outcome, self.session.failure
        if self.is_turn and record.decode_request_id is None:
            return
        self._services.meter.closed(record, self.exposed_s, self.transfer_s)
        if (record.mode == PushMode.WHOLE and not self.written.bytes) or record.decode_request_id is None:
            return  # vLLM counts its own WRITEs, and requests that no D has wanted
        if record.outcome == "completed" and self.written.bytes:
            self._services.links.worker.transfer_stats.pushed(self.written, self.transfer_s)
        elif record.outcome == "failed":
            self._services.links.worker.transfer_stats.failed()


@dataclass(slots=True)
class _Loss:
    """Why a WRITE did not land: the first reason, and whether the connection was lost on any rank."""

    reason: str
    peer_lost: bool = False
