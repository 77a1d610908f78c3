"""The samples of one case, and its figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from bench.bootstrap import Interval, ratio_of_medians
from bench.forward.cases import Case

OFF = "off"
"""The same forward with nothing to push."""
VERIFY: Mapping[str, float] = {"verify-0.01": 0.01, "verify-1": 1.0}
"""Modes as ``auto``, of which D compares this share of the pushes."""
HOOK_LIMIT_US = 5.0
FORWARD_LIMITS = {OFF: 1.03, "chunk": 1.01}
"""Limits of a forward with ``auto``, as a ratio to a forward without a push and to one with ``chunk``."""
EXPOSED_LIMIT = 1.2
"""Limit of the exposed time of ``auto``, as a ratio to that of ``layer``."""
END_LIMIT = 1.05
LAYERS_TO_HIDE = 16
"""With so many layers or more, a push by layer may expose at most two layers' share of a whole push's exposed time."""


@dataclass(frozen=True)
class Delays:
    """The mean additional time of a forward with a push, by cause, as shares of the forward without one.

    ``for_the_lock`` is the rest: the thread sleeps, on a CPU for Python's lock, else maybe for its device.
    """

    computing: float
    for_a_core: float
    for_the_lock: float


@dataclass
class Series:
    """Samples of one mode, round by round. Times in seconds; ``hooks_us`` has every hook of every round.

    ``forward_s``: from before the first step to the end of the last. ``forward_cpu_s``: processor time of its thread.
    ``forward_queued_s``: time in which that thread waited for a core; empty if the system does not report it.
    ``end_s``: from before the first step until the last WRITE has landed. ``exposed_s``: from the last ready layer
    until then. ``handed_over_s``: from the last ready layer until D has the completion, and has compared KV of
    ``verified`` parts. ``writer_s``: processor time of P's writer thread.
    ``writer_queued_s``: time in which P's writer thread waited for a core, maybe with Python's lock; empty if the
    system does not report it.
    ``plans``: number of WRITEs by plan.
    """

    forward_s: list[float] = field(default_factory=list)
    forward_cpu_s: list[float] = field(default_factory=list)
    forward_queued_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    handed_over_s: list[float] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    writer_s: list[float] = field(default_factory=list)
    writer_queued_s: list[float] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    plans: list[dict[str, int]] = field(default_factory=list)
    hooks_us: list[float] = field(default_factory=list)

    def extend(self, other: Series) -> None:
        """Samples of later rounds."""
        for each in fields(self):
            getattr(self, each.name).extend(getattr(other, each.name))

    def median(self, name: str) -> float:
        return float(np.median(getattr(self, name)))

    def mean(self, name: str) -> float:
        return float(np.mean(getattr(self, name)))

    def hook_percentile(self, percent: float) -> float:
        return float(np.percentile(self.hooks_us, percent))

    def as_json(self) -> dict[str, Any]:
        raw = asdict(self)
        hooks = raw.pop("hooks_us")
        percentiles = {"p50": self.hook_percentile(50), "p99": self.hook_percentile(99)}
        return {"hook_us": {**percentiles, "max": max(hooks), "calls": len(hooks)}, "raw": raw}


@dataclass(frozen=True)
class CaseSamples:
    """All samples of a case on one link. In a round the modes, and the forward without a push, take turns.

    ``ceiling_s`` are times of one WRITE of one descriptor of ``ceiling_bytes`` bytes, one a round, while P and D do
    nothing else.
    """

    link: str
    case: Case
    series: Mapping[str, Series]
    ceiling_bytes: int
    ceiling_s: Sequence[float]

    @property
    def modes(self) -> list[str]:
        return [mode for mode in self.series if mode != OFF]

    @cached_property
    def ceiling(self) -> float:
        """Bytes a second of one descriptor."""
        return self.ceiling_bytes / float(np.median(self.ceiling_s))

    @cached_property
    def wire_s(self) -> float:
        """Seconds of all bytes of the case at the ceiling."""
        return self.case.bytes / self.ceiling

    @cached_property
    def forward_s(self) -> float:
        return self.series[OFF].median("forward_s")

    @property
    def load(self) -> float:
        """Transfer over forward: above 1 the link is the bottleneck."""
        return self.wire_s / self.forward_s

    @cached_property
    def bound_s(self) -> float:
        """The least time until the last WRITE has landed, in seconds. The slower of forward and transfer overlaps with
        all of the other, but for one layer of one step.
        """
        slower, faster = max(self.wire_s, self.forward_s), min(self.wire_s, self.forward_s)
        return slower + faster / (self.case.layers * len(self.case.steps))

    def end_ratio(self, mode: str) -> float:
        return self.series[mode].median("end_s") / self.bound_s

    def slowdown(self, mode: str) -> Interval:
        return self.forward_ratio(mode, OFF)

    def delays(self, mode: str) -> Delays | None:
        """Parts of the additional time of the forward; None if the system does not report them."""
        here, off = self.series[mode], self.series[OFF]
        if not here.forward_queued_s or not off.forward_queued_s:
            return None
        clocks = ("forward_s", "forward_cpu_s", "forward_queued_s")
        with_push, without = ([each.mean(name) for name in clocks] for each in (here, off))
        whole, cpu, queued = (more - less for more, less in zip(with_push, without, strict=True))
        return Delays(*(share / without[0] for share in (cpu, queued, whole - cpu - queued)))

    def exposed_ratio(self, mode: str, other: str) -> Interval:
        return ratio_of_medians(self.series[mode].exposed_s, self.series[other].exposed_s)

    def forward_ratio(self, mode: str, other: str) -> Interval:
        return ratio_of_medians(self.series[mode].forward_s, self.series[other].forward_s)

    @property
    def exposed_limit(self) -> float | None:
        """Limit of exposed time, as a share of a whole request's; None for a slow link or few layers."""
        return 2 / self.case.layers if self.case.layers >= LAYERS_TO_HIDE and self.load <= 1 else None

    @property
    def misses(self) -> list[str]:
        """The limits that ``auto`` exceeds, in words; those of ``layer`` where ``auto`` was not measured."""
        early = next((mode for mode in ("auto", "layer") if mode in self.series), None)
        return [] if early is None else self._misses(early)

    def _misses(self, mode: str) -> list[str]:
        missed = []
        for text, figure, limit in self._limits(mode):
            ratio = figure if isinstance(figure, Interval) else Interval(figure, 0.0, figure)
            if ratio.value > limit:
                sure = ", for sure" if ratio.low > limit else ""
                missed.append(f"{text.format(ratio.value)}, not {limit:.3g}{sure}")
        return missed

    def _limits(self, mode: str) -> Iterator[tuple[str, float | Interval, float]]:
        """Each figure of ``mode``, in words and as a number, and its limit. ``layer`` is compared with no other mode
        that pushes during prefill.
        """
        yield "a hook takes {:.1f} us", self.series[mode].hook_percentile(50), HOOK_LIMIT_US
        yield "the forward takes {:.3f} x its time without a push", self.slowdown(mode), FORWARD_LIMITS[OFF]
        if mode == "auto" and "chunk" in self.series:
            ratio = self.forward_ratio(mode, "chunk")
            yield "the forward takes {:.3f} x its time with chunk", ratio, FORWARD_LIMITS["chunk"]
        if self.load > 1:
            yield "the end comes at {:.3f} x its bound", self.end_ratio(mode), END_LIMIT
        if mode == "auto" and "layer" in self.series:
            yield "exposed is {:.3f} x layer's", self.exposed_ratio(mode, "layer"), EXPOSED_LIMIT
        if self.exposed_limit is not None and "request" in self.series:
            yield "exposed is {:.3f} x request's", self.exposed_ratio(mode, "request"), self.exposed_limit

    def __str__(self) -> str:
        exposed = "  ".join(f"{mode} {1e3 * self.series[mode].median('exposed_s'):.1f}" for mode in self.modes)
        forward = f"forward {1e3 * self.forward_s:.0f} ms, wire {1e3 * self.wire_s:.0f} ms"
        return f"{self.link}  {self.case!s:32} {forward}, exposed ms: {exposed}"

    def as_json(self) -> dict[str, Any]:
        modes = {}
        for mode in self.modes:
            others = [other for other in self.modes if other != mode]
            exposed = {f"exposed_of_{other}": self.exposed_ratio(mode, other).as_json("ratio") for other in others}
            forward = {f"forward_of_{other}": self.forward_ratio(mode, other).as_json("ratio") for other in others}
            modes[mode] = {
                "exposed_s_median": self.series[mode].median("exposed_s"),
                "slowdown": self.slowdown(mode).as_json("ratio"),
                "delays": asdict(delays) if (delays := self.delays(mode)) is not None else None,
                "end_of_bound": self.end_ratio(mode),
                **exposed,
                **forward,
                **self.series[mode].as_json(),
            }
        ceiling = {"bytes": self.ceiling_bytes, "gb_s": self.ceiling / 1e9, "raw_s": list(self.ceiling_s)}
        return {
            "link": self.link,
            **asdict(self.case),
            "blocks": self.case.blocks,
            "steps": len(self.case.steps),
            "bytes": self.case.bytes,
            "ceiling": ceiling,
            "forward_s": self.forward_s,
            "wire_s": self.wire_s,
            "load": self.load,
            "bound_s": self.bound_s,
            "exposed_limit": self.exposed_limit,
            "misses": self.misses,
            "modes": modes,
            OFF: self.series[OFF].as_json(),
        }


def missed(cells: Sequence[CaseSamples]) -> list[str]:
    """The missed limits of all cells, in words."""
    return [f"{cell.link}, {cell.case}: {text}" for cell in cells for text in cell.misses]
