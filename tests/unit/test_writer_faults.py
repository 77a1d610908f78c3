"""The writer's bad days: lost WRITEs, dead peers, preemptions, aborts. D is never told of bytes that it has not got."""

from __future__ import annotations

import random
import time

import pytest

from layerpush.prefill.host import HandshakeError
from layerpush.prefill.policy import Policy
from layerpush.transport.fake import Faults
from tests.unit.writer_rig import Prompt, Rig

TOKENS = 22
NEVER = 10**6


def story(faults: Faults | None = None, policy: Policy | None = None) -> tuple[Rig, Prompt]:
    """A prompt that its decode engine D registered first."""
    rig, prompt = Rig(faults, policy=policy), Prompt("p-1", TOKENS, list(range(1, 9)))
    rig.host.pending[prompt.name] = rig.asks(prompt, rig.decoder())
    return rig, prompt


def told(rig: Rig) -> list[list[bytes]]:
    return rig.decoders["D"].told()


@pytest.mark.parametrize(
    "faults",
    [
        Faults(fail_posts={4}),
        Faults(fail_writes={4}),
        Faults(fail_posts={0, 1, 2}),
        Faults(hold_writes={4: 5}, fail_writes={4}),
    ],
    ids=["a post that fails", "a write that fails", "no post ever", "a write that fails in the middle"],
)
def test_a_lost_write_ends_the_push_unheard(faults: Faults) -> None:
    rig, prompt = story(faults)
    for _ in range(3):
        rig.step((prompt, 9))
    rig.settle()
    posted = len(rig.fabric.writes)
    rig.finish(prompt)
    rig.settle()

    assert told(rig) == [[]]
    assert rig.host.released == [], "the lease frees the blocks, after D's watchdog"
    assert len(rig.fabric.writes) == posted
    rig.assert_clean()
    assert [record.outcome for record in rig.trace.records] == ["failed"]
    assert rig.trace.records[0].reason
    assert rig.writer.counters.outcomes == {"failed": 1}


def test_one_rank_lost_is_a_write_lost() -> None:
    rig, prompt = Rig(Faults(fail_posts={3})), Prompt("p-1", TOKENS, list(range(1, 9)))
    decoder = rig.decoder(ranks=2)
    rig.host.pending[prompt.name] = rig.asks(prompt, decoder)
    for _ in range(3):
        rig.step((prompt, 9))
    rig.settle()
    rig.finish(prompt)
    assert decoder.told() == [[], []]
    rig.assert_clean()


def test_a_peer_that_dies_under_writes_ends_the_push() -> None:
    rig, prompt = story(Faults(hold_writes={1: NEVER, 2: NEVER}))
    rig.step((prompt, 9))
    rig.fabric.kill("D-0")
    rig.settle(5)
    rig.step((prompt, 9))
    rig.step((prompt, 9))
    rig.finish(prompt)
    rig.settle(5)
    rig.assert_clean()
    assert rig.host.released == []


def test_a_peer_that_is_dead_when_it_is_to_be_told_ends_the_push() -> None:
    rig, prompt = story()
    rig.fabric.faults.at["notify", 0] = lambda fabric: fabric.kill("D-0")
    rig.step((prompt, TOKENS))
    rig.settle()
    rig.finish(prompt)
    rig.assert_clean()
    (record,) = rig.trace.records
    assert record.outcome == "failed"
    assert "completion could not be sent" in (record.reason or "")
    assert rig.host.released == []


@pytest.mark.parametrize("error", [HandshakeError("connection refused"), RuntimeError("a bug of the host")])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a handshake"])
def test_a_decode_engine_that_cannot_be_reached(error: Exception, late: bool) -> None:
    rig, prompt = story()
    rig.host.links["D"] = [None, error] if late else [error]
    rig.step((prompt, 9))
    if late:
        rig.writer.reconnect("p-1", None)
    rig.step((prompt, 13))
    rig.finish(prompt)
    rig.settle()
    assert rig.fabric.writes == []
    rig.assert_clean()
    assert str(error) in (rig.trace.records[0].reason or "")


def test_a_handshake_that_fails_in_the_background() -> None:
    rig, prompt = story()
    rig.host.links["D"] = [None]
    rig.step((prompt, TOKENS))
    rig.writer.reconnect("p-1", "no route")
    rig.writer.reconnect("p-1", "no route, said twice")
    rig.finish(prompt)
    rig.assert_clean()
    assert "no route" in (rig.trace.records[0].reason or "")


def test_preempted_the_new_epoch_waits_for_the_old_writes() -> None:
    rig, prompt = story(Faults(hold_writes={1: 30, 2: 60}))
    decoder = rig.decoders["D"]
    wanted = rig.host.pending[prompt.name]
    rig.step((prompt, 9))
    before = len(rig.fabric.writes)
    rig.scribble(prompt.table)  # freed on preemption, and filled by others while the old WRITEs still read
    prompt.preempted(list(range(30, 38)))
    rig.step((prompt, 12), preempted=[prompt])
    while rig.writer.writes_in_flight("p-1"):
        assert len(rig.fabric.writes) == before
        if len(rig.p._live) == 1:
            break
        rig.writer.turn()
    rig.settle(80)
    assert len(rig.fabric.writes) > before
    rig.step((prompt, 12))
    rig.settle()

    assert told(rig) == [[b"d-p-1:1"]]
    assert decoder.holds(prompt, wanted, rig.layers)
    rig.finish(prompt)
    rig.assert_clean()
    (record,) = rig.trace.records
    assert (record.epoch, record.outcome) == (1, "completed")


def test_preempted_twice_between_steps() -> None:
    rig, prompt = story()
    wanted = rig.host.pending[prompt.name]
    rig.step((prompt, 9))
    for first in (20, 40):
        prompt.preempted(list(range(first, first + 8)))
        rig.step((prompt, 5), preempted=[prompt])
    rig.step((prompt, 20))
    rig.settle()
    assert told(rig) == [[b"d-p-1:1"]]
    assert rig.decoders["D"].holds(prompt, wanted, rig.layers)


def test_aborted_in_flight_it_drains_and_says_nothing() -> None:
    rig, prompt = story(Faults(hold_writes={1: 10}))
    rig.step((prompt, 9))
    rig.abort(prompt)
    rig.writer.turn()
    assert "p-1" in rig.writer, "until its WRITEs have ended"
    assert rig.writer.writes_in_flight("p-1")
    posted = len(rig.fabric.writes)
    rig.settle()

    assert told(rig) == [[]]
    assert len(rig.fabric.writes) == posted
    rig.assert_clean()
    assert [record.outcome for record in rig.trace.records] == ["cancelled"]


def test_aborted_and_sent_again_it_is_pushed() -> None:
    rig, prompt = story()
    wanted = rig.host.pending[prompt.name]
    rig.step((prompt, 9))
    rig.abort(prompt)
    rig.settle()
    assert rig.host.kept == [wanted]

    again = Prompt("p-1", TOKENS, list(range(20, 28)))
    rig.host.pending["p-1"] = rig.host.kept.pop()
    rig.step((again, TOKENS))
    rig.settle()
    assert told(rig) == [[b"d-p-1:1"]]
    assert rig.decoders["D"].holds(again, wanted, rig.layers)


@pytest.mark.parametrize("told_first", [True, False])
def test_only_the_registration_of_an_unfinished_push_is_kept(told_first: bool) -> None:
    rig, prompt = story(None if told_first else Faults(hold_writes={2: 20}))
    rig.step((prompt, TOKENS))
    if told_first:
        rig.settle()
    rig.abort(prompt)
    rig.settle()
    assert len(rig.host.kept) == (0 if told_first else 1)
    assert told(rig) == [[b"d-p-1:1"] if told_first else []]


def test_a_lease_that_runs_out_in_flight_drains_and_says_nothing() -> None:
    rig, prompt = story(Faults(hold_writes={2: 10}))
    rig.step((prompt, TOKENS))
    rig.finish(prompt)
    rig.expire(prompt)
    rig.settle()
    assert told(rig) == [[]]
    assert rig.host.released == []
    rig.assert_clean()
    assert [record.outcome for record in rig.trace.records] == ["failed"]


def test_shutdown_waits_for_the_wire() -> None:
    rig, prompt = story(Faults(hold_writes={0: 6, 1: 6}))
    rig.step((prompt, 9))
    assert rig.writer.drain(10.0) == 0
    assert not rig.p._live
    assert not rig.fabric.violations


def test_shutdown_gives_up_on_a_frozen_peer() -> None:
    rig, prompt = story()
    rig.fabric.freeze("D-0")
    rig.step((prompt, 9))
    started = time.monotonic()
    assert rig.writer.drain(0.2) == rig.layers
    assert time.monotonic() - started < 5
    assert not rig.p._live


def test_upstreams_write_that_fails_is_reported_to_the_host() -> None:
    rig, prompt = Rig(Faults(fail_writes={0})), Prompt("p-1", TOKENS, list(range(1, 9)))
    decoder = rig.decoder()
    rig.step((prompt, TOKENS))
    rig.host.pending[prompt.name] = rig.asks(prompt, decoder)
    rig.finish(prompt)
    rig.settle()
    assert rig.host.ended == [("p-1", False)]
    rig.assert_clean()
    assert rig.trace.records[0].outcome == "failed"


@pytest.mark.parametrize("seed", range(40))
def test_whatever_goes_wrong_what_is_told_is_there(seed: int) -> None:
    """Random faults, preemptions, aborts and merging over several requests."""
    draw = random.Random(seed)
    policy = Policy(draw.random() < 0.7, draw.choice([0, 40, 10_000]), draw.randint(1, 8))
    rig = Rig(Faults.seeded(seed, rate=draw.choice([0.0, 0.02, 0.1])), policy=policy, seed=seed)
    decoder = rig.decoder(ranks=draw.choice([1, 2]))
    prompts = [Prompt(f"p-{n}", draw.randint(1, 30), list(range(1 + 8 * n, 9 + 8 * n))) for n in range(4)]
    wishes = {p.name: rig.asks(p, decoder, 1 + 10 * n, draw.randint(0, len(p.blocks))) for n, p in enumerate(prompts)}
    running, finished = list(prompts), list[Prompt]()
    while running:
        work = [(prompt, draw.randint(1, 12)) for prompt in running if draw.random() < 0.8]
        for prompt in running:
            if draw.random() < 0.4:
                rig.host.pending.setdefault(prompt.name, wishes[prompt.name])
        preempted = [prompt for prompt, _ in work if prompt.computed and draw.random() < 0.1]
        for prompt in preempted:
            prompt.preempted(draw.sample(prompt.table, len(prompt.table)))
        rig.step(*work, preempted=preempted, hooked=draw.sample(range(3), draw.randint(0, 3)))
        for prompt in list(running):
            if draw.random() < 0.03:
                running.remove(prompt)
                rig.abort(prompt)
            elif prompt.computed == prompt.tokens:
                running.remove(prompt)
                finished.append(prompt)
                rig.finish(prompt)
        _check_told(rig, prompts, wishes)
    for _ in range(100):
        rig.writer.turn()
        _check_told(rig, prompts, wishes)
    for prompt in finished:
        if prompt.name not in rig.host.released:
            rig.expire(prompt)
    rig.settle()
    assert set(rig.host.released) <= {prompt.name for prompt in finished}
    assert len(rig.host.released) == len(set(rig.host.released))
    rig.assert_clean()


def _check_told(rig: Rig, prompts: list[Prompt], wishes: dict[str, object]) -> None:
    """Whoever is told has the bytes; then D uses its blocks, and nothing may land there any more."""
    for number, payloads in enumerate(rig.decoders["D"].told()):
        for payload in payloads:
            name = payload.decode().removeprefix("d-").removesuffix(":1")
            prompt = next(prompt for prompt in prompts if prompt.name == name)
            assert rig.decoders["D"].holds(prompt, wishes[name], rig.layers), (number, name)  # type: ignore[arg-type]
            rig.decoders["D"].reuse(wishes[name])  # type: ignore[arg-type]


def test_a_lease_that_runs_out_under_upstreams_write_waits_for_it() -> None:
    """The push stays in the table, so that its blocks count as being read and its handle is given back."""
    rig, prompt = Rig(Faults(hold_writes={0: 5})), Prompt("p-1", TOKENS, list(range(1, 9)))
    rig.host.pending[prompt.name] = rig.asks(prompt, rig.decoder())
    rig.writer.finished("p-1", (prompt.blocks,))  # never planned, as where layerwise is off: pushed whole
    rig.expire(prompt)
    rig.writer.turn()
    assert rig.writer.writes_in_flight("p-1")
    rig.settle()
    rig.assert_clean()
