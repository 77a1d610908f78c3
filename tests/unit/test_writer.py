"""The writer's good days: bytes arrive layer by layer, D gets one completion, the scheduler gets its blocks back."""

from __future__ import annotations

import pytest

from layerpush.core.layout import CacheLayout, LayerSlots
from layerpush.core.push_mode import SHORT_PROMPT, PushMode
from layerpush.core.step_plan import StepPlan
from layerpush.prefill.layer_interval import LONGEST_S, LayerInterval
from layerpush.prefill.push import Identity, Push
from layerpush.prefill.push_protocol import Planned
from layerpush.prefill.pushes import WRITE_POLL_S
from layerpush.prefill.unhooked_layers import UnhookedLayers
from layerpush.transport.link import Link
from tests.support.fake_transport import Faults
from tests.unit.both_sides.process import BLOCK_BYTES
from tests.unit.both_sides.scripted import ScriptedRequest, ScriptedWorld
from tests.unit.builders import registration

TOKENS = 22  # five full blocks of four and a partly filled one


def prompt_of(name: str = "p-1", first: int = 1, tokens: int = TOKENS) -> ScriptedRequest:
    return ScriptedRequest(name, tokens, list(range(first, first + 8)))


def test_layers_land_during_prefill_after_an_early_registration() -> None:
    world, prompt = ScriptedWorld(), prompt_of()
    wanted, decoder = world.registers(prompt), world.d

    world.step((prompt, 9))
    world.settle()
    assert len(world.fabric.writes) == world.layers, "one WRITE for each layer of the first chunk"
    assert decoder.received() == [[]]
    world.step((prompt, 9))
    world.step((prompt, 9))
    world.settle()

    world.assert_delivered(prompt, wanted)
    assert decoder.untouched(but=wanted.local_block_ids[0])
    assert world.rank.released == []
    world.finish(prompt)
    assert world.rank.released == ["p-1"]
    assert world.rank.failures == []
    assert world.rank.endings == {"p-1": [None]}
    world.assert_clean()


def test_a_handshake_in_the_background_delays_the_first_write() -> None:
    world, prompt = ScriptedWorld(), prompt_of()
    decoder = world.decoder(connected=False)
    decoder.frozen = True
    wanted = world.registers(prompt, decoder)
    world.step((prompt, 12))
    assert world.fabric.writes == []
    decoder.frozen = False
    world.step((prompt, 12))
    world.settle()
    world.assert_delivered(prompt, wanted)


def test_a_handshake_may_end_while_the_push_asks_for_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another push began the handshake. It ends between the look at the connection and the start of a handshake."""
    world, prompt = ScriptedWorld(), prompt_of()
    wanted = world.registers(prompt)
    looks = iter([False])
    monkeypatch.setattr(world.rank.links, "is_connected", lambda _: next(looks, True))
    world.step((prompt, 12))
    world.step((prompt, 12))
    world.settle()
    world.assert_delivered(prompt, wanted)


@pytest.mark.parametrize("blocks", [2, 0])
def test_blocks_that_the_decode_engine_has_are_not_sent(blocks: int) -> None:
    """A D that has all blocks gets only the completion."""
    world, prompt = ScriptedWorld(), prompt_of()
    wanted = world.registers(prompt, wanted=blocks)
    world.step((prompt, 12))
    assert world.fabric.writes == []
    world.step((prompt, 12))
    world.settle()
    world.assert_delivered(prompt, wanted)
    assert bool(world.fabric.writes) == bool(blocks)
    assert world.d.untouched(but=wanted.local_block_ids[0])


def test_several_requests_of_a_step_go_to_several_decode_engines() -> None:
    world = ScriptedWorld()
    prompts = [prompt_of(f"p-{number}", 1 + 8 * number) for number in range(3)]
    decoders = [world.decoder(f"D{number}") for number in range(3)]
    wishes = [world.registers(prompt, decoders[n], first=5 * n + 1) for n, prompt in enumerate(prompts)]
    for _ in range(3):
        world.step(*((prompt, 9) for prompt in prompts))
    assert world.writer.engines_in_use == {"D0", "D1", "D2"}
    world.settle()

    for prompt, decoder, wanted in zip(prompts, decoders, wishes, strict=True):
        world.assert_delivered(prompt, wanted)
        assert decoder.untouched(but=wanted.local_block_ids[0])
        world.finish(prompt)
    world.assert_clean()


def test_split_heads_and_the_completion_go_to_every_rank() -> None:
    world, prompt = ScriptedWorld(Faults(hold_writes={1: 15})), prompt_of()
    decoder = world.decoder(ranks=2)
    wanted = world.registers(prompt, decoder)
    for _ in range(3):
        world.step((prompt, 9))
    assert decoder.received() == [[], []]
    world.settle()
    world.assert_delivered(prompt, wanted)
    world.finish(prompt)
    world.assert_clean()
    (record,) = world.trace.records
    assert {write.remote_rank for write in record.writes} == {0, 1}
    assert sum(write.bytes for write in record.writes) == world.layers * prompt.prompt.blocks * BLOCK_BYTES


def test_layers_without_a_hook_are_swept() -> None:
    world, prompt = ScriptedWorld(), prompt_of(tokens=8)
    wanted, decoder = world.registers(prompt), world.d
    world.step((prompt, 8), hooked=[1])
    world.settle()
    world.finish(prompt)
    assert decoder.holds(prompt, wanted)
    (record,) = world.trace.records
    assert (record.hooked_layers, record.swept_layers) == (1, 2)
    assert (world.totals.hooked_layers, world.totals.swept_layers) == (1, 2)


LONG = 100  # tokens: too many for a decode graph


@pytest.mark.parametrize(
    ("hooked", "named"),
    [((), "3 of 3 layers of model m called no hook in a step of 100 tokens"), ((0, 2), "1 of 3 layers of model m")],
    ids=["none", "all but one"],
)
def test_layers_that_call_no_hook_are_logged_once(
    hooked: tuple[int, ...], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = ScriptedWorld(engine=Identity("P", 0, model="m"))
    for number in range(2):
        prompt = ScriptedRequest(f"p-{number}", LONG, list(range(1, 1 + LONG // 4)))
        world.step((prompt, LONG), hooked=hooked)
    (record,) = [one for one in caplog.records if "called no hook" in one.getMessage()]
    assert named in record.getMessage()
    assert "layers.1" in record.getMessage()
    assert ("layers.0" in record.getMessage()) == (0 not in hooked)


@pytest.mark.parametrize(
    ("hooked", "tokens", "mode"),
    [((0, 1, 2), LONG, PushMode.LAYER), ((), 22, PushMode.LAYER), ((), LONG, PushMode.CHUNK)],
    ids=["all hooked", "as few tokens as in a graph", "by chunk"],
)
def test_expected_sweeps_are_not_logged(
    hooked: tuple[int, ...], tokens: int, mode: PushMode, caplog: pytest.LogCaptureFixture
) -> None:
    world, prompt = ScriptedWorld(mode=mode), ScriptedRequest("p-1", tokens, list(range(1, 1 + -(-tokens // 4))))
    world.step((prompt, tokens), hooked=hooked)
    assert world.writer._pushes["p-1"].record.swept_layers == 3 - len(hooked)
    assert "called no hook" not in caplog.text


def test_a_step_that_may_replay_a_graph_does_not_blame_the_model(caplog: pytest.LogCaptureFixture) -> None:
    world = ScriptedWorld(engine=Identity("P", 0, model="m", captured_tokens=LONG))
    for number, tokens in enumerate((LONG, LONG + 4)):
        assert "called no hook" not in caplog.text
        world.step((ScriptedRequest(f"p-{number}", tokens, list(range(1, 1 + tokens // 4))), tokens), hooked=())
    assert f"called no hook in a step of {LONG + 4} tokens" in caplog.text


def test_a_layer_without_a_hook_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    layers = (LayerSlots("attention", 0, (0,)), LayerSlots("mamba", 1, (1,), calls_hook=False))
    unhooked = UnhookedLayers("m", CacheLayout(layers, ()))
    unhooked.step_ended([1], LONG)
    assert caplog.text == ""
    unhooked.step_ended([0, 1], LONG)
    assert "1 of 1 layers of model m" in caplog.text


@pytest.mark.parametrize("mode", [PushMode.AUTO, PushMode.LAYER, PushMode.CHUNK])
def test_a_cached_prefix_goes_before_the_first_layer(mode: PushMode) -> None:
    world, prompt = ScriptedWorld(), ScriptedRequest("p-1", TOKENS, list(range(1, 9)), mode)
    wanted = world.registers(prompt)
    world.step((prompt, 6), cached=[(prompt, 16)])
    world.settle()
    world.finish(prompt)
    world.assert_delivered(prompt, wanted)
    world.assert_clean()
    (record,) = world.trace.records
    first, computed = record.writes[0], [at for chunk, _, at, _ in record.ready if chunk == 1]
    assert (first.layers, first.descriptors) == ((0, world.layers - 1), 4 * world.layers)
    assert first.t_post < computed[0]
    assert [(chunk.start_block, chunk.end_block, chunk.cached) for chunk in record.chunks] == [
        (0, 4, True),
        (4, 6, False),
    ]
    assert (record.hooked_layers, record.swept_layers, len(record.ready)) == (world.layers, 0, 2 * world.layers)


def test_a_registration_after_prefill_gets_a_whole_push() -> None:
    world, prompt = ScriptedWorld(), prompt_of()
    decoder = world.decoder()
    world.step((prompt, TOKENS))
    world.finish(prompt)
    assert not world.fabric.writes
    assert world.writer.waiting() == ["p-1"]
    assert not world.writer.writes_in_flight("p-1")
    wanted = world.asks(prompt, decoder)
    world.send(wanted)
    assert [registration for _, registration in world.rank.whole.values()] == [wanted]
    assert world.writer.waiting() == []
    assert world.writer.writes_in_flight("p-1")
    assert world.writer.engines_in_flight == {"D"}
    world.settle()

    assert decoder.holds(prompt, wanted)
    assert (world.rank.released, world.rank.whole_writes_ended) == (["p-1"], [("p-1", True)])
    assert world.rank.failures == []
    assert world.rank.endings == {"p-1": [None]}
    world.assert_clean()
    (record,) = world.trace.records
    assert (record.mode, record.outcome) == ("request", "completed")
    assert (record.decode_engine_id, record.decode_request_id) == ("D", "d-p-1")
    assert record.fallback == "no decode engine had registered when prefill finished"


def test_an_incompatible_decode_engine_gets_the_whole_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world, prompt = ScriptedWorld(), prompt_of()
    wanted, decoder = world.registers(prompt), world.d
    refused = Link("D", (), (), refusal="its block size is 8 tokens, ours 4")
    monkeypatch.setattr(world.rank, "discover_link", lambda _: refused)
    world.step((prompt, TOKENS))
    assert world.fabric.writes == []
    world.finish(prompt)
    world.settle()
    assert decoder.holds(prompt, wanted)
    world.assert_clean()
    assert world.trace.records[0].fallback == "its block size is 8 tokens, ours 4"


UNABLE = "the KV cache is staged in a host buffer"


@pytest.mark.parametrize("configured", PushMode)
def test_requests_choose_their_push_mode(configured: PushMode) -> None:
    """The engine's mode is for other requests; the record, its counters and the WRITEs follow the request's own."""
    world = ScriptedWorld(mode=configured)
    decoder = world.decoder()
    chosen: dict[str, PushMode | None] = dict(zip(("r-0", "r-1", "r-2", "r-3", "r-4"), (None, *PushMode), strict=True))
    modes = [mode or configured for mode in chosen.values()]
    for number, (name, mode) in enumerate(chosen.items()):
        table = list(range(1 + 8 * number, 9 + 8 * number))
        prompt = ScriptedRequest(name, TOKENS, table, mode, whole=mode == "request")
        wanted = world.registers(prompt, decoder, first=1 + 8 * number)
        if mode is None:
            prompt.progress.whole = configured == "request"
        world.step((prompt, 9))
        world.step((prompt, 13))
        world.settle()
        assert (len(world.fabric.writes) > 0) == (modes[number] != "request"), f"{name} before its prefill has ended"
        world.finish(prompt)
        world.settle()
        assert decoder.holds(prompt, wanted)
        most = 2 * world.layers
        least, most = {"auto": (2, most), "layer": (most, most), "chunk": (2, 2), "request": (1, 1)}[modes[number]]
        assert least <= len(world.fabric.writes) <= most, f"{name} by {modes[number]}"
        world.fabric.writes.clear()

    assert [(record.mode, record.fallback) for record in world.trace.records] == [(mode, None) for mode in modes]
    world.assert_clean()


@pytest.mark.parametrize("unable", [UNABLE, None], ids=["by an unable engine", "if it is short"])
@pytest.mark.parametrize("mode", [None, *PushMode])
def test_a_prompt_is_pushed_whole_in_every_mode(mode: PushMode | None, unable: str | None) -> None:
    world = ScriptedWorld(engine=Identity("P", 0, unable))
    prompt, decoder = ScriptedRequest("p-1", TOKENS, list(range(1, 9)), mode, whole=True), world.decoder()
    wanted = world.registers(prompt, decoder)
    world.step((prompt, TOKENS))
    assert world.fabric.writes == []
    world.finish(prompt)
    world.settle()
    assert decoder.holds(prompt, wanted)
    fallback = None if mode is PushMode.WHOLE else unable or SHORT_PROMPT
    assert [(record.mode, record.fallback) for record in world.trace.records] == [("request", fallback)]
    world.assert_clean()


@pytest.mark.parametrize(("mode", "by_layer"), list(zip(PushMode, [True, True, False, False], strict=True)))
def test_the_layer_poll_interval_follows_the_modes_of_the_step(
    mode: PushMode, by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerInterval, "seconds", LONGEST_S / 2)  # a busy machine may take longer for a layer
    world = ScriptedWorld(mode=PushMode.CHUNK if by_layer else PushMode.LAYER)
    world.step((prompt_of(), 9))
    prompt = ScriptedRequest("p-2", TOKENS, list(range(20, 28)), mode)
    world.capture.arm(StepPlan((prompt.chunk(9),)))
    world.turn()
    assert world.sleep_s is not None
    assert (world.sleep_s < LONGEST_S) == by_layer


def test_the_record_has_all_times_writes_and_counters() -> None:
    world, prompt = ScriptedWorld(mode=PushMode.CHUNK), prompt_of()
    world.registers(prompt)
    world.step((prompt, 9))
    world.step((prompt, 13))
    world.settle()
    world.finish(prompt)

    (record,) = world.trace.records
    assert (record.mode, record.outcome, record.fallback, record.tokens) == ("chunk", "completed", None, TOKENS)
    assert (record.decode_engine_id, record.decode_request_id) == ("D", "d-p-1")
    assert [(chunk.start_block, chunk.end_block) for chunk in record.chunks] == [(0, 2), (2, 6)]
    assert len(record.ready) == 2 * world.layers
    assert [(write.layers, write.chunks, write.descriptors) for write in record.writes] == [
        ((0, 2), (0, 0), 2 * world.layers),
        ((0, 2), (1, 1), 4 * world.layers),
    ]
    times = [record.t_first_planned, record.t_last_ready, record.t_last_landed, record.t_notified]
    assert None not in times
    assert times == sorted(times)
    counters = world.totals
    assert (counters.outcomes, counters.writes, counters.bytes) == ({"completed": 1}, 2, world.layers * 6 * BLOCK_BYTES)


@pytest.mark.parametrize("when", ["idle", "waiting", "writing"])
def test_the_writer_sleeps_as_long_as_possible(when: str) -> None:
    world, prompt = ScriptedWorld(Faults(hold_writes={0: 1000})), prompt_of()
    decoder = world.decoder()
    if when == "idle":
        assert world.sleep_s is None
        return
    if when == "writing":
        world.registers(prompt, decoder)
    world.step((prompt, 8))
    assert world.writer.awaiting == (when == "waiting")
    assert world.sleep_s == (None if when == "waiting" else WRITE_POLL_S)
    assert world.writer.writes_in_flight("p-1") == (when == "writing")


# The cost of a turn.


@pytest.mark.parametrize("first", [0, 1])
def test_an_engine_is_served_until_the_last_push_of_a_registration_is_over(first: int) -> None:
    """A stock engine's request may come again before its first push has left the table."""
    world = ScriptedWorld()
    wanted = registration([1], engine="D")
    pushes = [world.writer._open(f"p-{number}", whole=False) for number in range(2)]
    for push in pushes:
        push.session.registration = wanted
        world.writer._pushes.changed(push)
    for over in (pushes[first], pushes[1 - first]):
        assert world.writer.serving(wanted.key) is not None
        assert world.writer.engines_in_use == {"D"}
        world.writer._pushes.remove(over)
    assert world.writer.serving(wanted.key) is None
    assert not world.writer.engines_in_use


def test_a_turn_looks_at_no_streaming_push_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose next chunk comes in a later step."""
    world, posts = ScriptedWorld(), list[str]()
    prompts = [ScriptedRequest(f"p-{number}", TOKENS, [1 + number]) for number in range(30)]
    for prompt in prompts:
        world.registers(prompt)
    world.step(*((prompt, 1) for prompt in prompts))
    world.settle()
    assert len(world.writer._pushes.streaming) == 30
    monkeypatch.setattr(Push, "post_ready", lambda push, **_: posts.append(push.request_id))
    world.turn()
    assert posts == []
    world.writer._pushes["p-3"].handle(Planned(prompts[3].chunk(1)))
    assert world.sleep_s == 0.0
    world.turn()
    assert posts == ["p-3"]
