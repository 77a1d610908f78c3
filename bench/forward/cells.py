"""The samples of one case, and its figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from bench.bootstrap import Ratio, ratio_of_medians
from bench.forward.cases import Case

OFF = "off"
"""The same forward with nothing to push."""
HOOK_EDGES_US = (0, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500, 1000, 1_000_000)
HOOK_LIMIT_US = 10.0
SLOWDOWN_LIMIT = 1.03
END_LIMIT = 1.05
LAYERS_TO_HIDE = 16
"""From so many layers on a push by layer is to expose at most two layers of a whole request's transfer."""


@dataclass(frozen=True)
class Delays:
    """By how much a forward takes longer with a push, in the mean over rounds, in parts of the one without.

    ``for_the_lock`` is what is left of it: the thread sleeps, on a CPU for Python's lock, else maybe for its device.
    """

    computing: float
    for_a_core: float
    for_the_lock: float


@dataclass
class Series:
    """Samples of one mode, round by round. Seconds, but for counts.

    ``forward_s`` from before the first step to the end of the last, ``forward_cpu_s`` the processor time of its thread,
    ``forward_queued_s`` how long it could have run and had no core, empty where the system does not say; ``end_s`` from
    the same moment to when the last WRITE had landed; ``exposed_s`` to then from when the last layer was
    ready; ``transfer_s`` how long a WRITE was on its way, ``post_s`` how much of it went into posting; ``writer_s`` and
    ``decode_s`` processor time of P's writer thread and D's process; ``plans`` how the WRITEs went. ``hooks_us`` are
    all calls of all rounds.
    """

    forward_s: list[float] = field(default_factory=list)
    forward_cpu_s: list[float] = field(default_factory=list)
    forward_queued_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    post_s: list[float] = field(default_factory=list)
    arm_s: list[float] = field(default_factory=list)
    writer_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
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

    @property
    def hook_s(self) -> float:
        """Of one forward, all its hooks together; the mean over rounds."""
        return sum(self.hooks_us) * 1e-6 / max(1, len(self.forward_s))

    def hook_percentile(self, percent: float) -> float:
        return float(np.percentile(self.hooks_us, percent))

    def as_json(self) -> dict[str, Any]:
        raw = asdict(self)
        hooks = raw.pop("hooks_us")
        counts, _ = np.histogram(hooks, HOOK_EDGES_US)
        hook = {
            "p50": self.hook_percentile(50),
            "p99": self.hook_percentile(99),
            "max": max(hooks),
            "calls": len(hooks),
            "histogram": {"edges": list(HOOK_EDGES_US), "counts": counts.tolist()},
        }
        return {"hook_us": hook, "raw": raw}


@dataclass(frozen=True)
class Cell:
    """All samples of a case on one link. In a round the modes, and the forward without a push, take turns.

    ``ceiling_s`` are times of one WRITE of one descriptor of ``ceiling_bytes`` bytes, one a round, nothing else going
    on; ``layer_s`` the time of a layer that the forward was made for.
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
        """When the last WRITE can land at the earliest: the slower of forward and transfer overlaps with all of the
        other, but for one layer of one step.
        """
        slower, faster = max(self.wire_s, self.forward_s), min(self.wire_s, self.forward_s)
        return slower + faster / (self.case.layers * len(self.case.steps))

    def rate(self, mode: str) -> float:
        """Bytes a second while at least one WRITE was on its way."""
        return self.case.bytes / self.series[mode].median("transfer_s")

    def end_ratio(self, mode: str) -> float:
        return self.series[mode].median("end_s") / self.bound_s

    def slowdown(self, mode: str) -> Ratio:
        return ratio_of_medians(self.series[mode].forward_s, self.series[OFF].forward_s)

    def delays(self, mode: str) -> Delays | None:
        """Parts of the additional time of the forward; None if the system does not report them."""
        here, off = self.series[mode], self.series[OFF]
        if not here.forward_queued_s or not off.forward_queued_s:
            return None
        clocks = ("forward_s", "forward_cpu_s", "forward_queued_s")
        with_push, without = ([each.mean(name) for name in clocks] for each in (here, off))
        whole, cpu, queued = (more - less for more, less in zip(with_push, without, strict=True))
        return Delays(*(share / without[0] for share in (cpu, queued, whole - cpu - queued)))

    def exposed_ratio(self, mode: str, other: str) -> Ratio:
        return ratio_of_medians(self.series[mode].exposed_s, self.series[other].exposed_s)

    def post_share(self, mode: str) -> float:
        """Of the time that WRITEs were on their way, how much went into posting them."""
        return self.series[mode].median("post_s") / self.series[mode].median("transfer_s")

    @property
    def exposed_limit(self) -> float | None:
        """Limit of exposed time by layer, as a share of a whole request's; None for a slow link or few layers."""
        return 2 / self.case.layers if self.case.layers >= LAYERS_TO_HIDE and self.load <= 1 else None

    @property
    def misses(self) -> list[str]:
        """The limits that pushing by layer is beyond, in words."""
        return list(self._misses()) if "layer" in self.series else []

    def _misses(self) -> Sequence[str]:
        missed = []
        hook, slowdown = self.series["layer"].hook_percentile(50), self.slowdown("layer")
        if hook > HOOK_LIMIT_US:
            missed.append(f"a hook takes {hook:.1f} us")
        if slowdown.ratio > SLOWDOWN_LIMIT:
            sure = " for sure" if slowdown.low > SLOWDOWN_LIMIT else ""
            missed.append(f"the forward takes {slowdown.ratio:.3f} x its time{sure}")
        if self.load > 1 and self.end_ratio("layer") > END_LIMIT:
            missed.append(f"the end comes at {self.end_ratio('layer'):.2f} x its bound")
        if self.exposed_limit is not None and "request" in self.series:
            share = self.exposed_ratio("layer", "request")
            if share.ratio > self.exposed_limit:
                missed.append(f"exposed is {share.ratio:.3f} x a request's, not {self.exposed_limit:.3f}")
        return missed

    def as_json(self) -> dict[str, Any]:
        modes = {}
        for mode in self.modes:
            exposed = {
                f"exposed_of_{other}": asdict(self.exposed_ratio(mode, other)) for other in self.modes if other != mode
            }
            modes[mode] = {
                **{f"{name}_median": self.series[mode].median(name) for name in ("exposed_s", "transfer_s", "end_s")},
                "gb_s": self.rate(mode) / 1e9,
                "of_ceiling": self.rate(mode) / self.ceiling,
                "post_share": self.post_share(mode),
                "slowdown": asdict(self.slowdown(mode)),
                "delays": asdict(delays) if (delays := self.delays(mode)) is not None else None,
                "end_of_bound": self.end_ratio(mode),
                **exposed,
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
