"""Simulated engines: their schedulers and forward passes. A decode engine's step only takes time."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Protocol

from bench.fleet.presets import LEASE_S, PATIENCE_S
from bench.fleet.worker import Worker
from layerpush.core.first_token import Sampled
from layerpush.core.load_news import LoadCleared, LoadParked
from layerpush.core.request_names import Arrived
from layerpush.core.step_plan import ChunkPlan, PromptProgress, StepPlan
from layerpush.core.wire import PROTOCOL_VERSION, Registration
from layerpush.transport.peers import Address

if TYPE_CHECKING:
    from bench.fleet.fleet import Fleet, FleetRequest

SAMPLING = "greedy"


class ConversationTurn(Protocol):
    """A turn of a conversation."""

    @property
    def conversation(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def prefix(self) -> int: ...


class PrefixCache:
    """The longest prefix of each conversation. It has its own memory, of ``tokens``, and forgets the oldest."""

    def __init__(self, tokens: int, block_tokens: int) -> None:
        self._room, self._block_tokens = tokens, block_tokens
        self._kept: OrderedDict[int, int] = OrderedDict()

    def found(self, request: ConversationTurn) -> int:
        """Tokens of the request's prompt, in whole blocks and without its last token."""
        tokens = min(self._kept.get(request.conversation, 0), request.prefix, request.tokens - 1)
        return tokens // self._block_tokens * self._block_tokens

    def keep(self, request: ConversationTurn) -> None:
        self._room += self._kept.pop(request.conversation, 0) - request.tokens
        self._kept[request.conversation] = request.tokens
        while self._room < 0:
            self._room += self._kept.popitem(last=False)[1]


class FleetEngine:
    """One life of an engine: a restarted engine is another object with the same ``engine_id``."""

    is_prefill: ClassVar[bool]

    def __init__(self, fleet: Fleet, engine_id: str, life: int) -> None:
        self.fleet, self.engine_id, self.is_alive = fleet, engine_id, True
        self.name = f"{engine_id}#{life}"
        self.worker = Worker(self, self.name, fleet.mode, fleet.blocks)
        self.cache = fleet.prefixes(engine_id) if life == 0 else fleet.empty_cache()
        self.load = 0
        """Tokens of the requests that are here."""
        self.free = deque(range(1, fleet.blocks[not self.is_prefill]))

    @property
    def address(self) -> Address:
        return Address(self.engine_id, f"host-of-{self.engine_id}", 5600, 1, notify_only=True)

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """As the clock's, if the engine still lives then."""
        self.fleet.clock.after(seconds, lambda: self.is_alive and call())

    def take(self, request: FleetRequest, tokens: int) -> list[int] | None:
        """Blocks for so many tokens; None if too few are free."""
        count = -(-tokens // self.fleet.model.block_tokens)
        if count > len(self.free):
            return None
        blocks = [self.free.popleft() for _ in range(count)]
        self.worker.transport.owners[blocks] = request.number
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        self.worker.transport.owners[blocks] = 0
        self.free.extend(blocks)

    def sent(self, request_id: str) -> None: ...

    def loaded(self, request_id: str) -> None: ...

    def failed(self, request_id: str) -> None: ...

    def reported(self, news: object) -> None: ...

    @property
    def open_ends(self) -> list[str]:
        """Rule 4: nothing is left when all requests are over."""
        rank, transport = self.worker.rank, self.worker.transport
        left = {
            "loads": len(rank.loads),
            "pushes": len(rank.pushes),
            "claims": rank.claims.pending,
            "handshakes": self.worker.handshakes,
            "WRITEs": sum(map(len, transport.queues.values())),
            "blocks": self.fleet.blocks[not self.is_prefill] - 1 - len(self.free),
        }
        return [f"{count} {what} of {self.name}" for what, count in left.items() if count]


@dataclass(eq=False)
class PrefillRequest:
    """A request in P's scheduler."""

    request: FleetRequest
    request_id: str
    progress: PromptProgress
    blocks: list[int] | None = None
    computed: int = 0

    def __post_init__(self) -> None:
        self._name = self.request.name

    @property
    def is_wanted(self) -> bool:
        """Whether the request waits for this try."""
        return not self.request.is_over and self.request.name == self._name


class PrefillEngine(FleetEngine):
    """First come, first served; a step has tokens of several prompts if they are short."""

    is_prefill = True

    def __init__(self, fleet: Fleet, engine_id: str, life: int) -> None:
        super().__init__(fleet, engine_id, life)
        self.prompts: list[PrefillRequest] = []
        """They wait, or are being computed."""
        self._held: dict[str, PrefillRequest] = {}
        """They are computed: their blocks are held for the push."""
        self._last: list[PrefillRequest] = []
        """The step computes their last chunks."""
        self._arrived: list[Arrived] = []
        self._runs = False

    def submit(self, request: FleetRequest) -> None:
        name = self.fleet.new_id(request)
        prompt = PrefillRequest(request, name, PromptProgress(name, (self.fleet.model.block_tokens,)))
        self.prompts.append(prompt)
        self._arrived.append(Arrived(prompt.request_id, None, request.name))
        self.load += request.tokens
        if not self._runs:
            self.begin_step()

    def begin_step(self) -> None:
        """Take up prompts in their order."""
        claims = self.worker.rank.claims
        chunks, seconds, left = list[ChunkPlan](), 0.0, self.fleet.model.chunk_tokens
        claims.short_of_blocks = False
        for prompt in self.prompts:
            request = prompt.request
            if prompt.blocks is None:
                prompt.blocks = self.take(request, request.tokens)
                if prompt.blocks is None:
                    claims.short_of_blocks = True
                    break
                prompt.computed = self.cache.found(request)
                cached = prompt.progress.plan_cached(prompt.computed, request.tokens, [prompt.blocks])
                chunks += [] if cached is None else [cached]
            tokens = min(left, request.tokens - prompt.computed)
            chunk = prompt.progress.advance(prompt.computed, tokens, request.tokens, [prompt.blocks])
            assert chunk is not None
            chunks.append(chunk)
            seconds += self.fleet.model.seconds(prompt.computed, chunk.end)
            prompt.computed, left = chunk.end, left - tokens
            if not left:
                break
        layers = self.fleet.model.layers
        self.compute(chunks, [seconds / layers] * layers)

    def compute(self, chunks: list[ChunkPlan], layers_s: Sequence[float]) -> None:
        """A step. Each layer takes so many seconds."""
        steps = self.worker.rank.steps
        if self._arrived:
            self.worker.rank.claims.requests_arrived(self._arrived)
            self._arrived = []
        self._runs = bool(chunks)
        steps.arm(StepPlan(tuple(chunks)))
        self._last = [each for each in self.prompts if each.computed == each.request.tokens]
        self.prompts = [each for each in self.prompts if each not in self._last]
        if chunks:
            self.after(layers_s[0], partial(self._layer, 0, layers_s))
        else:
            steps.sweep()

    def _layer(self, number: int, layers_s: Sequence[float]) -> None:
        steps = self.worker.rank.steps
        steps.layer_saved(f"layers.{number}")
        if number + 1 < len(layers_s):
            self.after(layers_s[number + 1], partial(self._layer, number + 1, layers_s))
            return
        steps.sweep()
        self.after(self.fleet.model.step_gap_s, partial(self._step_ended, self._last))

    def _step_ended(self, prompts: list[PrefillRequest]) -> None:
        for prompt in prompts:
            request, blocks = prompt.request, prompt.blocks
            assert blocks is not None
            self._held[prompt.request_id] = prompt
            self.cache.keep(request)
            sampled = Sampled(request.number, SAMPLING)
            self.worker.rank.steps.finish(prompt.request_id, (blocks,), sampled, request.tokens)
            self.after(LEASE_S, partial(self._lease_ends, prompt))
        self.begin_step()

    def _lease_ends(self, prompt: PrefillRequest) -> None:
        """vLLM's heartbeats prolong the lease while D waits."""
        if prompt.request_id not in self._held:
            return
        if prompt.is_wanted or self.worker.rank.pushes.writes_in_flight(prompt.request_id):
            self.after(LEASE_S, partial(self._lease_ends, prompt))
            return
        self.worker.rank.steps.expire(prompt.request_id)
        self.worker.report_sent(prompt.request_id)

    def sent(self, request_id: str) -> None:
        """The push is over: the blocks are free."""
        prompt = self._held.pop(request_id, None)
        if prompt is not None and prompt.blocks is not None:
            self.give_back(prompt.blocks)
            self.load -= prompt.request.tokens
        if not self._runs and self.prompts:
            self.begin_step()


@dataclass(eq=False)
class Loading:
    """A request in D's scheduler. ``blocks`` are those that P writes; ``cached`` tokens are here already."""

    request: FleetRequest
    request_id: str
    prefill: Address
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    is_over: bool = False
    is_parked: bool = False


class DecodeEngine(FleetEngine):
    """It starts requests in their order, as its blocks allow. Its steps take ``decode_s`` while any request decodes."""

    is_prefill = False

    def __init__(self, fleet: Fleet, engine_id: str, life: int) -> None:
        super().__init__(fleet, engine_id, life)
        self._waiting: deque[Loading] = deque()
        self._loads: dict[str, Loading] = {}
        self._decoding = 0
        self._numbers = 0

    @property
    def lost(self) -> list[FleetRequest]:
        """The requests that fail with this engine."""
        loads = (*self._waiting, *self._loads.values())
        return [loading.request for loading in loads if not loading.request.is_over]

    def submit(self, request: FleetRequest, prefill: Address) -> None:
        loading = Loading(request, self.fleet.new_id(request), prefill)
        self._waiting.append(loading)
        self.load += request.tokens + request.answer
        self._place()

    def _place(self) -> None:
        while self._waiting:
            loading = self._waiting[0]
            request = loading.request
            loading.cached = self.cache.found(request)
            blocks = self.take(request, request.tokens - loading.cached)
            if blocks is None:
                return
            self._waiting.popleft()
            loading.blocks, self._loads[loading.request_id] = blocks, loading
            self.worker.transport.landed.reshape(self.fleet.model.layers, -1)[:, blocks] = False
            self.after(self._next_step_s, partial(self.worker.task, partial(self._register, loading)))

    @property
    def _next_step_s(self) -> float:
        """Until the scheduler's next step."""
        return self.fleet.draw.uniform(0.0, self.fleet.model.decode_s) if self._decoding else 0.0

    def _register(self, loading: Loading) -> None:
        self._numbers += 1
        registration = Registration(
            request_id=loading.request_id,
            decode_engine_id=self.engine_id,
            decode_host=self.address.host,
            decode_port=self.address.port,
            decode_tp_size=1,
            local_block_ids=(tuple(loading.blocks),),
            layerpush=PROTOCOL_VERSION,
            prompt_digest=loading.request.name,
            sampling=SAMPLING,
            contact=self.worker.transport.contact(),
            number=self._numbers,
        )
        loads, now = self.worker.rank.loads, self.fleet.clock.now
        loads.register(registration, loading.prefill, {}, now)
        overdue = partial(self._overdue, loading)
        self.after(PATIENCE_S, overdue)

    def _overdue(self, loading: Loading) -> None:
        if not loading.is_over:
            now = self.fleet.clock.now
            self.worker.task(partial(self.worker.rank.loads.time_out, loading.request_id, "overdue", now))

    def _end(self, request_id: str) -> Loading:
        loading = self._loads[request_id]
        self.fleet.rule("1", not loading.is_over, request_id)
        loading.is_over = True
        return loading

    def loaded(self, request_id: str) -> None:
        loading = self._end(request_id)
        landed = self.worker.transport.landed.reshape(self.fleet.model.layers, -1)
        self.fleet.rule("2", bool(landed[:, loading.blocks].all()), request_id)
        self.cache.keep(loading.request)
        self.after(self._next_step_s, partial(self._decode, loading))

    def _decode(self, loading: Loading) -> None:
        """The request starts with P's first token."""
        self._decoding += 1
        self.fleet.first_token(loading.request)
        self.after(loading.request.answer * self.fleet.model.decode_s, partial(self._finished, loading))

    def _finished(self, loading: Loading) -> None:
        self._decoding -= 1
        self._let_go(loading)

    def failed(self, request_id: str) -> None:
        loading = self._end(request_id)
        if not loading.is_parked:
            self._let_go(loading)
        self.fleet.failed(loading.request)

    def reported(self, news: object) -> None:
        match news:
            case LoadParked():
                self._loads[news.request_id].is_parked = True
            case LoadCleared():
                loading = self._loads[news.request_id]
                loading.is_parked = False
                if loading.is_over:
                    self._let_go(loading)

    def _let_go(self, loading: Loading) -> None:
        del self._loads[loading.request_id]
        self.load -= loading.request.tokens + loading.request.answer
        self.give_back(loading.blocks)
        self._place()
