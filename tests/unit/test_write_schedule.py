"""The rule of the write schedule against a simulated wire."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from layerpush.prefill.write_schedule import SAFETY, Progress, Speeds, layers_to_wait
from layerpush.transport.link_speed import GROWTH
from tests.support.simulated_wire import Case, by_layer, known, push

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
    scheduled, layer = push(case, speed=known(case)), push(case, by_layer)
    allowed = case.write_s + case.jitter * case.layer_s * (1 + case.load)
    assert scheduled.exposed_s <= layer.exposed_s + (1 + case.jitter) * allowed + 1e-9


@given(CASES, st.sampled_from([1 / 3, 3.0]), st.dictionaries(st.integers(0, 80), st.floats(1.0, 5.0), max_size=2))
def test_a_changed_link_exposes_at_most_one_more_write(
    case: Case, wrong_by: float, contended: dict[int, float]
) -> None:
    """The estimate is three times too fast or too slow, or the link slows down in the middle of a prompt."""
    case = replace(case, contended=contended)
    scheduled, layer = push(case, speed=known(case, wrong_by)), push(case, by_layer)
    assert scheduled.exposed_s <= layer.exposed_s + scheduled.largest_s + 1e-9


def test_a_link_at_a_tenth_of_its_load_needs_six_writes() -> None:
    case = Case(layers=32, load=0.1)
    scheduled = push(case, speed=known(case))
    assert [layers for _, _, layers in scheduled.writes] == [1, 23, 5, 1, 1, 1]


@given(CASES.filter(lambda case: case.load <= 0.1 and case.write_s <= 2e-4))
def test_a_fast_link_needs_few_writes(case: Case) -> None:
    scheduled = push(case, speed=known(case))
    ends = 2 if case.chunks > 1 and case.last_part < 1 else 1
    assert len(scheduled.writes) <= case.chunks + ends * 2 * math.log2(case.layers)


@given(CASES.filter(lambda case: SAFETY * case.load >= 1.1), st.sampled_from([1.0, 3.0]))
def test_a_full_link_is_never_idle_while_a_layer_is_ready(case: Case, wrong_by: float) -> None:
    """Jitter puts the estimate of the link off by some percent."""
    assert not push(case, speed=known(case, wrong_by)).idle_while_ready


@given(CASES)
def test_the_rate_of_an_unknown_link_is_learned_within_the_first_prompt(case: Case) -> None:
    scheduled, layer = push(case), push(case, by_layer)
    assert scheduled.exposed_s <= layer.exposed_s + scheduled.largest_s + 1e-9


@given(CASES.filter(lambda case: case.chunks == 1))
@example(Case(layers=80, load=0.02))
def test_the_writes_of_a_new_link_grow_step_by_step(case: Case) -> None:
    """Times of small WRITEs say little of a large one."""
    writes = push(case).writes
    for posted, _, layers in writes[1:]:
        proven = GROWTH * max((earlier for _, landed, earlier in writes if landed <= posted), default=1)
        assert layers <= max(proven, 1)


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
