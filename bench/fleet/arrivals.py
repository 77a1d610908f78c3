"""Requests like those of recorded traces: a generator, and the parameters that were fitted to the traces.

The sources are Azure's LLM inference traces of 2023 (AzurePublicDataset, CC BY 4.0) and the conversation trace of
Mooncake's paper (FAST '25, Apache-2.0). A request is a conversation's first turn, or a turn that follows an earlier
one after a pause, with that one's prompt as its prefix. Mooncake's trace names blocks of 512 tokens by their content: a
turn follows the newest one with which it shares more than the first block, which all share. It has that one's whole
prompt as its prefix, where the trace's sometimes shares only a part of it; the shorter of the two then adds a token.

A length or a pause has the trace's values at the ``SHARES`` of all, and lies between two of them on a straight line of
its logarithm. Lengths of prompts and of answers are independent of each other, which they nearly are in the traces
(correlation of the logarithms below 0.1). Arrivals are Poisson at any rate, where those of the traces come in bursts:
``Summary.bursts``.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, quantiles
from typing import NamedTuple

SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
Values = tuple[float, ...]
WINDOW_S = 10.0


class Summary(NamedTuple):
    """Of requests in the order of their times: numbers of tokens, and how they come."""

    per_s: float
    prompt_mean: float
    prompt_p95: float
    answer_mean: float
    shared: float
    """The part of all prompts' tokens that begin an earlier prompt, too."""
    bursts: float
    """The variance of the number of requests in ``WINDOW_S``, divided by its mean; Poisson: 1."""


@dataclass(frozen=True)
class Trace:
    """``follows`` is the share of turns that follow another one. They add ``new`` tokens to its prompt after ``pause``
    seconds.
    """

    about: str
    prompt: Values
    answer: Values
    follows: float = 0.0
    new: Values = ()
    pause: Values = ()


TRACES = {
    "azure-code": Trace(
        "Azure 2023, code",
        prompt=(3, 75, 578, 1469, 2744, 5188, 7303, 7436, 7437),
        answer=(6, 6, 9, 13, 24, 55, 90, 251, 1899),
    ),
    "azure-conversation": Trace(
        "Azure 2023, conversation",
        prompt=(2, 181, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        answer=(7, 41, 85, 129, 395, 424, 451, 601, 1000),
    ),
    "mooncake": Trace(
        "Mooncake, conversation",
        prompt=(891, 897, 1336, 5264, 13056, 25559, 38494, 89868, 126195),
        answer=(1, 10, 156, 350, 472, 597, 698, 1119, 2000),
        follows=0.387,
        new=(1, 1, 187, 454, 900, 4621, 7419, 17221, 91918),
        pause=(1, 30, 66, 123, 264, 483, 615, 1477, 3030),
    ),
}

RECORDED = {
    "azure-code": Summary(2.57, 2048, 7315, 27.9, 0.0, 71.6),
    "azure-conversation": Summary(5.53, 1155, 4083, 211, 0.0, 3.86),
    "mooncake": Summary(3.40, 12035, 39554, 343, 0.374, 2.10),
}
"""The traces themselves."""


@dataclass(frozen=True, order=True)
class Arrival:
    """A request comes ``at`` so many seconds. ``prefix`` is the part of its prompt that an earlier turn had."""

    at: float
    conversation: int
    tokens: int
    answer: int
    prefix: int


def arrivals(trace: Trace, rate: float, begin: float, end: float, draw: random.Random) -> Iterator[Arrival]:
    """Requests in the order of their times, Poisson with ``rate`` a second from ``begin`` to ``end``."""
    later: list[Arrival] = []
    at, conversation = begin, 0
    while at < end:
        at += draw.expovariate(rate * (1 - trace.follows))
        while later and later[0].at < min(at, end):
            turn = heapq.heappop(later)
            yield turn
            _follow(trace, turn, later, draw)
        if at < end:
            conversation += 1
            turn = Arrival(at, conversation, _tokens(trace.prompt, draw), _tokens(trace.answer, draw), 0)
            yield turn
            _follow(trace, turn, later, draw)


def summary(turns: Sequence[Arrival]) -> Summary:
    """Of two requests or more."""
    prompts = [turn.tokens for turn in turns]
    windows = Counter(int((turn.at - turns[0].at) / WINDOW_S) for turn in turns)
    counts = [windows[number] for number in range(max(windows))]  # the last window is not whole
    return Summary(
        len(turns) / (turns[-1].at - turns[0].at),
        fmean(prompts),
        quantiles(prompts, n=20)[-1],
        fmean(turn.answer for turn in turns),
        sum(turn.prefix for turn in turns) / sum(prompts),
        pvariance(counts) / fmean(counts),
    )


def generated(name: str) -> Summary:
    """Of an hour, as the traces are, at the trace's rate."""
    return summary(list(arrivals(TRACES[name], RECORDED[name].per_s, 0.0, 3600.0, random.Random(0))))


def _follow(trace: Trace, turn: Arrival, later: list[Arrival], draw: random.Random) -> None:
    if draw.random() < trace.follows:
        tokens = min(int(trace.prompt[-1]), turn.tokens + _tokens(trace.new, draw))
        at = turn.at + value(trace.pause, draw.random())
        heapq.heappush(later, Arrival(at, turn.conversation, tokens, _tokens(trace.answer, draw), turn.tokens))


def _tokens(values: Values, draw: random.Random) -> int:
    return round(value(values, draw.random()))


def value(values: Values, share: float) -> float:
    """The value below which so large a share of all lies."""
    above = max(1, bisect.bisect_left(SHARES, share))
    low, high = values[above - 1 : above + 1]
    part = (share - SHARES[above - 1]) / (SHARES[above] - SHARES[above - 1])
    return math.exp(math.log(low) + part * math.log(high / low))
