"""The writer with a scheduled policy: layers wait, leave in time, and nothing is lost."""

from __future__ import annotations

import math
import time

import pytest

from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import StepPlan
from layerpush.prefill.layer_interval import FENCE_POLL_S, LONGEST_S, LayerInterval
from layerpush.prefill.pushes import WRITE_POLL_S
from layerpush.prefill.step_events import StepEvents
from layerpush.prefill.step_schedule import StepSchedule
from layerpush.transport.link_speed import LinkSpeed, Terms
from tests.unit.both_sides.process import BLOCK_SIZE, Process
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld

LAYERS, TOKENS = 12, 22


def world_with(
    layer_s: float | None, byte_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[ScriptedWorld, ScriptedRequest]:
    """A writer with these estimates for layers and links; None: it has no estimate."""
    monkeypatch.setattr(LayerInterval, "layer_s", layer_s)
    monkeypatch.setattr(LinkSpeed, "is_known", byte_s is not None)
    monkeypatch.setattr(LinkSpeed, "line", (0.0, byte_s or 0.0))
    monkeypatch.setattr(LinkSpeed, "proven_bytes", math.inf)
    monkeypatch.setattr(LinkSpeed, "slowdown", lambda *_: 1.0)
    return ScriptedWorld(layers=LAYERS, mode=PushMode.AUTO), prompt_of("p-1", 1)


def prompt_of(name: str, first: int) -> ScriptedRequest:
    return ScriptedRequest(name, TOKENS, list(range(first, first + 8)), PushMode.AUTO)


def written(world: ScriptedWorld) -> list[tuple[int, int]]:
    """The layers of each WRITE."""
    return [write.layers for record in world.trace.records for write in record.writes]


@pytest.mark.parametrize(
    ("layer_s", "byte_s", "layers"),
    [
        (None, 1e-9, [(layer, layer) for layer in range(LAYERS)]),
        (1000.0, None, [(layer, layer) for layer in range(LAYERS)]),
        (1000.0, 1e-9, [(0, 0), (1, 9), (10, 10), (11, 11)]),
        (1.0, 1e-4, [(0, 0), (1, 9), (10, 10), (11, 11)]),
        (1.0, 1.0, [(layer, layer) for layer in range(LAYERS)]),
    ],
    ids=["layers are not known", "the link is not known", "an idle link", "a fast link", "a full link"],
)
def test_the_rule_decides_which_layers_share_a_write(
    layer_s: float | None, byte_s: float | None, layers: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, prompt = world_with(layer_s, byte_s, monkeypatch)
    wanted = world.registers(prompt)
    world.step((prompt, TOKENS), between=world.settle)
    world.settle()
    world.finish(prompt)
    assert written(world) == layers
    world.assert_delivered(prompt, wanted)
    world.assert_clean()


def test_a_chunk_before_the_last_goes_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = world_with(1000.0, 1e-9, monkeypatch)
    wanted = world.registers(prompt)
    world.step((prompt, 9), between=world.settle)
    world.step((prompt, 13), between=world.settle)
    world.settle()
    world.finish(prompt)
    assert written(world) == [(0, 0), (1, 11), (0, 9), (10, 10), (11, 11)]
    world.assert_delivered(prompt, wanted)
    world.assert_clean()


def test_layers_are_posted_before_their_write_exceeds_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = world_with(1000.0, 1e-9, monkeypatch)
    monkeypatch.setattr(LinkSpeed, "proven_bytes", 4 * world.rank.layout.layer_bytes[0] * -(-TOKENS // BLOCK_SIZE))
    world.registers(prompt)
    world.step((prompt, TOKENS), between=world.settle)
    world.settle()
    world.finish(prompt)
    assert written(world) == [(0, 0), (1, 4), (5, 8), (9, 9), (10, 10), (11, 11)]


def test_each_prompt_of_a_step_has_a_write_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = world_with(1.0, 1e-9, monkeypatch)
    monkeypatch.setattr(LinkSpeed, "line", (2.0, 1e-9))
    other = ScriptedRequest("p-2", TOKENS, list(range(20, 28)), PushMode.AUTO)
    for each in (prompt, other):
        world.registers(each)
    world.step((prompt, TOKENS), (other, TOKENS), between=world.settle)
    world.settle()
    for each in (prompt, other):
        world.finish(each)
    assert written(world)[:4] == [(0, 0), (1, 5), (6, 6), (7, 7)], "4 seconds before layer 10 is ready"


def test_the_writer_sleeps_half_of_the_time_until_layers_must_be_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = world_with(10.0, 1e-9, monkeypatch)
    world.registers(prompt)
    timeouts: list[float] = []

    def between() -> None:
        world.settle()
        if world.sleep_s is not None:
            timeouts.append(world.sleep_s)

    world.step((prompt, TOKENS), between=between)
    assert max(timeouts) == pytest.approx(40, abs=5), "layer 11 of 12 is ready after 80 s, seen from layer 2 or 3"
    assert min(timeouts) < 10, "then for each layer"


def test_the_writer_polls_a_write_while_no_layer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a WRITE never seems to land earlier than the next layer, and layers never wait."""
    world, prompt = world_with(1.0, 1.0, monkeypatch)
    world.fabric.faults.hold_writes.update(dict.fromkeys(range(LAYERS), 1000))
    monkeypatch.setattr(StepSchedule, "next_due", lambda *_: 0.0)
    world.registers(prompt)
    timeouts: list[float | None] = []
    world.step((prompt, TOKENS), between=lambda: timeouts.append(world.sleep_s))
    assert timeouts[: LAYERS - 1] == [WRITE_POLL_S] * (LAYERS - 1)


def test_a_link_keeps_the_time_of_the_last_poll_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its post, and after each later poll."""
    world, prompt = world_with(None, 1.0, monkeypatch)
    world.fabric.faults.hold_writes.update({0: 0, 1: 2, 2: 5})
    seen: list[float] = []
    monkeypatch.setattr(LinkSpeed, "write_ended", lambda *_, **end: seen.append(end["seen"]))
    world.registers(prompt)
    polled: list[float] = []
    world.step((prompt, TOKENS), between=lambda: polled.append(time.perf_counter()))
    world.settle()
    world.finish(prompt)
    first, second = world.trace.records[0].writes[:2]
    assert seen[0] == first.t_posted
    assert second.t_landed is not None
    assert polled[2] < seen[1] < polled[3] < second.t_landed


def test_the_writer_polls_fences_while_layers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wakes it for a fence, and a step's last layer may come much earlier than expected."""
    world, prompt = world_with(10.0, 1e-9, monkeypatch)
    world.registers(prompt)
    timeouts: list[float | None] = []
    monkeypatch.setattr(StepEvents, "has_fences", True)

    def between() -> None:
        world.settle()
        timeouts.append(world.sleep_s)

    world.step((prompt, TOKENS), between=between)
    assert max(timeout for timeout in timeouts if timeout is not None) == LONGEST_S


def test_the_writer_polls_the_first_fences_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before may have had much slower layers."""
    world, prompt = world_with(10.0, 1e-9, monkeypatch)
    world.registers(prompt)
    world.rank.peers["D"].speed.last_landed = math.inf
    monkeypatch.setattr(StepEvents, "pending", True)
    timeouts: list[float | None] = []
    world.step((prompt, TOKENS), between=lambda: timeouts.append(world.sleep_s))
    assert timeouts[0] == FENCE_POLL_S


def test_layers_do_not_wait_for_layers_without_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers without a hook are ready at the end of the step; the first step shows them."""
    world, prompt = world_with(1000.0, 1e-9, monkeypatch)
    wanted = world.registers(prompt)
    for tokens in (9, 13):
        world.step((prompt, tokens), hooked=range(6), between=world.settle)
    world.settle()
    world.finish(prompt)
    assert (5, 5) in written(world), "the last hooked layer leaves alone, as the last layer of a step does"
    world.assert_delivered(prompt, wanted)


def test_the_writer_turns_at_once_if_a_push_begins_to_stream_after_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = world_with(10.0, 1e-9, monkeypatch)
    decoder = world.decoder(connected=False)
    decoder.frozen = True
    world.registers(prompt, decoder)
    timeouts: list[float | None] = []

    def between() -> None:
        if not timeouts:
            decoder.frozen = False
            Process.turn(world.rank)  # the handshake ends, and the writer has no turn yet
        timeouts.append(world.sleep_s)

    world.step((prompt, TOKENS), between=between)
    assert timeouts[0] == 0.0
    assert 0.0 not in timeouts[1:]


@pytest.mark.parametrize(
    ("waiting", "polls"), [(True, [0.5, 0.25, 1.0, 3.5]), (False, [0.5, 0.5, 1.0, 3.5])], ids=["waiting", "not waiting"]
)
def test_a_write_is_polled_early_and_then_less_often(
    waiting: bool, polls: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinkSpeed, "is_known", True)
    schedule, link = StepSchedule(LAYERS, LayerInterval()), LinkSpeed()
    link.terms = Terms(write_s=1.0)
    schedule._leave_at, schedule._scheduled = {"D": math.inf} if waiting else {}, [link]
    link.write_posted("write", 1, 0.0)
    assert [schedule.next_due(now) - now for now in (0.0, 0.5, 3.0, 4.5)] == polls


def test_the_writer_polls_for_registrations_while_other_layers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, prompt = world_with(10.0, 1e-9, monkeypatch)
    world.registers(prompt)
    waits: list[int] = []

    def between() -> None:
        world.settle()
        waits.append(world.writer.awaiting)

    world.step(
        (prompt, TOKENS), (ScriptedRequest("p-2", TOKENS, list(range(20, 28)), PushMode.AUTO), TOKENS), between=between
    )
    assert all(waits)


def test_layers_that_waited_leave_in_time_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = world_with(1000.0, 1e-9, monkeypatch)
    world.registers(prompt)
    world.capture.arm(StepPlan((prompt.chunk(TOKENS),)))
    for layer in range(4):
        world.capture.layer_saved(f"layers.{layer}")
        world.turn()
        world.settle()
    before = len(world.fabric.writes)
    world.turn()
    assert len(world.fabric.writes) == before, "layers wait"
    monkeypatch.setattr(StepSchedule, "waits", lambda *_: False)
    world.turn()
    assert len(world.fabric.writes) == before + 1
