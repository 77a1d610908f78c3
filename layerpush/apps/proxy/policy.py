"""Policies that choose the instance for a request. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

Policy: TypeAlias = Literal["round_robin", "least_outstanding_tokens", "prefix_affinity"]
FAIR_SHARE = 1.5
SLACK_TOKENS = 8192


class Candidate(Protocol):
    """An instance that could take the request."""

    url: str
    outstanding_tokens: int


def choose(policy: Policy, candidates: Sequence[Candidate], turn: int, prefix: bytes) -> int:
    """The index of the chosen one of ``candidates``, which must not be empty.

    ``turn`` counts the requests so far, ``prefix`` is the beginning of the prompt.
    """
    match policy:
        case "round_robin":
            return round_robin(candidates, turn)
        case "least_outstanding_tokens":
            return least_outstanding_tokens(candidates, turn)
        case "prefix_affinity":
            return prefix_affinity(candidates, turn, prefix)


def round_robin(candidates: Sequence[Candidate], turn: int) -> int:
    """One candidate after the other."""
    return turn % len(candidates)


def least_outstanding_tokens(candidates: Sequence[Candidate], turn: int) -> int:
    """The candidate with the fewest outstanding tokens; equals take turns."""
    order = [(turn + offset) % len(candidates) for offset in range(len(candidates))]
    return min(order, key=lambda index: candidates[index].outstanding_tokens)


def prefix_affinity(candidates: Sequence[Candidate], turn: int, prefix: bytes) -> int:
    """The same candidate for equal prefixes, because its cache has them, unless it has far more work than the others.

    Rendezvous hashing: if an instance goes away, only its own prefixes move. A candidate with more outstanding tokens
    than ``FAIR_SHARE`` times the mean plus ``SLACK_TOKENS`` is passed over for the next choice.
    """
    limit = FAIR_SHARE * sum(candidate.outstanding_tokens for candidate in candidates) / len(candidates) + SLACK_TOKENS
    ranked = sorted(range(len(candidates)), key=lambda index: _affinity(candidates[index].url, prefix), reverse=True)
    for index in ranked:
        if candidates[index].outstanding_tokens <= limit:
            return index
    return least_outstanding_tokens(candidates, turn)


def _affinity(url: str, prefix: bytes) -> bytes:
    return hashlib.blake2b(prefix, key=hashlib.blake2b(url.encode(), digest_size=16).digest(), digest_size=8).digest()
