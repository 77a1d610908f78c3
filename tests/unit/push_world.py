"""A session and its surroundings: the moves of an engine, a decode engine and a network, and the rules.

``PushWorld`` plays the scheduler (through the real ``PromptProgress``), the forward pass, the writer and the peer of
one session, keeps its own account in sets of ``(layer, block)``, and checks every action against that account.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from layerpush.core.first_token import Sampled
from layerpush.core.push_mode import MAX_IN_FLIGHT, PushMode
from layerpush.core.step_plan import ChunkPlan, GroupSlice, PromptProgress
from layerpush.core.wire import Registration
from layerpush.core.write import WHOLE, Segment, Write
from layerpush.prefill import push_protocol
from layerpush.prefill.push_protocol import Event, Outcome, State
from layerpush.prefill.push_session import PushSession
from tests.unit.builders import blocks_of, registration, vllm_pairs

Cell = tuple[int, int]
LAYER_BYTES = 10
SAMPLED = Sampled(7, "greedy")


@dataclass(frozen=True)
class Shape:
    """One request: its layers' groups, its groups' block sizes, and the number of blocks that D wants of each group."""

    tokens: int
    layer_groups: tuple[int, ...]
    block_sizes: tuple[int, ...]
    wanted: tuple[int, ...]
    mode: PushMode = PushMode.LAYER
    nulls: tuple[int, ...] = (0, 0, 0)
    """Leading null blocks in each group's table, as a sliding window leaves them."""
    max_in_flight: int = MAX_IN_FLIGHT
    provisional: bool = False
    """The scheduler may take back a step of the first epoch."""
    keeps: bool = False
    """D asks which of the prompt's first tokens have landed."""
    other_blocks: bool = False
    """vLLM cannot push the request whole: the decode engine has another block size."""

    def table(self, group: int, epoch: int) -> list[int]:
        count = blocks_of(self.tokens, self.block_sizes[group])
        nulls = min(count, self.nulls[group])
        return [0] * nulls + [1000 * (epoch + 1) + 100 * group + index for index in range(nulls, count)]

    def targets(self, group: int) -> list[int]:
        return [5000 + 100 * group + index for index in range(self.wanted[group])]


@dataclass
class PushWorld:
    shape: Shape
    session: PushSession = field(init=False)
    epoch: int = 0
    computed: int = 0
    chunks: list[ChunkPlan] = field(default_factory=list)
    unready: set[int] = field(default_factory=set)
    """Layers of the newest chunk that no hook and no sweep has reported."""
    ready: set[Cell] = field(default_factory=set)
    posted: set[Cell] = field(default_factory=set)
    landed: set[Cell] = field(default_factory=set)
    in_flight: dict[int, Write] = field(default_factory=dict)
    ever_posted: int = 0
    registered: bool = False
    finished: bool = False
    gone: bool = False
    """The scheduler has aborted or evicted the request: nothing more comes from it."""
    disturbed: bool = False
    completions: int = 0
    notified: bool = False
    handed_over: list[Registration | None] = field(default_factory=list)
    stock_write_busy: bool = False
    """vLLM's whole WRITE is on the wire."""
    vllm_posts: int = 0
    delivered: bool = False
    cancelled: bool = False
    failures: list[push_protocol.ReportFailure] = field(default_factory=list)
    releases: int = 0
    tokens: int = 0
    outcome: Outcome = "pending"
    failure: str | None = None
    accepted: bool = False
    """The scheduler has accepted every step of the prompt."""
    rewinds: int = 0
    late_rewinds: int = 0
    """Rewinds of steps that a completion rests on."""
    recomputes: bool = False
    """The scheduler has preempted or rewound the request after its completion."""
    rewinds_reported: int = 0
    report: push_protocol.ReportPrefix | None = None
    """The writer is about to tell D of these tokens."""
    told_tokens: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        self.session = PushSession(
            "p-1", shape.layer_groups, [LAYER_BYTES] * len(shape.layer_groups), shape.mode, shape.max_in_flight
        )
        self._progress = PromptProgress("p-1", shape.block_sizes, provisional=shape.provisional)
        self.registration = registration(
            *(shape.targets(group) for group in range(len(shape.block_sizes))),
            sampling="greedy",
            number=int(shape.keeps),
        )

    @property
    def state(self) -> State:
        return self.session.state

    @property
    def running(self) -> bool:
        """The request is in the scheduler's hands and the writer is not inside a notification."""
        return self.revocable and self.state is not State.NOTIFYING

    @property
    def revocable(self) -> bool:
        """The scheduler may take the blocks away, even while the writer is about to send the completion."""
        return not self.finished and not self.gone

    @property
    def is_provisional(self) -> bool:
        return self._progress.provisional and not self.accepted and not self.finished

    @property
    def may_be_rewound(self) -> bool:
        """Another connector may report a lost block. It should do so before the scheduler accepts the step."""
        return self.shape.provisional and self.revocable and bool(self.chunks) and not self.unready

    @property
    def registrable(self) -> bool:
        """No decode engine has registered, and one may: `Pushes.waiting`."""
        return not self.registered and self.state in (State.WAITING, State.WHOLE)

    @property
    def withdrawable(self) -> bool:
        """D may cancel: it has registered, or it registered and cancelled before the request came."""
        return (self.registered or self.state is State.WHOLE) and self.session.accepts(push_protocol.CancelledByD)

    @property
    def pushed_by_vllm(self) -> bool:
        """vLLM may post its WRITE: `Push.is_whole`, and D has registered."""
        return self.state is State.WHOLE and self.registered and self.session.failure is None and not self.vllm_posts

    @property
    def droppable(self) -> bool:
        """The scheduler may still drop the request."""
        return not self.gone

    @property
    def drained_failures(self) -> int:
        return sum(failure.drained for failure in self.failures)

    @property
    def prompt_ready(self) -> bool:
        return self.computed == self.shape.tokens and not self.unready

    @property
    def computed_cells(self) -> set[Cell]:
        """All blocks of the chunks whose layers are all ready."""
        whole = self.chunks[:-1] if self.unready else self.chunks
        cells = set()
        for layer, group in enumerate(self.shape.layer_groups):
            cells |= {(layer, block) for block in range(whole[-1].groups[group].end if whole else 0)}
        return cells

    @property
    def wanted(self) -> set[Cell]:
        """Every block of every layer that must reach the decode engine; null blocks count, but move nothing."""
        cells = set()
        for layer, group in enumerate(self.shape.layer_groups):
            total = blocks_of(self.shape.tokens, self.shape.block_sizes[group])
            cells |= {(layer, block) for block in range(total - self.shape.wanted[group], total)}
        return cells

    def cells_before(self, tokens: int) -> set[Cell]:
        """The wanted blocks of the prompt's first tokens."""
        sizes = [self.shape.block_sizes[group] for group in self.shape.layer_groups]
        return {(layer, block) for layer, block in self.wanted if (block + 1) * sizes[layer] <= tokens}

    def send(self, event: Event) -> None:
        """Deliver one event as the writer does (never to a closed session) and check the actions."""
        if self.state is State.CLOSED:
            return
        before = self.state
        self.waits = isinstance(event, push_protocol.PostReady) and event.wait
        for action in self.session.handle(event, 0.0):
            if isinstance(action, push_protocol.Post):
                assert before is State.STREAMING
                assert self.state is State.STREAMING
                self._check_post(action.write)
            elif isinstance(action, push_protocol.Notify):
                self._check_completion(action)
            elif isinstance(action, push_protocol.PushWhole):
                assert self.finished
                assert not self.ever_posted, "a request whose blocks were posted is never pushed whole"
                assert action.registration == (self.registration if self.registered else None)
                self.handed_over.append(action.registration)
            elif isinstance(action, push_protocol.ReportFailure):
                self._check_failure(action)
            elif isinstance(action, push_protocol.SendFirstToken):
                assert self.finished
                assert not self.drained_failures
                assert action == push_protocol.SendFirstToken(self.registration, SAMPLED.token)
                self.tokens += 1
            elif isinstance(action, push_protocol.ReportPrefix):
                self._check_prefix(action)
            elif isinstance(action, push_protocol.ReportRewind):
                assert self.notified
                assert action.registration == self.registration
                self.rewinds_reported += 1
            elif isinstance(action, push_protocol.Release):
                assert self.finished
                assert not self.gone
                assert not self.in_flight
                assert not self.stock_write_busy, "released under vLLM's WRITE"
                assert self.notified or self.delivered or self.session.failure is not None
                self.releases += 1
        if isinstance(event, push_protocol.PostReady):
            self._check_left(event)
        assert (self.session.outcome, self.session.failure) == (self.outcome, self.failure)
        assert self.session.unposted_bytes >= 0
        assert self.session.chunk_bytes >= 0
        assert self.completions <= 1
        assert self.rewinds_reported == self.late_rewinds
        assert len(self.handed_over) == len(set(self.handed_over))
        assert self.releases <= 1
        assert self.tokens <= 1
        if self.finished and self.registered and self.failure is None:
            assert self.tokens, "D waits for the token"
        whole = {WHOLE.id} if self.stock_write_busy else set()
        assert set(self.session.in_flight) == set(self.in_flight) | whole
        if self.state in (State.CLOSED, State.ABANDONED, State.UNCONFIRMED, State.NOTIFYING, State.NOTIFIED):
            assert not self.in_flight
        if self.state in (State.CLOSED, State.ABANDONED):
            completed = self.notified or self.delivered
            assert self.drained_failures == (self.registered and not completed), "a push completes or fails, and once"
        if self.state in (State.DRAINING, State.REWINDING):
            assert self.in_flight or self.stock_write_busy, "no WRITE to wait for"
        if self.state is State.CLOSED:
            assert self.releases or self.gone
        if self.state is State.UNCONFIRMED:
            assert self.is_provisional, "nothing to wait for"
        if self.state in (State.ABANDONED, State.NOTIFIED):
            assert not self.finished, "the scheduler has finished the request, and waits for its blocks"
        if self.state is State.WHOLE:
            assert self.handed_over[-1] == (self.registration if self.registered else None)

    # The scheduler and the forward pass.

    def plan(self, tokens: int) -> None:
        tables = [self.shape.table(group, self.epoch) for group in range(len(self.shape.block_sizes))]
        chunk = self._progress.advance(self.computed, tokens, self.shape.tokens, tables)
        assert chunk is not None
        self.computed = chunk.end
        self.chunks.append(chunk)
        self.unready = set(range(len(self.shape.layer_groups)))
        self.send(push_protocol.Planned(chunk))

    def hook(self, layer: int) -> None:
        """A layer of the newest chunk is ready. A model may call its hook more than once."""
        self._ready(layer)

    def sweep(self) -> None:
        for layer in sorted(self.unready):
            self._ready(layer)

    def _ready(self, layer: int) -> None:
        chunk = self.chunks[-1]
        self.unready.discard(layer)
        part = chunk.groups[self.shape.layer_groups[layer]]
        self.ready |= {(layer, block) for block in range(part.end)}
        if self.session.accepts(push_protocol.Ready):
            self.send(push_protocol.Ready(self.epoch, chunk.index, layer))

    def stale_hook(self, layer: int) -> None:
        """A layer of an epoch that is over reports late."""
        if self.session.accepts(push_protocol.Ready):
            self.send(push_protocol.Ready(self.epoch - 1, 0, layer))

    def preempt(self, *, announced: bool) -> None:
        """The blocks are gone. Unannounced, the next plan must follow at once."""
        self.epoch += 1
        self._progress.restart()
        self.computed, self.chunks, self.unready = 0, [], set()
        told = self.cells_before(self.told_tokens)
        self.ready, self.posted, self.landed, self.report = set(), {*told}, {*told}, None
        self.accepted = False
        self.late_rewinds += self.notified and not self.recomputes and not announced  # it looks like one
        self.recomputes |= self.notified
        if self.state is State.NOTIFYING:
            self.completions -= 1  # the completion is cancelled before it is sent
        if announced:
            self.send(push_protocol.Preempted())

    def accept(self) -> None:
        """The scheduler has processed the results of all steps of the prompt."""
        self.accepted = True
        if self.session.accepts(push_protocol.ResultsAccepted):
            self.send(push_protocol.ResultsAccepted())

    def rewind(self, *, announced: bool) -> None:
        """The scheduler takes the last step back; the next plan begins a new epoch. It follows at once if unannounced.

        It is as if the blocks were other ones: their bytes are.
        """
        self.epoch += 1
        self._progress._begin_epoch()
        self.computed = self.chunks[-1].start
        self.chunks, self.unready = [], set()
        self.ready, self.posted, self.landed = set(), set(), set()
        self.accepted = False
        self.rewinds += 1
        self.late_rewinds += self.notified and not self.recomputes
        self.recomputes |= self.notified
        if self.state is State.NOTIFYING:
            self.completions -= 1
        if announced:
            self.send(push_protocol.Rewound())

    def expire_early(self) -> None:
        """The scheduler finishes the request, and its lease ends, before the session gets to know either."""
        self.gone = self.disturbed = True
        self._ends("failed", push_protocol.LeaseExpired.reason)
        self.send(push_protocol.LeaseExpired())

    def finish(self) -> None:
        self.finished = True
        self.send(push_protocol.Finished(SAMPLED))

    def drop(self) -> None:
        self.gone = self.disturbed = True
        self.report = None
        event = push_protocol.LeaseExpired() if self.finished else push_protocol.Aborted()
        self._ends("failed" if self.finished else "cancelled", event.reason)
        self.send(event)

    # The peer and the network.

    def register(self) -> None:
        self.registered = True
        self.send(push_protocol.Registered(self.registration))

    def land(self, write: int) -> None:
        landed = self.in_flight.pop(write)
        if landed.epoch == self.epoch:
            self.landed |= cells_of(landed)
        self.send(push_protocol.WriteLanded(write))

    def lose(self, write: int) -> None:
        self.in_flight.pop(write)
        self._fails(push_protocol.WriteLost(write, "cut off"))

    def fail(self) -> None:
        self._fails(push_protocol.Failed("broken"))

    def _fails(self, event: push_protocol.WriteLost | push_protocol.Failed) -> None:
        self.disturbed = True
        is_news = self.outcome == "pending"
        self._ends("failed", event.reason)
        self.send(event)
        assert not is_news or not self.registered or self.failures, "D gets the failure at once"

    def _ends(self, outcome: Outcome, failure: str | None = None) -> None:
        """The first outcome stands."""
        if self.outcome == "pending" and self.state is not State.CLOSED:
            self.outcome, self.failure = outcome, failure

    def confirm_prefix(self) -> None:
        """D may keep these blocks from now on."""
        report, self.report = self.report, None
        assert report is not None
        self.told_tokens = report.tokens
        self.send(push_protocol.PrefixReported(report.chunk))

    def confirm_completion(self) -> None:
        self.notified = True
        self._ends("completed")
        self.send(push_protocol.Notified())

    def push_ended_prompt(self) -> None:
        """In place of vLLM's whole push."""
        tables = [self.shape.table(group, self.epoch) for group in range(len(self.shape.block_sizes))]
        groups = tuple(GroupSlice(0, tuple(table), len(table)) for table in tables)
        whole = ChunkPlan("p-1", self.epoch, 0, 0, self.shape.tokens, self.shape.tokens, groups)
        self.send(push_protocol.Connected(whole=whole))

    def post_whole(self) -> None:
        assert self.handed_over[-1] == self.registration
        self.stock_write_busy = True
        self.vllm_posts += 1
        self.post_whole_to_next_rank()

    def post_whole_to_next_rank(self) -> None:
        self.send(push_protocol.WholePosted())

    def deliver(self, lost: str | None = None) -> None:
        self.stock_write_busy = False
        self.disturbed |= lost is not None
        self.delivered = lost is None and self.state is State.WRITING_WHOLE
        self._ends("completed" if lost is None else "failed", lost)
        whole = WHOLE.id
        self.send(push_protocol.WriteLanded(whole) if lost is None else push_protocol.WriteLost(whole, lost))

    def cancel(self) -> None:
        self.disturbed = self.cancelled = True
        self._ends("cancelled", "the decode engine cancelled its registration")
        self.send(push_protocol.CancelledByD())
        assert self.state in (State.DRAINING, State.ABANDONED, State.CLOSED)

    # The rules.

    def _check_post(self, write: Write) -> None:
        assert write.epoch == self.epoch
        assert {other.epoch for other in self.in_flight.values()} <= {self.epoch}, "an old WRITE is on the wire"
        cells = cells_of(write)
        assert cells, "an empty WRITE"
        assert cells <= self.wanted
        assert not cells & self.posted, "posted twice in one epoch"
        assert cells <= self.ready, "posted before it was ready"
        if not self.shape.mode.by_layer:
            assert cells <= self.computed_cells, "posted in the middle of a chunk"
        assert write.size == LAYER_BYTES * sum(pairs_in(write).values()) == self._bytes(cells)
        if self.waits:
            assert cells & self.computed_cells, "posted in the middle of a chunk that waits"
        for part in write.segments:
            self._check_mapping(part)
        self.posted |= cells
        self.ever_posted += 1
        self.in_flight[write.id] = write
        assert len(self.in_flight) <= self.shape.max_in_flight

    def _check_left(self, event: push_protocol.PostReady) -> None:
        """Blocks that ``PostReady`` leaves unposted wait for the end of their chunk, or for room on the wire."""
        shape = self.shape
        if self.state is State.STREAMING and len(self.in_flight) < shape.max_in_flight:
            left = self.ready & self.wanted - self.posted
            assert not left & self.computed_cells
            assert not shape.mode.by_layer or event.wait or not self._bytes(left)

    def _bytes(self, cells: set[Cell]) -> int:
        """Null blocks count, but move nothing."""
        groups = self.shape.layer_groups
        return LAYER_BYTES * sum(block >= self.shape.nulls[groups[layer]] for layer, block in cells)

    def _check_mapping(self, part: Segment) -> None:
        groups = set(self.shape.layer_groups[part.layers])
        assert groups == {part.group}
        table, targets = self.shape.table(part.group, self.epoch), self.shape.targets(part.group)
        skipped = len(table) - len(targets)
        whole = vllm_pairs(table, targets)[part.first - skipped : part.end - skipped]
        assert list(zip(part.source, part.target, strict=True)) == [pair for pair in whole if pair[0] != 0]
        assert 0 not in part.source + part.target

    def _check_prefix(self, action: push_protocol.ReportPrefix) -> None:
        assert self.state is State.STREAMING
        assert self.shape.keeps
        assert action.registration == self.registration
        assert not self.shape.provisional, "D may keep what the scheduler may take back"
        assert self.told_tokens < action.tokens < self.shape.tokens
        assert self.cells_before(action.tokens) <= self.landed, "D may keep what has not landed"
        assert self.cells_before(action.tokens) > self.cells_before(self.told_tokens), "no news"
        self.report = action

    def _check_completion(self, action: push_protocol.Notify) -> None:
        assert self.state is State.NOTIFYING
        assert action.registration == self.registration
        assert self.prompt_ready
        assert not self.is_provisional, "completed although the scheduler may take a step back"
        assert self.landed == self.wanted, "completed although something is missing"
        assert not self.in_flight
        assert not self.failures, "completed after a reported failure"
        assert not self.cancelled
        self.completions += 1

    def _check_failure(self, action: push_protocol.ReportFailure) -> None:
        assert self.registered
        assert action.registration == self.registration
        assert not self.notified, "failure reported after the completion"
        assert not self.delivered
        assert not self.drained_failures, "a drained failure is the last report"
        if action.drained:
            assert not self.in_flight, "reported as drained with a WRITE on the wire"
            assert not self.stock_write_busy
        else:
            assert self.in_flight or self.stock_write_busy, "no WRITE to warn of"
            assert not self.failures
            assert not self.cancelled, "D cancelled the push, and waits for its end"
        assert (action.reason, action.cancelled) == (self.failure, self.cancelled)
        assert action.epoch == self.session.epoch
        self.failures.append(action)

    def drive_home(self) -> None:
        """Let everything end as well as it still can. No push needs the end of its lease for that."""
        for _ in range(100):
            if self.state is State.STREAMING:
                self.send(push_protocol.PostReady())
            if self.state is State.CLOSED:
                break
            if self.report is not None:
                self.confirm_prefix()
            elif self.state is State.NOTIFYING:
                self.confirm_completion()
            elif self.state is State.CONNECTING:
                self.send(push_protocol.Connected())
            elif self.in_flight:
                self.land(next(iter(self.in_flight)))
            elif self.running and not self.prompt_ready:
                if self.computed < self.shape.tokens and not self.unready:
                    self.plan(self.shape.tokens)
                self.sweep()
            elif self.running and self.is_provisional:
                self.accept()
            elif self.running:
                self.finish()
            elif self.stock_write_busy:
                self.deliver()
            elif self.pushed_by_vllm and self.shape.other_blocks:
                self.push_ended_prompt()
            elif self.pushed_by_vllm:
                self.post_whole()
            else:
                assert self.registrable, f"stuck in {self.state.name}"
                self.register()
        assert self.state is State.CLOSED
        assert not self.in_flight
        assert not self.session.in_flight
        assert self.releases or self.gone
        if not self.disturbed:
            assert self.notified + self.delivered == 1
            assert self.completions + self.vllm_posts == 1
            assert not self.failures


def cells_of(write: Write) -> set[Cell]:
    cells: list[Cell] = []
    for part in write.segments:
        cells += [
            (layer, block) for layer in range(*part.layers.indices(1 << 30)) for block in range(part.first, part.end)
        ]
    assert len(cells) == len(set(cells)), "a WRITE holds a block twice"
    return set(cells)


def pairs_in(write: Write) -> dict[int, int]:
    """The number of block pairs that each layer of a WRITE moves."""
    counts: dict[int, int] = {}
    for part in write.segments:
        for layer in range(*part.layers.indices(1 << 30)):
            counts[layer] = counts.get(layer, 0) + len(part.source)
    return counts
