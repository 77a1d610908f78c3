"""The bytes that a table counts are those that it holds: each table that a peer fills, with its worst legal entries."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
import pytest

from layerpush.core.prefixes import Prefixes
from layerpush.core.request_names import Arrived
from layerpush.core.wire import (
    MAX_CONTACT_BYTES,
    MAX_GROUPS,
    MAX_ID_CHARS,
    MAX_PARAMETER_CHARS,
    MAX_PARAMETERS,
    MAX_PARTS,
    MAX_REASON_CHARS,
    MAX_TP_SIZE,
    REGISTRATION_PREFIX,
    Cancel,
    Completed,
    Decline,
    Fail,
    FirstToken,
    Landed,
    PartSums,
    PeerMessage,
    Registration,
    encode,
    read,
)
from layerpush.decode.early_messages import EarlyMessages
from layerpush.decode.prefill_peers import PrefillPeers
from layerpush.prefill.links import address_of
from layerpush.transport.acknowledged import AcknowledgedTransport
from layerpush.transport.base import Transport
from layerpush.transport.peers import Peers
from tests.unit.fake_peers import FakePeers
from tests.unit.test_claims import World

Counted = Callable[[], int]
"""Returns the bytes that a table counts, and keeps the table."""
M = TypeVar("M", bound=PeerMessage)
WIDE = "\U0001f600"
"""A character of 4 bytes."""


def longest(number: int) -> str:
    """An id of the greatest length, with an engine's suffix."""
    return f"{number:06}{WIDE * (MAX_ID_CHARS - 8)}/x"


def arrived(message: M) -> M:
    """A message as it comes from a peer: all its parts are new."""
    return cast(M, read(encode(message)))


def registration(number: int, blocks: int, groups: int = 1, **more: Any) -> Registration:
    """A registration with its longest names, as it comes from a peer."""
    size = -(-blocks // groups)
    ids = range(300, 300 + blocks)
    keys = {
        "request_id": longest(number),
        "decode_engine_id": "E",
        "decode_host": "h" * 255,
        "decode_port": 1,
        "decode_tp_size": MAX_TP_SIZE,
        "local_block_ids": [list(ids[at : at + size]) for at in range(0, blocks, size)],
        "layerpush": 2,
        "prefill_request_id": longest(number),
        "transfer_id": longest(number),
        "prompt_digest": longest(number),
        "parameters": [[WIDE * MAX_PARAMETER_CHARS] * 2] * MAX_PARAMETERS,
    }
    return cast(Registration, read(REGISTRATION_PREFIX + msgspec.msgpack.encode({**keys, **more})))


def connected() -> World:
    """A P that is connected to the engine E."""
    world = World(connected=False)
    world.network.connected["E"] = ("e-0",)
    return world


def claims(end: Callable[[World, Registration], object], number: int, blocks: int, groups: int = 1) -> Counted:
    """D registers requests, and each of them comes to its ``end``."""
    world = connected()
    for each in range(number):
        wanted = registration(each, blocks, groups)
        world.receives(wanted, "e-0")
        end(world, wanted)
        world.mail.sent.clear()
    tables = world.claims._claims
    return lambda: sum(each.held_bytes for each in (tables.waiting, tables.unwanted, tables._served, tables._over))


def waits(_: World, __: Registration) -> None:
    pass


def is_served(world: World, wanted: Registration) -> None:
    """P pushes it, and the request ends. So does all that P knows of the request."""
    request_id = wanted.prefill_request_id or ""
    world.claims.requests_arrived([Arrived(request_id, wanted.transfer_id, wanted.prompt_digest)])
    assert world.claims.take_registration(request_id, world.now) is not None
    world.claims.push_ended(request_id, None, world.now)
    world.tick(100.0)


def is_cancelled(world: World, wanted: Registration) -> None:
    world.cancels(wanted, "e-0")


def is_taken_back(world: World, wanted: Registration) -> None:
    world.takes_back(wanted, "e-0")


def declined() -> Counted:
    world = connected()
    for number in range(100):
        name = longest(number)
        world.claims.on_decline(arrived(Decline(name, "E", name, name, name)), world.now)
    return lambda: world.claims._claims.unwanted.held_bytes


def registered_by_many() -> Counted:
    world = connected()
    for number in range(MAX_TP_SIZE // 4):
        world.network.connected["E"] = (sender := longest(number),)
        world.receives(registration(0, 1), sender)
        world.mail.sent.clear()
    return lambda: world.claims._claims.waiting.held_bytes


def from_strangers(blocks: int) -> Counted:
    world = connected()
    for number in range(50):
        world.claims.on_registration(longest(number), registration(number, blocks), world.now)
    return lambda: world.claims.peers._held.held_bytes


def withheld() -> Counted:
    world = connected()
    world.loses("E")
    for number in range(100):
        asked = arrived(Cancel(longest(number), "E", "h" * 255, 1, 1))
        reason = WIDE * MAX_REASON_CHARS
        world.claims.peers.answer(address_of(asked), arrived(Fail(longest(number), 0, reason, True)), world.now)
    return lambda: world.claims.peers._withheld.held_bytes


def elsewhere() -> Counted:
    world = connected()
    for number in range(50):
        world.claims.rank_is_other(longest(number), 1, world.now)
    return lambda: world.claims._prompts._elsewhere.held_bytes


def ended(number: int, name: Callable[[int], str]) -> Counted:
    """P's requests, all of one transfer: each begins after the others have ended."""
    world = connected()
    for request_id in map(name, range(number)):
        world.claims.requests_arrived([Arrived(request_id, "transfer", request_id)])
        world.claims.take_registration(request_id, world.now)
        world.claims.push_ended(request_id, request_id, world.now)
    return lambda: world.claims._prompts._ended.held_bytes


def present(prefixes: int) -> Counted:
    """Requests of P, or turns that D keeps, with digests of so many prefixes."""
    world = connected()
    for number in range(50):
        turn = Prefixes(8, bytes(16 * prefixes)) if prefixes else None
        world.claims.requests_arrived([Arrived(longest(number), longest(number), longest(number), turn)])
    world.tick()
    return lambda: world.claims._prompts._live.held_bytes


def contacts(engines: int, ranks: int, size: int) -> Counted:
    peers = Peers()
    for number in range(engines):
        peer = peers[longest(number)]
        for rank in range(ranks):
            peer.contacts[longest(rank)] = bytes(size)
        peers.keep(peer)
    return lambda: peers._peers.held_bytes


def samplers() -> Counted:
    """Engines whose first tokens D cannot use, because of many sampling parameters."""
    peers = FakePeers().connections
    prefill = PrefillPeers(*(cast(Any, each) for each in (None, peers, None, None, None)))
    for number in range(20):
        names = (WIDE * MAX_PARAMETER_CHARS,) * (2 * MAX_PARAMETERS)
        prefill.samples_otherwise(longest(number), "r", arrived(FirstToken("r", None, names)).other)
    return lambda: peers.peers._peers.held_bytes


def early(number: int, message: Callable[[str], Completed | Fail]) -> Counted:
    table = EarlyMessages()
    for each in range(number):
        payload = encode(message(longest(each)))
        table.keep(longest(each), cast(Completed, read(payload)), payload, 0.0)
    return lambda: table.held_bytes


def completed(name: str) -> Completed:
    part = PartSums(WIDE * 8, 0, 1, 0, 1, 1, bytes(4))
    return Completed(name, 1, 1, (part,) * MAX_PARTS)


def landed(agents: int, writes: int) -> Counted:
    class Network:
        """Each agent's WRITEs have landed."""

        notify = contact = meet = lambda *_: None

        def notifications(self) -> list[tuple[str, bytes]]:
            writes_of = ((longest(agent), write) for agent in range(agents) for write in range(1000, 1000 + writes))
            return [(agent, encode(Landed(write))) for agent, write in writes_of]

    transport = AcknowledgedTransport(cast(Transport, Network()))
    transport.notifications()
    return lambda: transport._landed.held_bytes


FILLED: dict[str, Callable[[], Counted]] = {
    "claims that wait": lambda: claims(waits, 20, 8192),
    "claims that wait, in many groups": lambda: claims(waits, 10, 2 * MAX_GROUPS, MAX_GROUPS),
    "claims that wait, with long names": lambda: claims(waits, 50, 1),
    "a claim of many senders": registered_by_many,
    "claims that were served": lambda: claims(is_served, 20, 8192),
    "claims that were cancelled": lambda: claims(is_cancelled, 20, 8192),
    "claims that were taken back": lambda: claims(is_taken_back, 20, 8192),
    "claims that were declined": declined,
    "registrations of a D that may have restarted": lambda: from_strangers(8192),
    "the same, with long names": lambda: from_strangers(1),
    "answers to a lost D": withheld,
    "requests that ended": lambda: ended(50, longest),
    "many requests that ended": lambda: ended(400, lambda number: f"{number:06}/p"),
    "requests that went to another rank": elsewhere,
    "requests that have come": lambda: present(0),
    "turns that are kept": lambda: present(4096),
    "engines without a connection": lambda: contacts(100, 0, 0),
    "engines with a long contact each": lambda: contacts(20, 1, MAX_CONTACT_BYTES),
    "engines with many contacts": lambda: contacts(4, 200, 1),
    "engines with other sampling parameters": samplers,
    "early completions with checksums": lambda: early(5, completed),
    "early failures": lambda: early(100, lambda name: Fail(name, 0, WIDE * MAX_REASON_CHARS, True)),
    "WRITEs of one agent": lambda: landed(1, 4096),
    "agents with a WRITE each": lambda: landed(100, 1),
}


@pytest.mark.parametrize("table", FILLED)
def test_what_a_table_counts_is_what_it_holds(table: str) -> None:
    logging.disable(logging.CRITICAL)
    tracemalloc.start()
    try:
        counted = FILLED[table]()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    assert held / 2 < counted() < 2 * held
