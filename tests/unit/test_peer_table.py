"""The table of peers: bounded, because anybody may name engines, without losing one that is in use."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from layerpush.core.wire import MAX_CONTACT_BYTES
from layerpush.transport import peers
from layerpush.transport.peers import CONTACTS_BYTES, PEER_BYTES, Address, Handshake, Peers
from tests.unit.fake_peers import FakePeers


@pytest.mark.parametrize("limit", ["entries", "bytes"])
def test_the_oldest_engine_without_a_connection_is_forgotten(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "KEPT", 8 if limit == "entries" else 1 << 20)
    monkeypatch.setattr(peers, "KEPT_BYTES", 1 << 30 if limit == "entries" else 12 * PEER_BYTES)
    table = Peers()
    table["connected"].handshake = Handshake(Future(), Address("connected", "host", 1, 1))
    table["closing"].closing = "it was lost"
    for number in range(100):
        table[f"unknown-{number}"]
    assert len(table) <= 12
    assert table.get("unknown-99") is not None
    assert table.get("unknown-0") is None
    assert table["connected"].handshake is not None
    assert table["closing"].closing is not None


def test_a_message_that_names_an_engine_makes_no_peer() -> None:
    fakes = FakePeers()
    fakes.connections.address("nobody")
    assert (fakes.connections.closing("nobody"), fakes.connections.is_connecting("nobody")) == (None, False)
    assert len(fakes.network.peers) == 0


def test_contacts_of_one_engine_are_bounded() -> None:
    table = Peers()
    peer = table["D"]
    for number in range(2 * CONTACTS_BYTES // MAX_CONTACT_BYTES):
        peer.contacts[f"d-{number}"] = bytes(MAX_CONTACT_BYTES)
        table.keep(peer)
    assert peer.held_bytes <= CONTACTS_BYTES + PEER_BYTES + 1024
    assert table._peers.held_bytes <= 2 * CONTACTS_BYTES


def test_forgetting_an_engine_waits_for_its_writes() -> None:
    """Meanwhile the connection is closing, and it is dropped once."""
    fakes, closed, busy = FakePeers(), list[str](), [True]
    fakes.network.end_pushes = lambda _, __: not busy[0]
    fakes.connections.on_closed = lambda engine_id, _: closed.append(engine_id)
    fakes.network.connect(Address("D", "host", 1, 1), "d-0")
    assert not fakes.connections.forget("D")
    fakes.settle()
    assert (fakes.network.forgotten, fakes.connections.closing("D")) == (
        [],
        "the connection to the decode engine was lost",
    )
    busy[0] = False
    fakes.settle()
    fakes.settle()
    assert (fakes.network.forgotten, closed, fakes.connections.closing("D")) == (["D"], ["D"], None)
