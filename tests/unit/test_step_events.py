"""From the hooks of the forward pass to the writer: order, fences, limits, threads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

import pytest

from layerpush.core.step_plan import StepPlan
from layerpush.prefill import step_events
from layerpush.prefill.push_protocol import Aborted, LeaseExpired, Preempted
from layerpush.prefill.step_events import LayerSaved, Revoked, StepEnded, StepEvent, StepEvents, StepStarted
from tests.unit.builders import chunks_of

NAMES = {f"layers.{index}": index for index in range(4)}
PLAN = StepPlan(tuple(chunks_of(8, [8], [[1, 2]], [4])))


@dataclass
class Wakes:
    count: int = 0

    def __call__(self) -> None:
        self.count += 1


@dataclass
class SlowFence:
    device: SlowDevice
    open: bool = False
    recycled: int = 0

    def passed(self) -> bool:
        return self.open or self.device.done

    def recycle(self) -> None:
        self.recycled += 1


@dataclass
class SlowDevice:
    """Fences that pass when the test says so: one by one, or all once it is ``done``."""

    done: bool = False
    fences: list[SlowFence] = field(default_factory=list)

    def record(self) -> SlowFence:
        self.fences.append(SlowFence(self))
        return self.fences[-1]


def taken(source: StepEvents) -> list[StepEvent]:
    return [event for event, _ in source.take_events()]


def kinds(events: list[StepEvent]) -> list[object]:
    return [event.layer if isinstance(event, LayerSaved) else type(event) for event in events]


def test_events_come_in_order_and_end_with_the_first_sweep() -> None:
    source = StepEvents(NAMES, Wakes(), None)
    source.arm(PLAN)
    for name in ("layers.2", "layers.9", "layers.0"):  # layer 9 has no cache of its own
        source.layer_saved(name)
    source.sweep()
    source.layer_saved("layers.1")
    source.sweep()
    assert kinds(taken(source)) == [StepStarted, 2, 0, StepEnded]
    assert not source.pending


@pytest.mark.parametrize("following", [PLAN, StepPlan()], ids=["prefill", "nothing to push"])
def test_the_next_step_ends_an_unended_step(following: StepPlan) -> None:
    source = StepEvents(NAMES, Wakes(), None)
    source.arm(PLAN)
    source.layer_saved("layers.0")
    source.arm(following)
    assert kinds(taken(source)) == [StepStarted, 0, StepEnded, *[StepStarted for _ in following.chunks]]


def test_cached_blocks_wait_for_earlier_steps() -> None:
    """The device may still compute them."""
    device = SlowDevice()
    source = StepEvents(NAMES, Wakes(), device)
    source.arm(StepPlan(tuple(replace(chunk, cached=True) for chunk in PLAN.chunks)))
    source.layer_saved("layers.0")
    assert taken(source) == []
    device.fences[0].open = True
    assert kinds(taken(source)) == [StepStarted]
    assert device.fences[0].recycled == 1


@pytest.mark.parametrize("plans", [[], [StepPlan()]], ids=["before the first step", "nothing to push"])
def test_an_idle_step_makes_no_event_wake_or_fence(plans: list[StepPlan]) -> None:
    """No event, no wake, no fence: decoding requests share the engine."""
    wakes, device = Wakes(), SlowDevice()
    source = StepEvents(NAMES, wakes, device)
    for plan in plans:
        source.arm(plan)
    source.layer_saved("layers.0")
    source.sweep()
    assert (wakes.count, device.fences, source.pending) == (0, [], False)


def test_a_step_with_revocations_only_is_not_armed() -> None:
    wakes = Wakes()
    source = StepEvents(NAMES, wakes, None)
    source.arm(StepPlan(preempted=("p-1",)), ["p-2"])
    source.layer_saved("layers.0")
    source.sweep()
    assert taken(source) == []
    assert list(source.take_revoked()) == [Revoked("p-1", Preempted(), 0), Revoked("p-2", Aborted(), 0)]
    assert list(source.take_revoked()) == []
    assert wakes.count == 2


def test_a_revocation_does_not_wait_for_fences() -> None:
    source = StepEvents(NAMES, Wakes(), SlowDevice())
    source.arm(PLAN)
    source.layer_saved("layers.0")
    source.arm(StepPlan(), ["p-1"])
    assert list(source.take_revoked()) == [Revoked("p-1", Aborted(), started=1)]
    assert source.is_void("p-1", step=1)


def test_a_revocation_voids_only_earlier_steps() -> None:
    source = StepEvents(NAMES, Wakes(), None)
    source.arm(PLAN)
    source.arm(PLAN, ["p-1"])
    (first, second) = [event.step for event in taken(source) if isinstance(event, StepStarted)]
    assert source.is_void("p-1", first)
    assert not source.is_void("p-1", second)
    assert not source.is_void("p-2", first)
    source.forget_void()
    assert source.is_void("p-1", first), "forgotten while a revocation was still to be taken"
    assert list(source.take_revoked()) == [Revoked("p-1", Aborted(), started=1)]
    source.forget_void()
    assert not source.is_void("p-1", first)


def test_void_steps_are_forgotten_while_later_ones_wait() -> None:
    """On a busy prefill engine the next step is armed before the fence of the last one has passed."""
    device = SlowDevice()
    source = StepEvents(NAMES, Wakes(), device)
    for step in range(1, 100):
        source.arm(PLAN, [f"ended-{step}"])
        source.sweep()
        for fence in device.fences[:-1]:
            fence.open = True
        source.expire(f"late-{step}")
        list(source.take_revoked())
        taken(source)
        source.forget_void()
        assert source.pending
        assert source.is_void(f"late-{step}", step), "the device still computes it"
    assert len(source._void) == 1


def test_void_steps_of_a_request_that_has_finished_are_kept_until_it_is_taken() -> None:
    source = StepEvents(NAMES, Wakes(), None)
    source.arm(PLAN)
    source.finish("p-1", ([1, 2],))
    source.expire("p-1")
    source.arm(PLAN)
    list(source.take_revoked())
    taken(source)
    source.forget_void()
    (done,) = source.take_finished(swept=2)
    assert source.is_void("p-1", done.step)
    source.forget_void()
    assert not source.is_void("p-1", done.step)


def test_the_revocations_come_before_the_void_requests_of_a_step() -> None:
    """The writer would take up a chunk whose blocks are gone."""
    source = StepEvents(NAMES, Wakes(), None)
    source.arm(PLAN)
    source.revoke(aborted=["p-1"])
    (started,) = taken(source)
    assert isinstance(started, StepStarted)
    assert source.void_in(started) is None
    assert [one.request_id for one in source.take_revoked()] == ["p-1"]
    assert source.void_in(started) == {"p-1"}
    assert not source._first_step
    assert not source._last_step


def test_a_revocation_names_the_first_step_since_the_previous_revocation() -> None:
    source = StepEvents(NAMES, Wakes(), None)
    for _ in range(2):
        source.arm(PLAN)
    source.arm(PLAN, ["p-1"])
    source.arm(StepPlan(preempted=("p-1",)))
    source.revoke(aborted=["p-1"])
    assert [revoked.started for revoked in source.take_revoked()] == [1, 3, 0]


def test_an_expired_lease_voids_all_earlier_steps() -> None:
    source = StepEvents(NAMES, Wakes(), None)
    source.arm(PLAN)
    source.finish("p-1", ([1, 2],))
    source.expire("p-1")
    (armed,) = taken(source)
    assert isinstance(armed, StepStarted)
    (done,) = source.take_finished(swept=armed.step)
    assert source.is_void("p-1", armed.step)
    assert source.is_void("p-1", done.step)
    assert list(source.take_revoked()) == [Revoked("p-1", LeaseExpired(), 0)]


def test_a_finish_comes_after_the_steps_of_its_request() -> None:
    device = SlowDevice()
    source = StepEvents(NAMES, Wakes(), device)
    source.arm(PLAN)
    source.sweep()
    source.finish("p-1", ([1, 2],))
    (armed,) = taken(source)
    assert isinstance(armed, StepStarted)
    assert source.take_finished(swept=armed.step - 1) == []
    source.arm(PLAN)
    device.fences[0].open = True
    assert kinds(taken(source)) == [StepEnded, StepStarted]
    (done,) = source.take_finished(swept=armed.step)
    assert (done.request_id, done.step) == ("p-1", armed.step)
    assert source.take_finished(swept=armed.step) == []


def test_every_layer_but_the_last_of_a_step_wakes_lazily() -> None:
    wakes, lazily = Wakes(), Wakes()
    source = StepEvents(NAMES, wakes, None, wake_lazily=lazily)
    for _ in range(2):
        source.arm(PLAN)
        before = wakes.count, lazily.count
        for number, name in enumerate(reversed(NAMES), 1):
            source.layer_saved(name)
            last = number == len(NAMES)
            assert (wakes.count, lazily.count) == (before[0] + last, before[1] + number - last)
        source.sweep()
        assert wakes.count == before[0] + 2


def test_a_layer_of_a_split_step_is_ready_with_its_last_microbatch() -> None:
    running: list[int | None] = [None]
    source = StepEvents(NAMES, Wakes(), None, microbatches=2, microbatch=lambda: running[0])

    def layers_after(*numbers: int | None) -> list[StepEvent]:
        for running[0] in numbers:
            source.layer_saved("layers.0")
        return [event for event, _ in source.take_events() if isinstance(event, LayerSaved)]

    source.arm(PLAN)
    assert layers_after(None) == [LayerSaved(0)], "a step that is not split"
    source.arm(PLAN)
    assert layers_after(0, 0) == []
    source.arm(PLAN)
    assert layers_after(1) == [], "the first microbatch of the step before does not count"
    assert layers_after(0) == [LayerSaved(0)]
    assert layers_after(1) == []


def test_events_wait_for_their_fence_in_order() -> None:
    device = SlowDevice()
    source = StepEvents(NAMES, Wakes(), device)
    source.arm(PLAN)
    source.layer_saved("layers.0")
    source.layer_saved("layers.1")
    first, second = device.fences

    assert kinds(taken(source)) == [StepStarted]
    second.open = True
    assert taken(source) == []
    assert source.pending
    first.open = True
    assert kinds(taken(source)) == [0, 1]
    assert (first.recycled, second.recycled) == (1, 1)


def test_the_time_of_a_fenced_event_is_the_time_of_its_fence() -> None:
    device = SlowDevice()
    source = StepEvents(NAMES, Wakes(), device)
    source.arm(PLAN)
    source.layer_saved("layers.0")
    list(source.take_events())
    saved_before = time.perf_counter()
    device.fences[0].open = True

    ((_, at),) = source.take_events()
    assert at > saved_before


def test_a_full_queue_drops_layers_and_keeps_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_events, "QUEUE_LIMIT", 3)
    device = SlowDevice()
    source = StepEvents(NAMES, Wakes(), device)
    source.arm(PLAN)
    for name in NAMES:
        source.layer_saved(name)
    source.sweep()
    source.arm(PLAN)
    for fence in device.fences:
        fence.open = True

    assert kinds(taken(source)) == [StepStarted, 0, 1, StepEnded, StepStarted]
    assert source.dropped == 2
    assert len(device.fences) == 3, "a dropped event takes no fence from the pool"


def test_one_thread_appends_while_another_takes() -> None:
    woken = threading.Event()
    source = StepEvents(NAMES, woken.set, None)
    steps, got = 400, list[object]()

    def writer() -> None:
        while got.count(StepEnded) < steps:
            woken.wait(0.05)
            woken.clear()
            got.extend(kinds(taken(source)))

    thread = threading.Thread(target=writer)
    thread.start()
    for _ in range(steps):
        source.arm(PLAN)
        for name in NAMES:
            source.layer_saved(name)
        source.sweep()
    thread.join(30)

    assert not thread.is_alive()
    assert got == [StepStarted, 0, 1, 2, 3, StepEnded] * steps


def test_only_the_first_fence_wakes_the_writer() -> None:
    """The writer polls the first fence, and finds the others behind it."""
    wakes = Wakes()
    source = StepEvents(NAMES, wakes, SlowDevice())
    source.arm(PLAN)
    assert kinds(taken(source)) == [StepStarted]
    before = wakes.count
    source.layer_saved("layers.0")
    assert wakes.count == before + 1
    source.layer_saved("layers.1")
    assert wakes.count == before + 1
