"""P's steps that vLLM may still take back after they have run. Pure.

Another connector may load KV for a step of P, and report after the step that blocks were lost. vLLM then takes the step
back for each request that has read one of them. A request reads such blocks if they were loaded for it, or if its
prefix-cache hit has blocks that are being loaded for another request. vLLM enters blocks in its prefix cache when it
schedules the step that fills them.

A step is accepted as soon as vLLM has processed its result without taking it back. That comes before vLLM plans the
step ``in_flight`` steps later: it has at most that many steps in flight, and processes them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from layerpush.core.kv_kind import KvKind
from layerpush.core.wire import NULL_BLOCK
from layerpush.engine.scheduler.prefix_hits import Tables


class ProvisionalSteps:
    """``kinds``: the kind of each group's cache. ``in_flight``: vLLM's maximum of steps in flight; at 1 it
    processes each step before it plans the next.
    """

    def __init__(self, kinds: Sequence[KvKind], in_flight: int) -> None:
        self._kinds = tuple(kinds)
        self._in_flight = in_flight
        self._step = 0
        self._loads: dict[int, set[int]] = {}
        """By step, the blocks that another connector loads for it; only of steps that are not accepted."""
        self._awaited: dict[str, int] = {}

    def begin(self) -> list[str]:
        """vLLM plans a step. Returns the requests of ``awaits`` whose steps have been processed since the last call."""
        self._step += 1
        processed = self._step - self._in_flight
        self._loads.pop(processed, None)
        ended = [request_id for request_id, step in self._awaited.items() if step <= processed]
        for request_id in ended:
            del self._awaited[request_id]
        return ended

    def begin_requests(
        self, hits: Mapping[str, int], computed: Mapping[str, int], tables: Callable[[str], Tables]
    ) -> set[str]:
        """Which of these requests begin to run with blocks that may be lost.

        ``hits`` has the tokens that vLLM's own prefix cache had of each; ``computed`` the tokens that the step does not
        compute. Another connector has loaded those in between. Hits and tokens may lie within a block.
        """
        loaded = {request_id for request_id, tokens in hits.items() if computed[request_id] > tokens}
        for request_id in loaded:
            blocks = self._blocks(tables(request_id), hits[request_id], computed[request_id])
            self._loads.setdefault(self._step, set()).update(blocks)
        lost = set().union(*self._loads.values())
        if not lost:
            return loaded
        return loaded | {
            request_id
            for request_id, tokens in hits.items()
            if tokens and not lost.isdisjoint(self._blocks(tables(request_id), 0, tokens))
        }

    def awaits(self, request_id: str) -> None:
        """The step that is being planned computes the end of a prompt. ``begin_requests`` has returned its request."""
        self._awaited[request_id] = self._step

    def forget(self, request_id: str) -> None:
        """The request has ended, or begins anew."""
        self._awaited.pop(request_id, None)

    def _blocks(self, tables: Tables, start: int, end: int) -> Iterator[int]:
        for kind, table in zip(self._kinds, tables, strict=True):
            yield from (block for block in kind.blocks_between(table, start, end) if block != NULL_BLOCK)
