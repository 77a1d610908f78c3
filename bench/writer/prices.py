"""Samples of processor time, and the prices that follow from them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.forward.cases import Case
from bench.forward.growth import fit
from bench.forward.models import MODELS

MODEL, TOKENS = "llama-70b-tp8", 2048
LOCKED, UNLOCKED = ("release",), ("make", "transfer", "check")
"""NIXL's calls, by whether they hold Python's lock. The bindings of NIXL 1.5.1 release it in all others."""
CASES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "turns": [{"mode": mode, "requests": requests} for mode in ("layer", "chunk") for requests in (1, 4, 16)],
    "calls": [{"descriptors": count} for count in (1, 16, 64, 256, 1000)],
}

Sampled = Mapping[str, Any]
"""``Samples`` as JSON."""


@dataclass(frozen=True)
class Measure:
    """To P: so many rounds of all ``CASES`` of a part. ``Samples`` of each come back."""

    part: str
    rounds: int
    weight: int


@dataclass(frozen=True)
class Samples:
    """All samples of a case by name: processor seconds, and numbers of WRITEs or polls."""

    case: Mapping[str, Any]
    raw: dict[str, list[float]] = field(default_factory=dict)

    def add(self, taken: Mapping[str, float]) -> None:
        for name, value in taken.items():
            self.raw.setdefault(name, []).append(value)


def step_of(requests: int) -> Case:
    """One step of ``TOKENS`` tokens, as so many equal prompts."""
    model = MODELS[MODEL]
    return Case(MODEL, model.layers, model.block_bytes, TOKENS // requests, "random", requests, TOKENS)


def calls_s(write: Sampled, calls: Sequence[str]) -> float:
    """Median of the processor seconds in these of NIXL's calls for one WRITE."""
    return float(np.median(np.sum([write["raw"][call] for call in calls], axis=0)))


def line(writes: Sequence[Sampled], calls: Sequence[str]) -> dict[str, float]:
    """The price of a WRITE and of a descriptor, by a straight line through the medians."""
    counts = [write["case"]["descriptors"] for write in writes]
    slope, intercept, r2 = fit(counts, [calls_s(write, calls) for write in writes])
    return {"write_s": intercept, "descriptor_s": slope, "r2": r2}


def descriptors(step: Sampled) -> int:
    """The descriptors of each WRITE of a step."""
    whole = step_of(step["case"]["requests"])
    return whole.layers * whole.requests * whole.blocks // int(step["raw"]["writes"][0])


def step_s(step: Sampled, writes: Sequence[Sampled], calls: Sequence[str], joined: int = 1) -> float:
    """Processor seconds of a step: in Python and in these of NIXL's calls, between the medians of measured WRITEs.

    Each WRITE carries the blocks of ``joined`` requests.
    """
    counts, medians = zip(*((each["case"]["descriptors"], calls_s(each, calls)) for each in writes), strict=True)
    of_one = float(np.interp(joined * descriptors(step), counts, medians))
    raw: Mapping[str, Sequence[float]] = step["raw"]
    return statistics.median(raw["turn_s"]) + raw["writes"][0] / joined * of_one
