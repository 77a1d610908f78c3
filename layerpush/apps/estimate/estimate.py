"""The costs of pushes of a model between two engines over a link, by prompt length and mode. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from layerpush.apps.estimate.model import Model, ModelError
from layerpush.apps.estimate.simulation import SimulatedPush, SimulatedWriter
from layerpush.core.push_mode import PushMode

MODES = (PushMode.AUTO, PushMode.LAYER, PushMode.WHOLE)
ENDS = (PushMode.AUTO, PushMode.WHOLE)
PAYS = 0.01
"""By layer pays where it shortens the time to first token by this part at least."""
GPUS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI300X": 1307e12,
}
"""Operations a second with 16 bits, without sparsity, as their vendors give them."""
EFFICIENCY = 0.6
"""The part of these that prefill reaches: measured on an H200 with Llama-3.2-3B (docs/estimate.md)."""


@dataclass(frozen=True)
class Wire:
    """The network card of each rank moves ``rate`` bytes a second. A WRITE takes ``write_s`` seconds besides, and
    ``descriptor_s`` for each of its descriptors: a block of a layer, or a rank's part of one.
    """

    rate: float
    write_s: float = 20e-6
    descriptor_s: float = 0.3e-6


@dataclass(frozen=True)
class Estimate:
    """``ranks`` are the tensor parallel sizes of P and D, ``chunk`` the tokens of a step of P. ``seconds`` of P's
    computation of tokens ``[start, end)``, all layers alike. Raises ``ModelError`` as it is made.
    """

    model: Model
    ranks: tuple[int, int]
    seconds: Callable[[int, int], float]
    wire: Wire
    chunk: int = 8192
    block_tokens: int = 16

    def __post_init__(self) -> None:
        ours, theirs = self.ranks
        if max(ours, theirs) % min(ours, theirs):
            raise ModelError(f"the tensor parallel sizes {ours} and {theirs}: one must be a multiple of the other")
        if theirs > ours and len(self._kinds) > 1 and not self.model.is_latent:
            raise ModelError(
                f"{self.model.name} has several kinds of layers: D needs a tensor parallel size of at most P's"
            )

    @cached_property
    def _kinds(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(set(self.model.kinds)))

    @cached_property
    def _block_bytes(self) -> tuple[int, int]:
        """Bytes of a block of a layer that a rank of P sends, and of the largest part of it in one descriptor. Each
        rank of D gets its block once, and P's ranks share that work evenly.
        """
        ours, theirs = (self.block_tokens * self.model.rank_bytes(ranks) for ranks in self.ranks)
        return theirs * self.ranks[1] // self.ranks[0], min(ours, theirs)

    def push(self, tokens: int, mode: PushMode, wire: Wire | None = None) -> SimulatedPush:
        """One rank's push of a prompt, by a writer that has used the link before."""
        wire, (size, part) = wire or self.wire, self._block_bytes
        rate = wire.rate / max(1, self.ranks[0] // self.ranks[1])  # so many ranks of P share a card of D

        def seconds(written: int, blocks: int) -> float:
            return wire.write_s + written / rate + wire.descriptor_s * blocks * size / part

        kinds = [self.model.kind(kind, self.block_tokens) for kind in self._kinds]
        groups = [self._kinds.index(kind) for kind in self.model.kinds]
        writer = SimulatedWriter(kinds, groups, size, mode, seconds)
        writer.push(min(tokens, self.chunk), self._steps(min(tokens, self.chunk)))
        return writer.push(tokens, self._steps(tokens))

    def _steps(self, tokens: int) -> Iterator[tuple[int, Sequence[float]]]:
        for start in range(0, tokens, self.chunk):
            end, layers = min(tokens, start + self.chunk), self.model.layers
            yield end - start, [self.seconds(start, end) / layers] * layers

    def prompt(self, tokens: int) -> PromptEstimate:
        pushes = {mode: self.push(tokens, mode) for mode in MODES}
        blocks = pushes[PushMode.WHOLE].writes[0].blocks
        return PromptEstimate(self, tokens, blocks * self._block_bytes[0] * self.ranks[0], pushes)


@dataclass(frozen=True)
class PromptEstimate:
    """A prompt of ``tokens``, whose KV has ``bytes`` on the wire, all ranks together."""

    estimate: Estimate
    tokens: int
    bytes: int
    pushes: dict[PushMode, SimulatedPush]

    @property
    def prefill_s(self) -> float:
        return self.pushes[PushMode.AUTO].prefill_s

    def ttft_s(self, mode: PushMode) -> float:
        """Until D has all KV, on idle engines."""
        return self.prefill_s + self.pushes[mode].exposed_s

    @property
    def card_use(self) -> float:
        """The part of D's cards that one P takes which always computes such prompts."""
        return self.keeps_up_from / self.estimate.wire.rate

    @property
    def keeps_up_from(self) -> float:
        """The least rate of D's cards, in bytes a second, for one such P."""
        return self.bytes / self.estimate.ranks[1] / self.prefill_s

    def pays_up_to(self) -> float:
        """The rate of a link, in bytes a second, above which by layer does not pay; infinite if it pays on any link, 0
        if on none. On links that keep up by far, exposed times are straight lines over the seconds of a byte.
        """
        byte_s = 0.1 / self.keeps_up_from
        (auto, whole), (auto_at_once, whole_at_once) = (
            [self.estimate.push(self.tokens, mode, replace(self.estimate.wire, rate=rate)).exposed_s for mode in ENDS]
            for rate in (1 / byte_s, math.inf)
        )
        at_once = PAYS * (self.prefill_s + whole_at_once) - (whole_at_once - auto_at_once)
        slope = ((1 - PAYS) * (whole - whole_at_once) - (auto - auto_at_once)) / byte_s
        return math.inf if at_once <= 0 else max(0.0, slope / at_once)


def of_gpu(model: Model, gpu: str, ranks: int) -> Callable[[int, int], float]:
    """Seconds of P's computation of tokens ``[start, end)`` on ``ranks`` of a GPU of ``GPUS``."""
    return lambda start, end: model.operations(start, end) / (EFFICIENCY * GPUS[gpu] * ranks)


def of_speed(tokens_per_s: float) -> Callable[[int, int], float]:
    """The same at one speed, however long the prompt."""
    return lambda start, end: (end - start) / tokens_per_s
