"""A prompt's life with calls to the connector by vLLM's V2 model runner, the default on a GPU.

``V2Runner`` has vLLM's own driver of the connector and its own hooks of an attention layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from tests.connector.engine import LAYERS, NAMES, Engine, holds_prompt
from tests.connector.runners import V2Runner
from tests.connector.test_lifecycle import STEPS, TOKENS, asks_first, ends_well, gives_everything_back, run, step_until
from tests.support.waiting import until

Build = Callable[..., Engine]
DRAFTED = NAMES[-1:]
BY_LAYER = {"granularity": "layer"}


def pair(
    engine: Build, *, saves_last: bool = False, drafted: Sequence[str] = (), **options: Any
) -> tuple[Engine, Engine]:
    runner = partial(V2Runner, drafted=tuple(drafted), saves_last=saves_last)
    p, d = engine("kv_producer", BY_LAYER, runner=runner, **options), engine("kv_consumer", runner=V2Runner)
    p.worker.connector_worker.step_events.drafted = frozenset(drafted)
    return p, d


def runner_of(engine: Engine) -> V2Runner:
    assert isinstance(engine.runner, V2Runner)
    return engine.runner


@pytest.mark.parametrize("drafted", [[], DRAFTED], ids=["no drafter", "drafter"])
@pytest.mark.parametrize("saves_last", [False, True], ids=["0.32", "0.33"])
def test_each_layer_is_pushed_as_its_hook_reports_it(engine: Build, saves_last: bool, drafted: list[str]) -> None:
    p, d = pair(engine, saves_last=saves_last, drafted=drafted)
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    p.step()
    until(lambda: holds_prompt(d, blocks, 64))
    assert p.finished == []
    run(p, STEPS - 1)
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)
    assert (p.totals.hooked_layers, p.totals.swept_layers) == (STEPS * LAYERS, 0)


@pytest.mark.parametrize("saves_last", [False, True], ids=["0.32", "0.33"])
def test_layers_of_a_replayed_graph_are_swept(engine: Build, saves_last: bool) -> None:
    p, d = pair(engine, saves_last=saves_last, drafted=DRAFTED)
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    for _ in range(STEPS):
        p.step(hooks=[])
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)
    assert (p.totals.hooked_layers, p.totals.swept_layers) == (0, STEPS * LAYERS)


@pytest.mark.parametrize("saves_last", [False, True], ids=["0.32", "0.33"])
def test_a_drafted_layer_is_not_pushed_before_it_is_computed(engine: Build, saves_last: bool) -> None:
    p, d = pair(engine, saves_last=saves_last, drafted=DRAFTED)
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    events = p.worker.connector_worker.step_events
    runner_of(p).after_forward = lambda: until(lambda: not events.pending and p.pushes._step)
    for hooks in (NAMES, [], NAMES, []):
        p.step(hooks=hooks)
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)


def test_layers_without_a_hook_are_pushed_before_sampling(engine: Build, caplog: pytest.LogCaptureFixture) -> None:
    """The last two layers use an attention operation of the model's own."""
    p, d = pair(engine, max_num_batched_tokens=512)
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    runner_of(p).after_forward = lambda: until(lambda: holds_prompt(d, blocks, TOKENS))
    p.step(hooks=NAMES[:2])
    runner_of(p).after_forward = lambda: None
    ends_well(p, d)
    assert (p.totals.hooked_layers, p.totals.swept_layers) == (2, 2)
    (record,) = [one for one in caplog.records if "called no hook" in one.getMessage()]
    assert f"2 of 4 layers of model {p.config.model_config.model}" in record.getMessage()
    assert record.getMessage().endswith(": " + ", ".join(NAMES[2:]))


def test_the_models_layers_do_not_wait_for_the_drafters_layers(engine: Build, caplog: pytest.LogCaptureFixture) -> None:
    """No layer calls a hook, and the drafter comes after the model's forward."""
    p, d = pair(engine, drafted=DRAFTED, max_num_batched_tokens=512)
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    model = NAMES[: -len(DRAFTED)]
    runner_of(p).after_forward = lambda: until(lambda: holds_prompt(d, blocks, TOKENS, model))
    p.step(hooks=[])
    runner_of(p).after_forward = lambda: None
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)
    assert (p.totals.hooked_layers, p.totals.swept_layers) == (0, LAYERS)
    (record,) = [one for one in caplog.records if "called no hook" in one.getMessage()]
    assert f"{LAYERS} of {LAYERS} layers" in record.getMessage()


def test_a_preempted_request_is_pushed_again_from_the_start(engine: Build) -> None:
    p, d = pair(engine)
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, 2)
    assert p.scheduler.reset_prefix_cache(reset_running_requests=True)
    for cache in p.caches.values():
        cache.fill_(-2.0)  # other requests have the blocks meanwhile
    chunks = [chunk for _ in range(STEPS) for chunk in p.step().kv_connector_metadata.step_plan.chunks]
    assert [(chunk.epoch, chunk.start) for chunk in chunks] == [(1, 0), (1, 64), (1, 128), (1, 192)]
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)


def test_an_abort_fails_the_load_in_steps_without_a_forward(engine: Build) -> None:
    p, d = pair(engine)
    asks_first(p, d)
    p.prefill("r-1", TOKENS)
    p.step()
    p.abort("r-1")
    step_until(p, d, done=lambda: d.failed)
    assert (d.received, d.failed, p.sent) == ([], ["r-1"], [])
    assert gives_everything_back(p)
    assert gives_everything_back(d)


def test_a_dummy_run_between_steps_reports_no_layer(engine: Build) -> None:
    p, d = pair(engine)
    runner_of(p).dummy_run()
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    for _ in range(STEPS):
        p.step()
        runner_of(p).dummy_run()
        runner_of(d).dummy_run()
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)
    assert p.totals.hooked_layers == STEPS * LAYERS
