"""The writer's sleep while a step is being computed."""

from __future__ import annotations

import pytest

from layerpush.core.push_mode import PushMode
from layerpush.prefill.layer_interval import LONGEST_S, POLLS_APART, SHORTEST_S, LayerInterval
from layerpush.prefill.pushes import WRITE_POLL_S
from tests.support.fake_transport import Faults
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld

NEVER = 10**6
LAYER_S = 2e-3


def paced(layer_s: float, layers: int = 4) -> LayerInterval:
    pace = LayerInterval()
    for number in range(layers):
        pace.layer_ready(100.0 + number * layer_s)
    return pace


@pytest.mark.parametrize(("layer_s", "seconds"), [(1e-6, SHORTEST_S), (2e-3, POLLS_APART * 2e-3), (1.0, LONGEST_S)])
def test_the_interval_is_a_fraction_of_a_layers_time(layer_s: float, seconds: float) -> None:
    assert paced(layer_s).seconds == pytest.approx(seconds)


def test_one_layer_gives_no_interval() -> None:
    assert paced(LAYER_S, 0).seconds is None
    assert paced(LAYER_S, 1).seconds is None


def test_time_between_steps_does_not_count() -> None:
    pace = paced(LAYER_S)
    pace.step_begins()
    pace.layer_ready(200.0)
    pace.layer_ready(200.0 + LAYER_S)
    assert pace.seconds == pytest.approx(POLLS_APART * LAYER_S)


def test_the_interval_adapts_to_shorter_steps() -> None:
    pace = paced(LAYER_S)
    pace.step_begins()
    for number in range(40):
        pace.layer_ready(200.0 + number * LAYER_S / 2)
    assert pace.seconds == pytest.approx(POLLS_APART * LAYER_S / 2, rel=1e-3)


def test_the_writer_uses_the_interval_between_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer hurries before the step, after its last layer, and when a WRITE of another prompt may end."""
    monkeypatch.setattr("layerpush.prefill.layer_interval.SHORTEST_S", LONGEST_S)  # the world's layers take no time
    world = ScriptedWorld(Faults(hold_writes={0: NEVER}))
    prompt, decoder = ScriptedRequest("p-1", 22, [5, 1, 8, 3, 12, 10, 20, 22]), world.decoder("D")
    world.registers(prompt, decoder)
    seen: list[bool] = []

    def polls_layers() -> bool:
        assert world.sleep_s is not None
        return world.writer.polls_layers

    world.step((prompt, 4), between=lambda: seen.append(polls_layers()))
    assert not seen[0], "no interval is known"
    assert all(seen[1:-1])
    assert not seen[-1], "no layer to wait for"
    assert world.sleep_s == WRITE_POLL_S

    patience: list[float | None] = []
    keeps: list[bool] = []

    def look() -> None:
        patience.append(world.sleep_s)
        keeps.append(world.writer.polls_layers)

    world.step((prompt, 18), between=look)
    assert patience == [LONGEST_S] * (len(patience) - 1) + [WRITE_POLL_S]
    assert keeps == [True] * (len(keeps) - 1) + [False]

    other = ScriptedRequest("p-2", 8, [30, 31])
    world.registers(other, decoder, first=20)
    hurried: list[float | None] = []
    world.step((other, 8), between=lambda: hurried.append(world.sleep_s))
    assert set(hurried) == {WRITE_POLL_S}, "the first prompt's WRITE is still on the wire"


def test_by_chunk_the_writer_uses_the_longest_interval() -> None:
    world = ScriptedWorld(mode=PushMode.CHUNK)
    prompt, decoder = ScriptedRequest("p-1", 22, [5, 1, 8, 3, 12, 10, 20, 22]), world.decoder("D")
    world.registers(prompt, decoder)
    seen: list[float | None] = []
    world.step((prompt, 22), between=lambda: seen.append(world.sleep_s))
    assert seen == [LONGEST_S] * (len(seen) - 1) + [WRITE_POLL_S], "after the last layer there is a WRITE"


def test_later_layers_are_expected_at_the_pace_of_earlier_ones() -> None:
    assert paced(LAYER_S, 1).expected(1) is None
    assert paced(LAYER_S, 2).expected(3) == pytest.approx(100.0 + 4 * LAYER_S)
