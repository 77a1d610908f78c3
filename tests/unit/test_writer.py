"""The writer's good days: bytes arrive layer by layer, D gets one completion, the scheduler gets its blocks back."""

from __future__ import annotations

from typing import Any

import pytest

from layerpush.core.layout import CacheLayout, LayerSlots
from layerpush.core.push_mode import SHORT_PROMPT, PushMode
from layerpush.core.step_plan import StepPlan
from layerpush.prefill.layer_interval import LONGEST_S
from layerpush.prefill.push import Identity, Push
from layerpush.prefill.push_protocol import Planned
from layerpush.prefill.push_session import PushSession
from layerpush.prefill.pushes import WRITE_POLL_S
from layerpush.prefill.unhooked_layers import UnhookedLayers
from layerpush.transport.link import Link
from tests.support.fake_transport import Faults
from tests.unit.builders import registration
from tests.unit.writer_rig import Prompt, Rig

TOKENS = 22  # five full blocks of four and a partly filled one


def prompt_of(name: str = "p-1", first: int = 1, tokens: int = TOKENS) -> Prompt:
    return Prompt(name, tokens, list(range(first, first + 8)))


def test_layers_land_during_prefill_after_an_early_registration() -> None:
    rig, prompt = Rig(), prompt_of()
    wanted, decoder = rig.registers(prompt), rig.decoders["D"]

    rig.step((prompt, 9))
    rig.settle()
    assert len(rig.fabric.writes) == rig.layers, "one WRITE for each layer of the first chunk"
    assert decoder.told() == [[]]
    rig.step((prompt, 9))
    rig.step((prompt, 9))
    rig.settle()

    rig.assert_delivered(prompt, wanted)
    assert decoder.untouched(rig.layers, but=wanted.local_block_ids[0])
    assert rig.host.released == []
    rig.finish(prompt)
    assert rig.host.released == ["p-1"]
    assert rig.host.failures == []
    assert rig.host.endings == {"p-1": [None]}
    rig.assert_clean()


def test_a_registration_during_prefill_catches_up() -> None:
    rig, prompt = Rig(), prompt_of()
    wanted = rig.asks(prompt, rig.decoder())
    rig.step((prompt, 12))
    assert rig.writer.waiting() == ["p-1"]
    rig.step((prompt, 4), between=lambda: rig.writer.waiting() and rig.writer.register("p-1", wanted))
    assert rig.writer.waiting() == []
    rig.step((prompt, 12))
    rig.settle()
    rig.assert_delivered(prompt, wanted)


def test_a_handshake_in_the_background_delays_the_first_write() -> None:
    rig, prompt = Rig(), prompt_of()
    wanted = rig.registers(prompt)
    rig.host.links["D"] = [None]
    rig.step((prompt, 12))
    assert rig.fabric.writes == []
    rig.host.connecting["p-1"](None, 0.0)
    rig.step((prompt, 12))
    rig.settle()
    rig.assert_delivered(prompt, wanted)


def test_a_handshake_may_end_while_the_push_asks_for_the_link() -> None:
    """Another push began the handshake. It ends between the look at the connection and the start of a handshake."""
    rig, prompt = Rig(), prompt_of()
    wanted = rig.registers(prompt)
    rig.host.links["D"] = [None]
    rig.host.handshakes_end_at_once = True
    rig.step((prompt, 12))
    rig.step((prompt, 12))
    rig.settle()
    rig.assert_delivered(prompt, wanted)


@pytest.mark.parametrize("blocks", [2, 0])
def test_blocks_that_the_decode_engine_has_are_not_sent(blocks: int) -> None:
    """A D that has all blocks gets only the completion."""
    rig, prompt = Rig(), prompt_of()
    wanted = rig.registers(prompt, wanted=blocks)
    rig.step((prompt, 12))
    assert rig.fabric.writes == []
    rig.step((prompt, 12))
    rig.settle()
    rig.assert_delivered(prompt, wanted)
    assert bool(rig.fabric.writes) == bool(blocks)
    assert rig.decoders["D"].untouched(rig.layers, but=wanted.local_block_ids[0])


def test_several_requests_of_a_step_go_to_several_decode_engines() -> None:
    rig = Rig()
    prompts = [prompt_of(f"p-{number}", 1 + 8 * number) for number in range(3)]
    decoders = [rig.decoder(f"D{number}") for number in range(3)]
    wishes = [rig.registers(prompt, decoders[n], first=5 * n + 1) for n, prompt in enumerate(prompts)]
    for _ in range(3):
        rig.step(*((prompt, 9) for prompt in prompts))
    assert rig.writer.engines_in_use == {"D0", "D1", "D2"}
    rig.settle()

    for prompt, decoder, wanted in zip(prompts, decoders, wishes, strict=True):
        rig.assert_delivered(prompt, wanted)
        assert decoder.untouched(rig.layers, but=wanted.local_block_ids[0])
        rig.finish(prompt)
    rig.assert_clean()


def test_two_requests_to_one_decode_engine_do_not_mix() -> None:
    rig, one, two = Rig(), prompt_of("p-1", 1), prompt_of("p-2", 20)
    decoder = rig.decoder()
    first, second = rig.registers(one, first=1), rig.registers(two, first=20)
    rig.step((one, 12))
    rig.step((one, 12), (two, 8))
    rig.step((two, 16))
    rig.settle()
    assert decoder.told() == [[b"d-p-1:1", b"d-p-2:1"]]
    assert decoder.holds(one, first, rig.layers)
    assert decoder.holds(two, second, rig.layers)


def test_split_heads_and_the_completion_go_to_every_rank() -> None:
    rig, prompt = Rig(Faults(hold_writes={1: 15})), prompt_of()
    decoder = rig.decoder(ranks=2)
    wanted = rig.registers(prompt, decoder)
    for _ in range(3):
        rig.step((prompt, 9))
    assert decoder.told() == [[], []]
    rig.settle()
    rig.assert_delivered(prompt, wanted)
    rig.finish(prompt)
    rig.assert_clean()
    (record,) = rig.trace.records
    assert {write.remote_rank for write in record.writes} == {0, 1}
    assert sum(write.bytes for write in record.writes) == rig.layers * len(prompt.blocks) * 16


def test_layers_without_a_hook_are_swept() -> None:
    rig, prompt = Rig(), prompt_of(tokens=8)
    wanted, decoder = rig.registers(prompt), rig.decoders["D"]
    rig.step((prompt, 8), hooked=[1])
    rig.settle()
    rig.finish(prompt)
    assert decoder.holds(prompt, wanted, rig.layers)
    (record,) = rig.trace.records
    assert (record.hooked_layers, record.swept_layers) == (1, 2)
    assert (rig.totals.hooked_layers, rig.totals.swept_layers) == (1, 2)


LONG = 100  # tokens: too many for a decode graph


@pytest.mark.parametrize(
    ("hooked", "named"),
    [((), "3 of 3 layers of model m called no hook in a step of 100 tokens"), ((0, 2), "1 of 3 layers of model m")],
    ids=["none", "all but one"],
)
def test_layers_that_call_no_hook_are_logged_once(
    hooked: tuple[int, ...], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(engine=Identity("P", 0, model="m"))
    for number in range(2):
        prompt = Prompt(f"p-{number}", LONG, list(range(1, 1 + LONG // 4)))
        rig.step((prompt, LONG), hooked=hooked)
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
    rig, prompt = Rig(mode=mode), Prompt("p-1", tokens, list(range(1, 1 + -(-tokens // 4))))
    rig.step((prompt, tokens), hooked=hooked)
    assert rig.writer._pushes["p-1"].record.swept_layers == 3 - len(hooked)
    assert "called no hook" not in caplog.text


def test_a_step_that_may_replay_a_graph_does_not_blame_the_model(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(engine=Identity("P", 0, model="m", captured_tokens=LONG))
    for number, tokens in enumerate((LONG, LONG + 4)):
        assert "called no hook" not in caplog.text
        rig.step((Prompt(f"p-{number}", tokens, list(range(1, 1 + tokens // 4))), tokens), hooked=())
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
    rig, prompt = Rig(), Prompt("p-1", TOKENS, list(range(1, 9)), mode)
    wanted = rig.registers(prompt)
    rig.step((prompt, 6), cached=[(prompt, 16)])
    rig.settle()
    rig.finish(prompt)
    rig.assert_delivered(prompt, wanted)
    rig.assert_clean()
    (record,) = rig.trace.records
    first, computed = record.writes[0], [at for chunk, _, at, _ in record.ready if chunk == 1]
    assert (first.layers, first.descriptors) == ((0, rig.layers - 1), 4 * rig.layers)
    assert first.t_post < computed[0]
    assert [(chunk.start_block, chunk.end_block, chunk.cached) for chunk in record.chunks] == [
        (0, 4, True),
        (4, 6, False),
    ]
    assert (record.hooked_layers, record.swept_layers, len(record.ready)) == (rig.layers, 0, 2 * rig.layers)


def test_a_registration_after_prefill_gets_a_whole_push() -> None:
    rig, prompt = Rig(), prompt_of()
    decoder = rig.decoder()
    rig.step((prompt, TOKENS))
    rig.finish(prompt)
    assert rig.host.whole == {}
    assert rig.writer.waiting() == ["p-1"]
    assert not rig.writer.writes_in_flight("p-1")
    wanted = rig.asks(prompt, decoder)
    rig.writer.register("p-1", wanted)
    assert rig.host.whole == {"p-1": wanted}
    assert rig.writer.waiting() == []
    assert rig.writer.writes_in_flight("p-1")
    assert rig.writer.engines_in_flight == {"D"}
    rig.settle()

    assert decoder.holds(prompt, wanted, rig.layers)
    assert (rig.host.released, rig.host.whole_writes_ended) == (["p-1"], [("p-1", True)])
    assert rig.host.failures == []
    assert rig.host.endings == {"p-1": [None]}
    rig.assert_clean()
    (record,) = rig.trace.records
    assert (record.mode, record.outcome) == ("request", "completed")
    assert (record.decode_engine_id, record.decode_request_id) == ("D", "d-p-1")
    assert record.fallback == "no decode engine had registered when prefill finished"


def test_an_incompatible_decode_engine_gets_the_whole_request() -> None:
    rig, prompt = Rig(), prompt_of()
    wanted, decoder = rig.registers(prompt), rig.decoders["D"]
    rig.host.links["D"] = [Link("D", (), (), refusal="its block size is 8 tokens, ours 4")]
    rig.step((prompt, TOKENS))
    assert rig.fabric.writes == []
    rig.finish(prompt)
    rig.settle()
    assert decoder.holds(prompt, wanted, rig.layers)
    rig.assert_clean()
    assert rig.trace.records[0].fallback == "its block size is 8 tokens, ours 4"


UNABLE = "the KV cache is staged in a host buffer"


@pytest.mark.parametrize("configured", PushMode)
def test_requests_choose_their_push_mode(configured: PushMode) -> None:
    """The engine's mode is for other requests; the record, its counters and the WRITEs follow the request's own."""
    rig = Rig(mode=configured)
    decoder = rig.decoder()
    chosen: dict[str, PushMode | None] = dict(zip(("r-0", "r-1", "r-2", "r-3", "r-4"), (None, *PushMode), strict=True))
    modes = [mode or configured for mode in chosen.values()]
    for number, (name, mode) in enumerate(chosen.items()):
        prompt = Prompt(name, TOKENS, list(range(1 + 8 * number, 9 + 8 * number)), mode, whole=mode == "request")
        wanted = rig.host.pending[name] = rig.asks(prompt, decoder, first=1 + 8 * number)
        if mode is None:
            prompt.progress.whole = configured == "request"
        rig.step((prompt, 9))
        rig.step((prompt, 13))
        rig.settle()
        assert (len(rig.fabric.writes) > 0) == (modes[number] != "request"), f"{name} before its prefill has ended"
        rig.finish(prompt)
        rig.settle()
        assert decoder.holds(prompt, wanted, rig.layers)
        most = 2 * rig.layers
        least, most = {"auto": (2, most), "layer": (most, most), "chunk": (2, 2), "request": (1, 1)}[modes[number]]
        assert least <= len(rig.fabric.writes) <= most, f"{name} by {modes[number]}"
        rig.fabric.writes.clear()

    assert [(record.mode, record.fallback) for record in rig.trace.records] == [(mode, None) for mode in modes]
    rig.assert_clean()


@pytest.mark.parametrize(
    ("mode", "fallback"), [(mode, None if mode is PushMode.WHOLE else UNABLE) for mode in PushMode]
)
def test_an_engine_unable_to_push_by_layer_records_the_fallback(mode: PushMode, fallback: str | None) -> None:
    rig = Rig(engine=Identity("P", 0, UNABLE))
    prompt, decoder = Prompt("p-1", TOKENS, list(range(1, 9)), mode, whole=True), rig.decoder()
    wanted = rig.registers(prompt, decoder)
    rig.step((prompt, TOKENS))
    assert rig.fabric.writes == []
    rig.finish(prompt)
    rig.settle()
    assert decoder.holds(prompt, wanted, rig.layers)
    assert [(record.mode, record.fallback) for record in rig.trace.records] == [("request", fallback)]
    rig.assert_clean()


@pytest.mark.parametrize(
    ("mode", "fallback"), [(None, SHORT_PROMPT), (PushMode.LAYER, SHORT_PROMPT), (PushMode.WHOLE, None)]
)
def test_a_short_prompt_is_pushed_whole_in_every_mode(mode: PushMode | None, fallback: str | None) -> None:
    rig = Rig()
    prompt, decoder = Prompt("p-1", TOKENS, list(range(1, 9)), mode, whole=True), rig.decoder()
    rig.registers(prompt, decoder)
    rig.step((prompt, TOKENS))
    rig.finish(prompt)
    rig.settle()
    assert [(record.mode, record.fallback) for record in rig.trace.records] == [("request", fallback)]
    rig.assert_clean()


@pytest.mark.parametrize(("mode", "by_layer"), list(zip(PushMode, [True, True, False, False], strict=True)))
def test_the_layer_poll_interval_follows_the_modes_of_the_step(mode: PushMode, by_layer: bool) -> None:
    rig = Rig(mode=PushMode.CHUNK if by_layer else PushMode.LAYER)
    rig.step((prompt_of(), 9))
    prompt = Prompt("p-2", TOKENS, list(range(20, 28)), mode)
    rig.capture.arm(StepPlan((prompt.chunk(9),)))
    rig.writer.turn()
    assert rig.sleep_s is not None
    assert (rig.sleep_s < LONGEST_S) == by_layer


def test_the_record_has_all_times_writes_and_counters() -> None:
    rig, prompt = Rig(mode=PushMode.CHUNK), prompt_of()
    rig.registers(prompt)
    rig.step((prompt, 9))
    rig.step((prompt, 13))
    rig.settle()
    rig.finish(prompt)

    (record,) = rig.trace.records
    assert (record.mode, record.outcome, record.fallback, record.tokens) == ("chunk", "completed", None, TOKENS)
    assert (record.decode_engine_id, record.decode_request_id) == ("D", "d-p-1")
    assert [(chunk.start_block, chunk.end_block) for chunk in record.chunks] == [(0, 2), (2, 6)]
    assert len(record.ready) == 2 * rig.layers
    assert [(write.layers, write.chunks, write.descriptors) for write in record.writes] == [
        ((0, 2), (0, 0), 2 * rig.layers),
        ((0, 2), (1, 1), 4 * rig.layers),
    ]
    times = [record.t_first_planned, record.t_last_ready, record.t_last_landed, record.t_notified]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    counters = rig.totals
    assert (counters.outcomes, counters.writes, counters.bytes) == ({"completed": 1}, 2, rig.layers * 6 * 16)


@pytest.mark.parametrize("when", ["idle", "waiting", "writing"])
def test_the_writer_sleeps_as_long_as_possible(when: str) -> None:
    rig, prompt = Rig(Faults(hold_writes={0: 1000})), prompt_of()
    decoder = rig.decoder()
    if when == "idle":
        assert rig.sleep_s is None
        return
    if when == "writing":
        rig.registers(prompt, decoder)
    rig.step((prompt, 8))
    assert rig.writer.awaits_message == (when == "waiting")
    assert rig.sleep_s == (None if when == "waiting" else WRITE_POLL_S)
    assert rig.writer.writes_in_flight("p-1") == (when == "writing")


# The cost of a turn.


def test_a_turn_looks_at_no_push_that_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy D registers late, and P's writer turns a thousand times a second until it does."""
    rig, looks = Rig(), list[str]()
    for number in range(50):
        rig.writer._open(f"p-{number}", whole=False)

    class Watched(PushSession):
        def __getattribute__(self, name: str) -> Any:
            looks.append(name)
            return super().__getattribute__(name)

    for push in rig.writer._pushes.values():
        monkeypatch.setattr(push.session, "__class__", Watched)
    for _ in range(3):
        rig.writer.turn()
        assert rig.sleep_s is None
        assert rig.writer.awaits_message
        assert not rig.writer.is_draining
    assert looks == []
    assert len(rig.writer.waiting()) == 50


@pytest.mark.parametrize("first", [0, 1])
def test_an_engine_is_served_until_the_last_push_of_a_registration_is_over(first: int) -> None:
    """A stock engine's request may come again before its first push has left the table."""
    rig = Rig()
    wanted = registration([1], engine="D")
    pushes = [rig.writer._open(f"p-{number}", whole=False) for number in range(2)]
    for push in pushes:
        push.session.registration = wanted
        rig.writer._pushes.changed(push)
    for over in (pushes[first], pushes[1 - first]):
        assert rig.writer.serving(wanted.key) is not None
        assert rig.writer.engines_in_use == {"D"}
        rig.writer._pushes.remove(over)
    assert rig.writer.serving(wanted.key) is None
    assert not rig.writer.engines_in_use


def test_a_turn_looks_at_no_streaming_push_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts whose next chunk comes in a later step."""
    rig, posts = Rig(), list[str]()
    prompts = [Prompt(f"p-{number}", TOKENS, [1 + number]) for number in range(30)]
    for prompt in prompts:
        rig.registers(prompt)
    rig.step(*((prompt, 1) for prompt in prompts))
    rig.settle()
    assert len(rig.writer._pushes.streaming) == 30
    monkeypatch.setattr(Push, "post_ready", lambda push, **_: posts.append(push.request_id))
    rig.writer.turn()
    assert posts == []
    rig.writer._pushes["p-3"].handle(Planned(prompts[3].chunk(1)))
    assert rig.sleep_s == 0.0
    rig.writer.turn()
    assert posts == ["p-3"]
