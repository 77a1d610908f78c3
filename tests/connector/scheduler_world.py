"""vLLM's real scheduler with the connector's, as P and as D, under random requests and the reports of scripted ranks.

One seed gives one course. The order of calls is that of vLLM's ``EngineCore``: with two batches a step is scheduled
before the results of the step before are processed, and aborts come between a step's forward and its results.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from layerpush.compat.early_answer import MARK
from layerpush.compat.metadata import ABORTED, LayerwiseMetadata, LoadCancelled, LoadPostponed
from layerpush.compat.worker_report import PushWithdrawn, TurnEnded, WorkerReport
from layerpush.core.load_news import (
    LoadCleared,
    LoadCompleted,
    LoadKept,
    LoadParked,
    LoadQueued,
    LoadToken,
    LoadUnregistered,
)
from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity
from layerpush.core.request_names import Arrived
from tests.connector.engine import BLOCK_SIZE, BLOCKS, block_hasher, cache_config
from tests.connector.request_tables import leftovers

RANKS = 2
IDLE = BLOCKS - 1
"""One is the null block."""
FAMILIES, LONGEST = 3, 9 * BLOCK_SIZE
"""Prompts of one family have a common prefix."""
TOKEN, STOP = 7, 9
ARRIVALS, ARRIVAL_STEPS, LAST_STEPS = 0.7, 50, 300


@dataclass(slots=True)
class RankLoad:
    """A load on one rank. ``blocks``: P may write into them."""

    request_id: str
    message: dict[str, Any]
    blocks: set[int]
    cancelled: str | None = None
    postponed: bool = False


class Rank:
    """A worker of the engine without memory: it takes a step's metadata, and its reports are drawn."""

    def __init__(self, number: int, world: SchedulerWorld) -> None:
        self.number, self._world, self._draw = number, world, world.draw
        self.loads: dict[str, RankLoad] = {}
        self.parked: list[RankLoad] = []
        self.turns: dict[str, tuple[set[int], bool]] = {}
        """The blocks of turns that this rank holds, and whether their time is over."""
        self.pushes: dict[str, set[int]] = {}
        self._news: list[Any] = []
        self._ended: dict[str, bool] = {}
        """Loads that vLLM has not heard of yet as over, and whether they have failed."""
        self._sent: set[str] = set()

    @property
    def is_idle(self) -> bool:
        return not (self.loads or self.parked or self.pushes or self._news or self._ended or self._sent)

    @property
    def in_use(self) -> set[int]:
        """Blocks that an engine of the other role may read or write by now."""
        tables = [load.blocks for load in (*self.loads.values(), *self.parked)]
        return set().union(*tables, *self.pushes.values(), *(blocks for blocks, _ in self.turns.values()))

    def check_unused(self, blocks: set[int], what: str) -> None:
        """Somebody begins to write into these blocks."""
        assert not (used := blocks & self.in_use), f"rank {self.number}: {what}, and another engine uses blocks {used}"

    def take(self, metadata: LayerwiseMetadata) -> None:
        for request_id, message in metadata.push_registrations.items():
            (blocks,) = message["local_block_ids"]
            self.check_unused(set(blocks), f"{request_id} is registered")
            self.loads[request_id] = RankLoad(request_id, message, set(blocks))
            self._world.seen["registered again"] += message.get("attempt", 0) > 0
            prompt = self._world.requests[request_id].num_prompt_tokens
            assert message.get("prefix_tokens", 0) < prompt, f"{request_id}: P computes no token of its prompt"
        turns = {each.request_id for each in metadata.news if isinstance(each, Arrived) and each.prefixes is not None}
        for request_id, (blocks,) in metadata.push_finished_blocks.items():
            if request_id in turns:
                self.turns[request_id] = set(blocks), False
            else:
                self.pushes[request_id] = set(blocks)
        for request_id, until in metadata.reqs_to_send.items():
            if request_id in self.turns and until <= metadata.scheduler_clock:
                self.turns[request_id] = self.turns[request_id][0], True
        for each in metadata.news:
            if isinstance(each, LoadCancelled) and each.request_id in self.loads:
                self.loads[each.request_id].cancelled = each.reason
            if isinstance(each, LoadPostponed) and each.request_id in self.loads:
                self.loads[each.request_id].postponed = True

    def act(self) -> None:
        """What may happen on the rank between two calls of vLLM."""
        for load in list(self.loads.values()):
            if load.cancelled or load.postponed or self._world.is_parked(load.request_id) or self._chance(0.1):
                if self._chance(0.4):
                    self._end(load)
            elif "attempt" in load.message and self._chance(0.3):  # it is D's
                self._news.append(LoadQueued(load.request_id, self._world.held_by_p()))
        for load in [each for each in self.parked if self._chance(0.08)]:
            self.parked.remove(load)
            self._news.append(LoadCleared(load.request_id, self.number))
        for request_id in [each for each, (_, over) in self.turns.items() if self._chance(0.5 if over else 0.02)]:
            self.end_turn(request_id)
        for request_id in [each for each in self.pushes if self._chance(0.3)]:
            del self.pushes[request_id]
            self._sent.add(request_id)
        if self._world.early and self._chance(0.1):
            self._news.append(PushWithdrawn(self._draw.choice(self._world.early)))

    def end_turn(self, request_id: str) -> None:
        del self.turns[request_id]
        self._news.append(TurnEnded(request_id, self.number))

    def report(self) -> KVConnectorOutput:
        ended = {each: failed for each, failed in self._ended.items() if self._chance(0.7)}
        for request_id in ended:
            del self._ended[request_id]
        news, self._news = self._news, []
        sent, self._sent = self._sent, set()
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving=set(ended),
            failed_recving={each for each, failed in ended.items() if failed},
            kv_connector_worker_meta=WorkerReport(news) if news else None,
        )

    def _chance(self, of_one: float) -> bool:
        return self._draw.random() < of_one

    def _end(self, load: RankLoad) -> None:
        del self.loads[load.request_id]
        parked = 9 if self._world.is_parked(load.request_id) else 1
        how = ["loaded"] * 3 + ["failed"] + ["parked"] * parked * (load.cancelled != ABORTED)
        outcome = self._draw.choice(["unregistered"] * 9 * load.postponed + how)
        self._world.seen[outcome] += 1
        self._ended[load.request_id] = outcome != "loaded"
        if outcome == "loaded":
            self._news.append(LoadCompleted(load.request_id, 1.0, "clock"))
            if "sampling" in load.message:
                self._news.append(LoadToken(load.request_id, self._draw.choice([TOKEN, STOP, "late"])))
            return
        kept = self._kept(load) if load.message.get("number") else 0
        self._news.append(LoadKept(load.request_id, kept))
        if outcome == "unregistered":
            self._news.append(LoadUnregistered(load.request_id, self.number))
        if outcome == "parked":
            self._news.append(LoadParked(load.request_id, self.number))
            self.parked.append(load)

    def _kept(self, load: RankLoad) -> int:
        """P writes no more into the blocks of tokens that have landed."""
        tokens = self._world.requests[load.request_id].num_prompt_tokens
        kept = self._draw.choice([0, self._draw.randrange(tokens)])
        (registered,) = load.message["local_block_ids"]
        before = -(-tokens // BLOCK_SIZE) - len(registered)
        load.blocks -= set(registered[: max(0, kept // BLOCK_SIZE - before)])
        return kept


@dataclass
class Batch:
    """A step. ``computed``: tokens of its requests that have KV after it. ``written``: the blocks that it writes."""

    output: SchedulerOutput
    computed: dict[str, int] = field(default_factory=dict)
    sampling: set[str] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


class SchedulerWorld:
    """``run`` plays a course to its end. Raises ``AssertionError`` at the first wrong step. ``seen`` counts events."""

    def __init__(self, config: VllmConfig, seed: int) -> None:
        self.draw = random.Random(seed)
        config.cache_config.num_gpu_blocks = BLOCKS
        is_async = bool(config.scheduler_config.async_scheduling)
        kind = AsyncScheduler if is_async else Scheduler
        self.scheduler = kind(config, cache_config(), StructuredOutputManager(config), BLOCK_SIZE)
        self.ours: Any = self.scheduler.connector.connector_scheduler
        self.ranks = [Rank(number, self) for number in range(RANKS)]
        self.requests: dict[str, Request] = {}
        self.early: list[str] = []
        """P's requests that are answered early."""
        self.seen: Counter[str] = Counter()
        self.ours.first_tokens._count = lambda reason: self.seen.update([f"token: {reason}"])
        self._joined = KVOutputAggregator(RANKS)
        self._batches: deque[Batch] = deque()
        self._depth = 2 if is_async else 1
        self._names: dict[str, set[str]] = {}
        self._computed: dict[str, int] = {}
        """Tokens of each request with KV, by the steps whose results are processed."""
        self._tokens: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._turns: list[tuple[dict[str, Any], list[int]]] = []
        """D's answers, each with the turn's tokens."""

    def held_by_p(self) -> frozenset[str]:
        """Names of prompts whose blocks fill P."""
        held = self.draw.sample(list(self._names), min(2, len(self._names)))
        return frozenset().union(*(self._names[each] for each in held))

    def is_parked(self, request_id: str) -> bool:
        """On a rank. P is silent: the other rank is likely to park its load, as well."""
        return any(load.request_id == request_id for rank in self.ranks for load in rank.parked)

    def run(self) -> None:
        for number in range(ARRIVAL_STEPS):
            self._disturb(f"r{number}")
            self._step()
        for _ in range(LAST_STEPS):
            if not self._batches and not self.scheduler.has_requests():
                return self._check_end()
            self._step()
        raise AssertionError(f"after {LAST_STEPS} steps: {leftovers(self.ours)}")

    # Clients.

    def _disturb(self, request_id: str) -> None:
        if self._chance(ARRIVALS):
            self._arrive(request_id)
        if self._chance(0.08):
            self._abort(list(self.scheduler.requests))
        if self._chance(0.03):
            self.seen["reset"] += 1
            with suppress(RuntimeError):  # a load has blocks; the requests that ran are preempted
                self.scheduler.reset_prefix_cache(reset_running_requests=self._chance(0.5))
        deadlines = self.ours.awaited._deadlines
        if deadlines and self._chance(0.03):
            deadlines[self.draw.choice(list(deadlines))] = 0.0, 0.0

    def _arrive(self, request_id: str) -> None:
        kind = self.draw.choice(["decode"] * 5 + ["prefill", "early", "plain"] + ["returning"] * 2 * bool(self._turns))
        prompt, params, max_tokens = self._prompt(), None, self.draw.randrange(1, 6)
        if kind == "decode":
            params = PrefillIdentity("p", "127.0.0.1", 1, 1).to_decode(f"{request_id}-on-p")
        elif kind != "plain":
            params, max_tokens = dict(TO_PREFILL), 1
        if kind == "early":
            params[MARK] = True
            self.early.append(request_id)
        if kind == "returning":
            turn, text = self.draw.choice(self._turns)
            params = turn | {"remote_engine_id": "d"}
            prompt = text[: self.draw.randrange(BLOCK_SIZE, len(text) + 1)] + self.draw.choice([[], prompt[:50]])
        self.seen[kind] += 1
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[STOP], extra_args={"kv_transfer_params": params}
        )
        sampling.update_from_generation_config({}, None)
        request = Request(request_id, prompt, sampling, None, block_hasher=block_hasher())
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        if kind == "decode":
            self._names[request_id] = self.ours.prompt_names(request)

    def _prompt(self) -> list[int]:
        tokens = self.draw.choice([self.draw.randrange(1, LONGEST), BLOCK_SIZE * self.draw.randrange(1, 10)])
        first, own = 1000 * self.draw.randrange(1, FAMILIES + 1), self.draw.randrange(tokens)
        if self._turns and self._chance(0.2):  # the conversation goes on
            return [*self.draw.choice(self._turns)[1], *range(first, first + 40)]
        return [*range(first, first + own), *range(first + 500, first + 500 + tokens - own)]

    def _abort(self, among: Sequence[str]) -> None:
        if among:
            request_id = self.draw.choice(among)
            for each in self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED):
                self.seen["aborted"] += 1
                self._reasons[each.request_id] = "abort"

    def _chance(self, of_one: float) -> bool:
        return self.draw.random() < of_one

    # The engine's loop.

    def _step(self) -> None:
        if self.scheduler.has_requests():
            self._batches.append(self._scheduled())
            if len(self._batches) < self._depth:
                return
        if self._batches:
            self._process(self._batches.popleft())

    def _scheduled(self) -> Batch:
        batch = Batch(self.scheduler.schedule())
        for request_id, count in batch.output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end, start = request.num_computed_tokens, request.num_computed_tokens - count
            batch.computed[request_id] = end
            if not request.is_prefill_chunk:
                batch.sampling.add(request_id)
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            batch.written.update(table[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
        self.seen["preempted"] += len(batch.output.preempted_req_ids or ())
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        for rank in self.ranks:
            rank.check_unused(batch.written, "a step is scheduled")
            free = {block for block in rank.in_use if not blocks[block].ref_cnt}
            assert not free, f"rank {rank.number}: the blocks {free} are free, and another engine uses them"
        return batch

    def _process(self, batch: Batch) -> None:
        """The ranks run the step, and the scheduler gets its results."""
        results = [self._run(rank, batch) for rank in self.ranks]
        if self._chance(0.2):
            reports = [result.kv_connector_output.kv_connector_worker_meta for result in results]
            self._abort([news.request_id for report in reports if report for news in report.news])
        self._computed |= batch.computed
        outputs = self.scheduler.update_from_output(batch.output, self._joined.aggregate(results))
        for output in [one for each in outputs.values() for one in each.outputs]:
            self._tokens[output.request_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                self._answered(output.request_id, str(output.finish_reason), output.kv_transfer_params)

    def _run(self, rank: Rank, batch: Batch) -> ModelRunnerOutput:
        rank.act()
        rank.check_unused(batch.written, "a step runs")
        rank.take(pickle.loads(pickle.dumps(batch.output.kv_connector_metadata)))
        rank.act()
        ids = list(batch.output.num_scheduled_tokens)
        token = STOP if self._chance(0.2) else TOKEN
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            sampled_token_ids=[[token] if one in batch.sampling else [] for one in ids],
            kv_connector_output=rank.report(),
        )

    def _answered(self, request_id: str, reason: str, params: dict[str, Any] | None) -> None:
        assert request_id not in self._reasons, f"{request_id} ends twice"
        self._reasons[request_id] = reason
        request = self.requests[request_id]
        if params is not None and params["do_remote_decode"]:  # a kept turn
            tokens = params["remote_num_tokens"]
            computed = self._computed.get(request_id, request.num_prompt_tokens)  # P's token alone: no step ran
            assert tokens <= computed, f"{request_id}: a turn's tokens have no KV"
            self.seen["kept"] += 1
            self._turns.append((params, list(request.all_token_ids)[:tokens]))

    # The end.

    def _check_end(self) -> None:
        assert self._reasons.keys() == self.requests.keys()
        assert all(rank.is_idle for rank in self.ranks), "the engine has stopped before its ranks' last reports"
        for request_id, reason in self._reasons.items():
            if reason == "length":
                assert self._tokens[request_id] == self.requests[request_id].max_tokens
        while any(rank.turns for rank in self.ranks):  # their time ends
            for rank in self.ranks:
                for request_id in list(rank.turns):
                    rank.end_turn(request_id)
            self._batches.append(self._scheduled())
            self._process(self._batches.popleft())
        assert leftovers(self.ours) == {}
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == IDLE, f"{IDLE - free} blocks have leaked"
