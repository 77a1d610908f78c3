"""Samples of a mode at a prompt length, from the results of any bench. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.bootstrap import Ratio

LOOPBACK = "loopback"
LINK_UNITS = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0, "tbit": 1e3}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]bit)", re.IGNORECASE)


class ResultError(ValueError):
    """A file is no result with a picture; the text gives the reason."""


@dataclass(frozen=True)
class Where:
    """The conditions of a comparison. ``load`` and ``step`` are words, or empty."""

    link: str = LOOPBACK
    load: str = ""
    step: str = ""

    @property
    def gbit(self) -> float | None:
        """Speed of an emulated link, as ``tc`` takes it; None for a real one."""
        found = _RATE.fullmatch(self.link)
        return float(found[1]) * LINK_UNITS[found[2].lower()] if found else None

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.link, self.step, self.load)))


@dataclass(frozen=True)
class Series:
    """Milliseconds of each request, where known; ``exposed_ms`` of requests with a trace.

    ``ratios`` are those of the median time to first token to other modes', with intervals, as in the file.
    """

    where: Where
    mode: str
    tokens: int
    ttft_ms: tuple[float, ...] = ()
    exposed_ms: tuple[float, ...] = ()
    ratios: Mapping[str, Ratio] = field(default_factory=dict)


def of_serve(result: Mapping[str, Any]) -> list[Series]:
    """From the JSON of ``python -m bench.serve``: the requests of a round are a list of their own."""
    return [
        Series(
            _where(cell),
            mode,
            cell["prompt_tokens"],
            _flat(figures["ttft_ms"]),
            _flat(figures["exposed_ms"]),
            _ratios(cell["ratios"].get("ttft_ms", {}), mode),
        )
        for cell in result["cells"]
        for mode, figures in cell["modes"].items()
        if figures["ttft_ms"]
    ]


def of_forward(result: Mapping[str, Any]) -> list[Series]:
    """From the JSON of ``python -m bench.forward``, which has exposed time only."""
    return [
        Series(
            Where(cell["link"], f"{cell['model']}, {cell['ids']} blocks"),
            mode,
            cell["tokens"],
            exposed_ms=tuple(1e3 * each for each in figures["raw"]["exposed_s"]),
        )
        for cell in result["cells"]
        for mode, figures in cell["modes"].items()
    ]


def in_order(series: Iterable[Series]) -> dict[str, list[Series]]:
    """The series by mode, modes in the order of ``series``; the shortest prompt first."""
    modes: dict[str, list[Series]] = {}
    for one in series:
        modes.setdefault(one.mode, []).append(one)
    return {mode: sorted(same, key=lambda one: one.tokens) for mode, same in modes.items()}


def places(series: Sequence[Series]) -> list[Where]:
    """The conditions, slowest link first, those without a known speed last."""
    every = dict.fromkeys(one.where for one in series)
    return sorted(every, key=lambda where: math.inf if where.gbit is None else where.gbit)


def _where(cell: Mapping[str, Any]) -> Where:
    rate, streams, step = cell["request_rate"], cell["concurrency"], cell["max_num_batched_tokens"]
    load = f"{streams} at a time" if rate is None else f"{rate:g} per second"
    return Where(cell["link"], load, "" if step is None else f"{step} tokens a step")


def _flat(figures: Mapping[str, Any] | None) -> tuple[float, ...]:
    return tuple(sample for one in figures["raw"] for sample in one) if figures else ()


def _ratios(ratios: Mapping[str, Mapping[str, float]], mode: str) -> dict[str, Ratio]:
    """The ratios of ``mode`` to other modes, by the other mode."""
    pairs = {tuple(name.split("/")): ratio for name, ratio in ratios.items()}
    return {other: Ratio(**ratio) for (one, other), ratio in pairs.items() if one == mode}
