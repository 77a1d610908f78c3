"""Blocks of P's prefix cache that are in memory before a step begins. Pure.

vLLM enters blocks in its prefix cache when it schedules the step that fills them. So a request may hit blocks that this
very step computes, for another request; and the tail of a hit may be a copy that the step itself makes. A hit counts
up to the first such block. The blocks before it were filled by earlier steps. They do not change while the request
holds them: vLLM computes a full block once. States do not count: a step begins with a copy of the one that it hits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from layerpush.core.kv_kind import KvKind
from layerpush.core.wire import NULL_BLOCK

Tables = Sequence[Sequence[int]]
"""A request's block ids in token order, for each KV cache group."""


class PrefixHits:
    """The hits of requests that are not scheduled yet. ``kinds``: the kind of each group's cache."""

    def __init__(self, kinds: Sequence[KvKind]) -> None:
        self._kinds = tuple(kinds)
        self._hits: dict[str, int] = {}

    def put_hit(self, request_id: str, tokens: int) -> None:
        """vLLM's own prefix cache has the first ``tokens`` tokens, in whole blocks. A later lookup replaces it."""
        self._hits[request_id] = tokens

    def hit(self, request_id: str) -> int:
        """The hit of a request that is not scheduled yet, in tokens."""
        return self._hits.get(request_id, 0)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._hits.pop(request_id, None)

    def pop_hits(self, scheduled: Iterable[str]) -> dict[str, int]:
        """The hits of requests that a step schedules, in tokens."""
        return {request_id: self._hits.pop(request_id) for request_id in scheduled if request_id in self._hits}

    def in_memory(
        self,
        hits: Mapping[str, int],
        scheduled: Mapping[str, int],
        computed: Mapping[str, int],
        tables: Callable[[str], Tables],
    ) -> dict[str, int]:
        """For each hit, by request id, the number of leading tokens that were computed before the step.

        The step computes ``scheduled`` tokens of each request, after the first ``computed``. vLLM may use a
        part of a hit only, and compute the rest again. Another connector may load tokens after the hit in this step.
        """
        written: set[int] = set()
        for request_id, tokens in scheduled.items():
            start = min(hits.get(request_id, computed[request_id]), computed[request_id])
            end = computed[request_id] + tokens
            for kind, table in zip(self._kinds, tables(request_id), strict=True):
                if not kind.is_state:
                    written.update(kind.blocks_between(table, start, end))
        written.discard(NULL_BLOCK)
        return {
            request_id: min([tokens, computed[request_id], *self._untouched(tables(request_id), written)])
            for request_id, tokens in hits.items()
        }

    def _untouched(self, tables: Tables, written: set[int]) -> list[int]:
        """For each group, the tokens before the first written block."""
        return [
            next((index for index, block in enumerate(table) if block in written), len(table)) * kind.block_tokens
            for kind, table in zip(self._kinds, tables, strict=True)
            if not kind.is_state
        ]
