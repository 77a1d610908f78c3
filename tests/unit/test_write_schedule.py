"""The rule of the write schedule against a simulated wire."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import example, given
from hypothesis import strategies as st

from layerpush.apps.estimate.simulation import SimulatedPush, SimulatedWriter
from layerpush.core.kv_kind import KvKind
from layerpush.core.push_mode import PushMode
from layerpush.prefill.write_schedule import SAFETY, Progress, Speeds, layers_to_wait
from layerpush.transport.link_speed import GROWTH, LinkSpeed

TOKENS = 100
"""Of a chunk; each is a block."""


@dataclass(frozen=True)
class Case:
    """``load`` is the time of a layer's transfer divided by that of its computation. The last chunk of several is
    ``last_part`` as large as the others. ``jitter`` is the share by which layers' and WRITEs' times may differ.
    ``contended`` maps a layer's number to the factor by which the wire is slower from then on.
    """

    layers: int = 32
    chunks: int = 1
    layer_s: float = 5e-3
    block_bytes: int = 10_000
    last_part: float = 1.0
    load: float = 0.1
    write_s: float = 2e-4
    jitter: float = 0.0
    contended: dict[int, float] = field(default_factory=dict)
    seed: int = 0

    def seconds(self, size: float) -> float:
        """Of a WRITE on an undisturbed wire."""
        return self.write_s + size * self.load * self.layer_s / (TOKENS * self.block_bytes)


def know(case: Case, speed: LinkSpeed, wrong_by: float = 1.0) -> None:
    """Let an engine have measured ``case``'s wire, or a wrong speed: ``wrong_by`` times as slow."""
    at = 0.0
    for key, layers in enumerate([1, 4, 1, 4, case.layers]):
        size = layers * TOKENS * case.block_bytes
        speed.write_posted(-1 - key, size, at)
        at += case.seconds(size) * wrong_by
        speed.write_ended(-1 - key, at, landed=True)


def push(case: Case, mode: PushMode = PushMode.AUTO, wrong_by: float | None = None) -> SimulatedPush:
    """A push over ``case``'s wire. ``wrong_by``: see ``know``; None: the link is new."""
    rng, slower, noise = random.Random(case.seed), 1.0, 0.0
    parts = [1.0] * (case.chunks - 1) + [case.last_part if case.chunks > 1 else 1.0]

    def layers(chunk: int) -> Iterator[float]:
        nonlocal slower, noise
        for number in range(chunk * case.layers, (chunk + 1) * case.layers):
            slower, noise = case.contended.get(number, slower), rng.uniform(0, case.jitter)
            yield parts[chunk] * case.layer_s * (1 + rng.uniform(-case.jitter, case.jitter))

    groups, size = [0] * case.layers, case.block_bytes
    writer = SimulatedWriter([KvKind(1)], groups, size, mode, lambda size, _: case.seconds(size) * slower * (1 + noise))
    if wrong_by is not None:
        know(case, writer.link.speed, wrong_by)
    steps = [(round(part * TOKENS), layers(chunk)) for chunk, part in enumerate(parts)]
    return writer.push(sum(tokens for tokens, _ in steps), steps)


def largest_s(done: SimulatedPush) -> float:
    return max(write.landed - write.posted for write in done.writes)


CASES = st.builds(
    Case,
    layers=st.sampled_from([2, 12, 32, 61, 80]),
    chunks=st.sampled_from([1, 2, 5]),
    last_part=st.sampled_from([1.0, 0.25, 0.02]),
    load=st.floats(0.005, 0.3) | st.floats(0.3, 3.0),
    write_s=st.sampled_from([0.0, 2e-4, 1e-3]),
    jitter=st.sampled_from([0.0, 0.1, 0.3]),
    seed=st.integers(0, 1 << 16),
)


@given(CASES)
@example(Case(chunks=2, last_part=0.02, load=0.1))
def test_a_known_link_exposes_no_more_than_by_layer(case: Case) -> None:
    """Except for a WRITE's fixed cost and the jitter of one layer."""
    scheduled, layer = push(case, wrong_by=1.0), push(case, PushMode.LAYER)
    allowed = case.write_s + case.jitter * case.layer_s * (1 + case.load)
    assert scheduled.exposed_s <= layer.exposed_s + (1 + case.jitter) * allowed + 1e-9


@given(CASES, st.sampled_from([1 / 3, 3.0]), st.dictionaries(st.integers(0, 80), st.floats(1.0, 5.0), max_size=2))
def test_a_changed_link_exposes_at_most_one_more_write(
    case: Case, wrong_by: float, contended: dict[int, float]
) -> None:
    """The estimate is three times too fast or too slow, or the link slows down in the middle of a prompt."""
    case = replace(case, contended=contended)
    scheduled, layer = push(case, wrong_by=wrong_by), push(case, PushMode.LAYER)
    assert scheduled.exposed_s <= layer.exposed_s + largest_s(scheduled) + 1e-9


def test_a_link_at_a_tenth_of_its_load_needs_six_writes() -> None:
    case = Case(layers=32, load=0.1)
    scheduled = push(case, wrong_by=1.0)
    assert [write.layers for write in scheduled.writes] == [1, 23, 5, 1, 1, 1]


@given(CASES.filter(lambda case: case.load <= 0.1 and case.write_s <= 2e-4))
def test_a_fast_link_needs_few_writes(case: Case) -> None:
    scheduled = push(case, wrong_by=1.0)
    ends = 2 if case.chunks > 1 and case.last_part < 1 else 1
    assert len(scheduled.writes) <= case.chunks + ends * 2 * math.log2(case.layers)


@given(CASES.filter(lambda case: SAFETY * case.load >= 1.1), st.sampled_from([1.0, 3.0]))
def test_a_full_link_is_never_idle_while_a_layer_is_ready(case: Case, wrong_by: float) -> None:
    """Jitter puts the estimate of the link off by some percent."""
    assert not push(case, wrong_by=wrong_by).idle_while_ready


@given(CASES)
def test_the_rate_of_an_unknown_link_is_learned_within_the_first_prompt(case: Case) -> None:
    scheduled, layer = push(case), push(case, PushMode.LAYER)
    assert scheduled.exposed_s <= layer.exposed_s + largest_s(scheduled) + 1e-9


@given(CASES.filter(lambda case: case.chunks == 1 and case.load <= 1))
@example(Case(layers=80, load=0.02))
def test_the_writes_of_a_new_link_grow_step_by_step(case: Case) -> None:
    """Times of small WRITEs say little of a large one. On a full link too many are in flight, and layers merge."""
    writes = push(case).writes
    for write in writes[1:]:
        proven = GROWTH * max((earlier.layers for earlier in writes if earlier.landed <= write.posted), default=1)
        assert write.layers <= max(proven, 1)


def test_each_prompt_of_a_step_has_a_write_of_its_own() -> None:
    speeds = Speeds(layer_s=1.0, byte_s=0.0, write_s=0.5)
    begun = Progress(
        layers=12, ready=1, writes=1, layer_bytes=80, unposted_bytes=12 * 80, busy_s=0.0, next_part=0.0, probed=True
    )
    assert layers_to_wait(speeds, begun) == 9, "layer 11 of 12 is ready in 10 seconds; the WRITE takes 0.5"
    assert layers_to_wait(speeds, replace(begun, writes=8)) == 6, "8 WRITEs take 4 seconds"
    proven = replace(speeds, proven_bytes=30)
    assert layers_to_wait(proven, begun) == 0, "one layer is too large for one WRITE"
    assert layers_to_wait(proven, replace(begun, writes=8)) == 2, "3 layers are not too large for 8"
