"""An engine whose device computes behind the host, as a GPU does, with two batches in flight."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker import ubatching

from layerpush.compat import early_revocation
from tests.connector.engine import BLOCK_SIZE, NAMES, Engine, pattern
from tests.connector.runners import V2Runner
from tests.support.simulated_stream import SimulatedEvent, SimulatedStream
from tests.support.writer_turns import WriterTurns

GENERATED = -2.0
"""The KV of a generated token."""


class LateEngine(Engine):
    """``step`` is vLLM's ``step_with_batch_queue``: the host schedules a step before it knows the one before.

    The model's kernels are work of ``stream``. It goes on only after the writer thread has made whole turns, and after
    each WRITE of these turns has left the memory: a WRITE that does not wait for the stream reads stale bytes.

    ``hooks``: the layers that call their hook. ``microbatches``: parts of a step, as vLLM numbers them; each layer
    calls its hook for each. A step of one token is not split.
    A step of a request that begins behind its prompt's first token reads the KV before it. ``wrong`` has those reads
    that found other bytes than the prompt's.
    """

    BATCHES = 2

    def __init__(
        self,
        config: VllmConfig,
        port: int,
        *,
        stream: SimulatedStream,
        draw: random.Random,
        hooks: Iterable[str] = NAMES,
        drafted: tuple[str, ...] = (),
        microbatches: int = 1,
    ) -> None:
        config.scheduler_config.async_scheduling = True
        self.stream = stream
        self.reads = 0
        self.wrong: list[str] = []
        self._draw, self._hooks, self._microbatches = draw, list(hooks), microbatches
        self._batches: deque[tuple[SchedulerOutput, list[str], KVConnectorOutput, SimulatedEvent]] = deque()
        config.parallel_config.ubatch_size = microbatches if microbatches > 1 else 0
        super().__init__(config, port, runner=partial(V2Runner, drafted=drafted))
        assert isinstance(self.runner, V2Runner)
        self.runner.after_forward = self._sample
        self.worker.connector_worker.step_events.drafted = frozenset(drafted)
        self._turns = WriterTurns(self.worker.connector_worker)

    @property
    def is_idle(self) -> bool:
        return not self._batches and not self.scheduler.has_requests()

    def step(self, *_: Any, **__: Any) -> SchedulerOutput | None:
        output = None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._batches.append(self._begun(output))
            if len(self._batches) < self.BATCHES:
                return output
        if self._batches:
            self._end_batch()
        return output

    def _begun(self, output: SchedulerOutput) -> tuple[SchedulerOutput, list[str], KVConnectorOutput, SimulatedEvent]:
        ready, forward = self.ready(output), None
        sampled = self._sampled = SimulatedEvent()
        if output.total_num_scheduled_tokens:
            forward = partial(self._forward, output, self._hooks, None)
        with self.stream.as_current(), self.runner._as_group():
            early_revocation.revoke(output.kv_connector_metadata)
            result = self.runner.run(output, forward)
            ubatching._THREAD_ID_TO_CONTEXT.clear()
            if forward is None:
                sampled.record()
        return output, ready, result, sampled

    def _end_batch(self) -> None:
        output, ready, result, sampled = self._batches.popleft()
        while not sampled.query():
            self._lag()
        self.processed(output, ready, result)

    def _sample(self) -> None:
        """The model's forward is issued. The host may know the step's tokens before the drafter has run."""
        self._sampled.record()
        self._lag()

    def _lag(self) -> None:
        """The writer thread does all that it can; then the device goes on a little."""
        self._turns.let_pass()
        self.stream.run(self._draw.randrange(4))

    def _compute(self, name: str, output: SchedulerOutput) -> None:
        """A microbatch has its share of the step's tokens, request after request."""
        size = -(-output.total_num_scheduled_tokens // self._microbatches)
        for number, first in enumerate(range(0, output.total_num_scheduled_tokens, size)):
            if first and name in self._hooks:
                self.runner.attended(name)
            if size < output.total_num_scheduled_tokens:
                ubatching._THREAD_ID_TO_CONTEXT[threading.get_ident()] = number
            passed = 0
            for request_id, count in output.num_scheduled_tokens.items():
                share = range(max(first - passed, 0), min(first + size - passed, count))
                passed += count
                if share:
                    self._attend(name, request_id, count, share)
            self._lag()

    def _attend(self, name: str, request_id: str, count: int, share: range) -> None:
        """A layer's kernel for these of the ``count`` tokens of a request in the step."""
        request, table, layer = self.requests[request_id], self.blocks(request_id), NAMES.index(name)
        start = request.num_computed_tokens - count
        known = torch.tensor([pattern(layer, *one[::-1]) for one in enumerate(request.prompt_token_ids)])
        if not share.start:
            self.stream.put(partial(self._read, name, request_id, table, known[:start]))
        new = torch.full((len(share),), GENERATED)
        ours = known[start + share.start : start + share.stop]
        new[: len(ours)] = ours
        self.stream.put(partial(self._write, name, table, start + share.start, new))

    def _read(self, name: str, request_id: str, table: list[int], expected: torch.Tensor) -> None:
        if not len(expected):
            return
        self.reads += 1
        found = self._cells(name, table, 0, len(expected))
        same = (found == expected[:, None, None]).flatten(1).all(1)
        if not bool(same.all()):
            self.wrong.append(f"{name} of {request_id}: {(~same).nonzero().flatten().tolist()[:8]} of {len(expected)}")

    def _write(self, name: str, table: list[int], start: int, values: torch.Tensor) -> None:
        positions = torch.arange(start, start + len(values))
        blocks = torch.tensor(table)[positions // BLOCK_SIZE]
        self.caches[name][blocks, :, positions % BLOCK_SIZE] = values[:, None, None]

    def _cells(self, name: str, table: list[int], start: int, end: int) -> torch.Tensor:
        positions = torch.arange(start, end)
        return self.caches[name][torch.tensor(table)[positions // BLOCK_SIZE], :, positions % BLOCK_SIZE]
