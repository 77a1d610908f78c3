"""The measured cases: prompts of a geometry with a pattern of block ids, computed in chunks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.forward.draws import PATTERNS, Draw, draw_blocks
from bench.forward.models import BLOCK_TOKENS, MODELS

POOL_FACTOR = 1.25
"""A cache has so many times the blocks of the largest case."""
CHUNK_TOKENS = 2048
RANK_BLOCK, HEADS_BLOCK = MODELS["llama-70b-tp8"].block_bytes, MODELS["llama-8b"].block_bytes
"""Bytes of a block with one KV head, and with eight of them."""
LEAST = {"layers": 16, "blocks": 64, "requests": 1, "ranks": 1}
"""Layers, blocks of a request, requests and D ranks of the cases of a line; one of the four grows."""
GROWN = {
    "layers": (8, 16, 32, 64),
    "blocks": (64, 128, 256, 512),
    "requests": (1, 2, 4, 8, 16),
    "ranks": (1, 2, 4, 8),
}


@dataclass(frozen=True)
class Case:
    """``requests`` prompts of ``tokens`` tokens each, computed together, ``chunk_tokens`` a step in all.

    ``ranks`` ranks of D split each block: each of them gets an equal part of it.
    """

    model: str
    layers: int
    block_bytes: int
    tokens: int
    ids: str
    requests: int = 1
    chunk_tokens: int = CHUNK_TOKENS
    ranks: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of one request in one layer."""
        return -(-self.tokens // BLOCK_TOKENS)

    @property
    def layer_bytes(self) -> int:
        return self.requests * self.blocks * self.block_bytes

    @property
    def bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of a cache for this case; no prompt has block 0."""
        return self.layers * self.block_bytes * (int(POOL_FACTOR * self.requests * self.blocks) + 1)

    @property
    def memory_bytes(self) -> int:
        """Bytes of both caches, and of a layer's KV on both sides."""
        return 2 * (self.cache_bytes + self.layer_bytes)

    @property
    def steps(self) -> tuple[int, ...]:
        """Tokens that each engine step computes of each request."""
        share = max(BLOCK_TOKENS, self.chunk_tokens // self.requests // BLOCK_TOKENS * BLOCK_TOKENS)
        whole, rest = divmod(self.tokens, share)
        return (share,) * whole + ((rest,) if rest else ())

    def draws(self, pool: int, seed: int) -> list[Draw]:
        """Each request's blocks among ``pool`` on each side."""
        key = (seed, self.layers, self.block_bytes, self.blocks, self.requests, sorted(PATTERNS).index(self.ids))
        return draw_blocks(self.ids, self.requests * self.blocks, pool, key).parts(self.requests)

    def __str__(self) -> str:
        several = f"{self.requests} x " if self.requests > 1 else ""
        return f"{self.model} {several}{tokens(self.tokens)} {self.ids}"


@dataclass(frozen=True)
class Growing:
    """One case of a line. Only ``what`` differs along the line. In this case it is ``value``."""

    what: str
    value: int
    case: Case


def known_cases(
    models: Sequence[str],
    lengths: Sequence[int],
    patterns: Sequence[str],
    chunk_tokens: int,
    most: int,
) -> tuple[list[Case], list[Case]]:
    """Cases of up to ``most`` bytes, and the other ones. One geometry after the other."""
    every = [
        Case(name, MODELS[name].layers, MODELS[name].block_bytes, length, ids, 1, chunk_tokens)
        for name, length, ids in itertools.product(models, lengths, patterns)
    ]
    return [case for case in every if case.bytes <= most], [case for case in every if case.bytes > most]


def growing_cases(values: int) -> Iterator[Growing]:
    """Lines of up to ``values`` cases each. All prompts are one chunk, with blocks in any order.

    A block has one KV head. Where ranks grow it has eight, so that up to eight of D's ranks can split them.
    """
    for what, choices in GROWN.items():
        for value in choices[:values]:
            shape = LEAST | {what: value}
            layers, length, requests = shape["layers"], shape["blocks"] * BLOCK_TOKENS, shape["requests"]
            size, ranks = HEADS_BLOCK if what == "ranks" else RANK_BLOCK, shape["ranks"]
            name = f"{layers} layers of {size >> 10} KiB" + (f" to {ranks} ranks" if ranks > 1 else "")
            case = Case(name, layers, size, length, "random", requests, chunk_tokens=requests * length, ranks=ranks)
            yield Growing(what, value, case)


def tokens(count: int) -> str:
    """``4096`` is ``4k``."""
    return f"{count >> 10}k" if count % 1024 == 0 else str(count)
