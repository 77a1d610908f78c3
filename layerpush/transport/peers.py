"""The engines that this worker knows: one ``Peer`` for each, all in one table.

A peer's life is longer than that of a connection: contacts, and whether an engine lives, count between two connections.
Anybody may name engines, so the table has a bound. It forgets the peers that it has not heard of for longest, but none
that is connected or being connected to, or whose connection is closing.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from layerpush.core.bounded_dict import BoundedDict
from layerpush.core.sizes import size_of
from layerpush.transport.link import Link
from layerpush.transport.link_speed import LinkSpeed

KEPT = 4096
KEPT_BYTES = 32 << 20
PEER_BYTES = 4096
"""Bytes of a peer without its contacts and the facts of its last connection."""
CONTACTS_BYTES = 4 << 20
"""Of the contacts of one peer."""

Rank = tuple[int, int]
"""An agent's (pipeline, tensor) parallel rank in its engine."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an engine's side channel, and the number of the engine's ranks.

    ``notify_only``: we never write to its memory, so its descriptors are not prepared. That is no part of the address:
    two addresses that differ only in it are equal. Nor is ``has_stages``: the address is a prefill engine's, and names
    the number of its stages.
    """

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int = 1
    notify_only: bool = field(default=False, compare=False)
    has_stages: bool = field(default=False, compare=False)

    def is_at(self, other: Address) -> bool:
        """Whether the two are one side channel, whatever the number of ranks."""
        return (self.host, self.port) == (other.host, other.port)


@dataclass(slots=True, eq=False)
class Handshake:
    """A handshake, and the address at which it was begun. ``is_awaited``: layerpush asked for it, not vLLM alone.

    ``alias``: another address at which the connected process was found. A host may have several names.
    """

    pending: Future[Any]
    address: Address
    is_awaited: bool = False
    alias: Address | None = None


@dataclass(slots=True, eq=False)
class Peer:
    """Another engine. Only the writer thread changes it, but for ``handshake`` and ``link``: vLLM may drop a
    connection on the main thread.
    """

    engine_id: str
    handshake: Handshake | None = None
    """The one that runs, or that has connected the engine."""
    link: Link | None = None
    """For WRITEs over this connection."""
    speed: LinkSpeed = field(default_factory=LinkSpeed)
    closing: str | None = None
    """Why the connection is to be dropped as soon as no WRITE is on its way over it. Nothing new begins on it."""
    is_lost: bool = False
    """Its connection was lost, or it was restarted. It has not shown since then that it lives."""
    contacts: BoundedDict[str, bytes] = field(default_factory=lambda: BoundedDict(KEPT, CONTACTS_BYTES))
    """How to notify its agents without a handshake."""
    speaks_layerpush: set[str] = field(default_factory=set)
    """Agents that have sent a message that only layerpush sends, or whose side channel has said that they do."""
    other_sampling: tuple[str, ...] = ()
    """Sampling parameters of its first tokens that differ from ours, as they were logged."""
    facts: Any = None
    """vLLM's facts about the engine, as of its last connection that was dropped."""

    @property
    def is_used(self) -> bool:
        """Whether it has a connection, or a handshake runs."""
        return self.handshake is not None or self.closing is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of memory, about."""
        return PEER_BYTES + self.contacts.held_bytes + sum(map(size_of, (self.other_sampling, self.facts)))


class Peers:
    """All peers, by engine id. Writer thread, but for ``get``."""

    def __init__(self) -> None:
        self._peers: BoundedDict[str, Peer] = BoundedDict(KEPT, KEPT_BYTES)

    def __getitem__(self, engine_id: str) -> Peer:
        """The peer of this id, known or new."""
        peer = self.get(engine_id)
        if peer is None:
            peer = Peer(engine_id)
            self.keep(peer)
        return peer

    def get(self, engine_id: str) -> Peer | None:
        """The peer of this id, if it is known. Any thread."""
        return self._peers.get(engine_id)

    def __len__(self) -> int:
        return len(self._peers)

    def keep(self, peer: Peer) -> None:
        """It has grown, or is the newest to count. Forget the oldest ones beyond the limits."""
        self._peers.put(peer.engine_id, peer, lambda engine_id: self._peers[engine_id].is_used)
