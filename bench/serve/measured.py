"""The result of one call of ``vllm bench serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.hand_over import PARTS, HandOver
from bench.serve.plan import Call


class RequestsFailedError(RuntimeError):
    """Not every request was answered: times of the others mean little."""


@dataclass(kw_only=True)
class Measured:
    """Lists have one sample for each request, or one for all of them where only a mean is known; None: not known.

    ``first_token_at`` is in seconds of ``time.perf_counter()``. ``pushed_as`` counts pushes by their mode.
    ``first_tokens`` counts requests by the origin of their first token, if D starts with P's.
    """

    cell: str
    round: int
    mode: str
    argv: list[str]
    duration_s: float
    ttft_ms: list[float]
    first_token_at: list[float]
    tpot_ms: list[float]
    answers: list[str]
    prefill_ms: list[float] | None = None
    exposed_ms: list[float] | None = None
    hand_over_ms: list[float] | None = None
    hand_over_parts_ms: dict[str, list[float]] = field(default_factory=dict)
    pushed_as: dict[str, int] = field(default_factory=dict)
    first_tokens: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def requests_per_s(self) -> list[float]:
        return [len(self.ttft_ms) / self.duration_s]

    @property
    def after_prefill_ms(self) -> list[float] | None:
        """The mean time to first token less the mean prefill time."""
        if self.prefill_ms is None:
            return None
        return [sum(self.ttft_ms) / len(self.ttft_ms) - sum(self.prefill_ms) / len(self.prefill_ms)]

    def add_hand_overs(self, hand_overs: Sequence[HandOver]) -> None:
        """Set the hand-over of each request, or the mean of all, and its parts if they are known."""
        self.hand_over_ms = [each.ms for each in hand_overs]
        if all(each.parts_ms for each in hand_overs):
            self.hand_over_parts_ms = {name: [each.parts_ms[name] for each in hand_overs] for name in PARTS}


def measured(call: Call, argv: Sequence[str], result: Mapping[str, Any]) -> Measured:
    """Read the file that ``--save-result --save-detailed`` wrote. Raises ``RequestsFailedError``."""
    errors = [text.strip().splitlines()[-1] for text in result["errors"] if text.strip()]
    if errors or result["failed"] or not result["completed"]:
        raise RequestsFailedError(
            f"{result['failed']} of {len(result['errors'])} requests of mode {call.mode} failed at {call.cell}"
            + (f": {errors[0]}" if errors else "")
        )
    counts = result["output_lens"]
    spans = zip(result["latencies"], result["ttfts"], counts, strict=True)
    return Measured(
        cell=call.cell.key,
        round=call.round,
        mode=call.mode,
        argv=list(argv),
        duration_s=result["duration"],
        ttft_ms=[1e3 * each for each in result["ttfts"]],
        first_token_at=[sent + ttft for sent, ttft in zip(result["start_times"], result["ttfts"], strict=True)],
        tpot_ms=[1e3 * (whole - first) / (count - 1) for whole, first, count in spans if count > 1],
        answers=result["generated_texts"],
    )
