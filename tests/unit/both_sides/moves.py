"""The moves of a world: clients, schedulers, time, the network and fate. Each move is small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from layerpush.core.wire import FirstToken, encode
from tests.unit.both_sides.decode import DecodeEngine, Load
from tests.unit.both_sides.prefill import PrefillEngine, Request
from tests.unit.both_sides.process import BLOCK_SIZE, HEADS, LAYERS, SAMPLING, Prompt, Turn
from tests.unit.both_sides.world import DECODERS, World

Pick = Callable[[Sequence[Any]], Any]
"""Chooses one of several; the driver of the world supplies it."""

SOME = 9


@dataclass(frozen=True)
class Move:
    name: str
    do: Callable[[World, Pick], None]
    possible: Callable[[World], bool]
    weight: int


MOVES: list[Move] = []


def move(
    weight: int, possible: Callable[[World], bool] = lambda _: True
) -> Callable[[Callable[[World, Pick], None]], Callable[[World, Pick], None]]:
    def add(do: Callable[[World, Pick], None]) -> Callable[[World, Pick], None]:
        MOVES.append(Move(do.__name__, do, possible, weight))
        return do

    return add


def _prefill(world: World) -> PrefillEngine:
    assert world.prefill is not None
    return world.prefill


def _computes(world: World) -> bool:
    return world.prefill is not None and not world.prefill.frozen


def _between_steps(world: World) -> bool:
    return _computes(world) and _prefill(world).step is None


def _running(world: World) -> list[Request]:
    return [request for request in world.requests if request.leased_until is None]


def _to_compute(world: World) -> list[Request]:
    return [request for request in _running(world) if not request.is_computed]


def _decoding(world: World) -> list[DecodeEngine]:
    return [engine for engine in world.decoders if not engine.frozen]


@move(9, lambda world: len(world.prompts) < SOME)
def ask(world: World, pick: Pick) -> None:
    """A client asks both engines at once. Its router may give one id to two prompts."""
    prompt = Prompt(pick("ab"), f"prompt {len(world.prompts)}", pick([3, 4, 9, 16]))
    world.prompts.append(prompt)
    if _computes(world) and pick([True, True, False]):
        _prefill(world).accept(prompt)
    if _decoding(world):
        cached = pick([0, 0, 1]) if prompt.blocks > 1 else 0
        pick(_decoding(world)).load(prompt, None, cached, first=pick([True, False]))


@move(2, lambda world: _computes(world) and len(world.requests) < 4)
def ask_prefill_later(world: World, pick: Pick) -> None:
    if world.prompts:
        _prefill(world).accept(pick(world.prompts))


@move(2, lambda world: bool(_decoding(world)) and bool(world.prompts))
def ask_decode_later(world: World, pick: Pick) -> None:
    """The router has waited for P's answer, or tries again."""
    prompt = pick(world.prompts)
    same = [request.request_id for request in world.requests if request.prompt is prompt]
    pick(_decoding(world)).load(prompt, pick([None, *same]), 0)


@move(1, lambda world: bool(_decoding(world)) and bool(world.prompts))
def decline(world: World, pick: Pick) -> None:
    """D computes a prompt itself. Another D may still want it from P."""
    prompt = pick(world.prompts)
    same = [request.request_id for request in world.requests if request.prompt is prompt]
    pick(_decoding(world)).refuse(prompt, pick([None, *same]))


@move(4, lambda world: world.keeps_turns and _between_steps(world) and len(world.turns) < SOME)
def keep_turn(world: World, pick: Pick) -> None:
    _prefill(world).keep(Turn(pick("ab"), f"turn {len(world.turns)}", pick([8, 12])))


@move(2, lambda world: _computes(world) and bool(world.turns))
def release_turns(world: World, pick: Pick) -> None:
    _prefill(world).release_turns(reset=pick([False, False, True]))


@move(6, lambda world: bool(_decoding(world)) and bool(world.turns))
def ask_for_turn(world: World, pick: Pick) -> None:
    """The next turn's prompt begins as a turn that P keeps, or has kept. A client may have mixed up their names."""
    engine, (request_id, turn) = pick(_decoding(world)), pick(world.turns)
    if pick([*5 * [False], True]):
        engine.refuse(turn, request_id)
        return
    text = pick([*5 * [turn.text], "another turn"])
    tokens = pick(range(BLOCK_SIZE, turn.tokens + 1, BLOCK_SIZE))
    engine.load(Turn(pick("ab"), text, tokens), request_id, pick([0, 0, 1]) if tokens > BLOCK_SIZE else 0)


@move(14, lambda world: _between_steps(world) and bool(_to_compute(world)))
def begin_step(world: World, pick: Pick) -> None:
    tokens, cached, loaded = pick([2, 4, 8, 16]), pick([0, 0, 1, 3]), pick([0, 0, 1, 2])
    _prefill(world).begin_step(pick(_to_compute(world)), tokens, cached, loaded, pick([None, 0, 1]))


@move(4, lambda world: _between_steps(world) and any(request.unprocessed for request in _running(world)))
def step_without_work(world: World, pick: Pick) -> None:
    _prefill(world).step_without_work()


@move(16, lambda world: _computes(world) and _prefill(world).step is not None)
def run_layer(world: World, pick: Pick) -> None:
    _prefill(world).run_layer(hooked=pick([True, True, False]))


@move(8, lambda world: _between_steps(world) and any(request.is_computed for request in _running(world)))
def finish(world: World, pick: Pick) -> None:
    _prefill(world).finish(pick([request for request in _running(world) if request.is_computed]))


@move(3, lambda world: _between_steps(world) and any(request.table for request in _running(world)))
def preempt(world: World, pick: Pick) -> None:
    _prefill(world).preempt(pick([request for request in _running(world) if request.table]))


@move(1, lambda world: _between_steps(world) and bool(_running(world)))
def abort_prefill(world: World, pick: Pick) -> None:
    _prefill(world).abort(pick(_running(world)))


@move(1, lambda world: any(engine.loads for engine in _decoding(world)))
def abort_load(world: World, pick: Pick) -> None:
    engine = pick([engine for engine in _decoding(world) if engine.loads])
    load = pick(list(engine.loads.values()))
    if load.outcome is None and not load.aborted:
        engine.abort(load)


@move(25)
def turn_all(world: World, pick: Pick) -> None:
    for _ in range(pick([1, 2, 4])):
        world.turn()
        world.check()


@move(25, lambda world: bool(world.running))
def turn_one(world: World, pick: Pick) -> None:
    pick(world.running).turn()


@move(12)
def pass_time(world: World, pick: Pick) -> None:
    world.now += pick([0.01, 0.1, 0.3, 0.6, 1.0, 3.0, 6.0])


@move(1)
def lie_low(world: World, pick: Pick) -> None:
    """A long time passes; all engines go on."""
    for _ in range(pick([6, 10, 40])):
        world.now += 2.0
        world.turn()
        world.check()


def _damageable(world: World) -> list[tuple[DecodeEngine, Load]]:
    return [(engine, load) for engine in _decoding(world) for load in engine.damageable] if world.verify else []


@move(8, lambda world: bool(_damageable(world)))
def damage(world: World, pick: Pick) -> None:
    engine, load = pick(_damageable(world))
    tokens = load.prompt.tokens - (load.prompt.blocks - len(load.blocks)) * BLOCK_SIZE
    engine.damage(load, pick(range(LAYERS)), pick(range(tokens)), pick(range(HEADS)))


@move(1, lambda world: bool(world.engines))
def kill(world: World, pick: Pick) -> None:
    world.kill(pick(list(world.engines)), lingers=pick([0, 1, 3]))


@move(3, lambda world: len(world.engines) < len(DECODERS) + 1)
def restart(world: World, pick: Pick) -> None:
    world.start(pick([engine_id for engine_id in ("P", *DECODERS) if engine_id not in world.engines]))


@move(2, lambda world: bool(world.engines))
def stop_or_continue(world: World, pick: Pick) -> None:
    engine_id = pick(list(world.engines))
    world.freeze(engine_id, not world.engines[engine_id].frozen)


@move(1, lambda world: bool(world.engines))
def deafen(world: World, pick: Pick) -> None:
    """A side channel's listener ends or returns. That proves nothing about the writers."""
    world.deaf ^= {pick(list(world.engines))}


@move(2, lambda world: _computes(world) and bool(world.prompts))
def say_a_token_again(world: World, pick: Pick) -> None:
    """P repeats a first token, or sends one for a load that did not ask, has failed or is unknown."""
    engine = pick(world.decoders) if world.decoders else None
    if engine is not None:
        loads = [(load.request_id, load) for load in engine.loads.values()]
        request_id, load = pick([*loads, ("nobody-1", None)])
        fits = load is not None and load.sampling in (SAMPLING, None)
        message = FirstToken(request_id, load.prompt.first_token if fits else None)
        sender = pick(_prefill(world).ranks)
        for rank in engine.ranks:
            sender.transport.notify(rank.name, encode(message))
