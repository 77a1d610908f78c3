"""A WRITE that NIXL reports as failed may still land. It is not over before that. Over real NIXL only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerpush.transport.base import PeerLostError, TransportError, WriteHandle, WriteState
from layerpush.transport.locked import LockedAgent
from layerpush.transport.nixl import SPLIT_AT, NixlTransport
from tests.contract.link import NixlLink
from tests.support.waiting import until


class Failing:
    """A transport over the link's agent. NIXL reports its first WRITE as failed."""

    def __init__(self, link: NixlLink, split_at: float = SPLIT_AT) -> None:
        agent: Any = LockedAgent(link.agent)
        self.failed: list[Any] = []
        agent.transfer = lambda handle: self.failed.append(handle) or link.agent.transfer(handle)
        agent.check_xfer_state = lambda handle: (
            "ERR" if handle is self.failed[0] else link.agent.check_xfer_state(handle)
        )
        self.transport = NixlTransport(agent, split_at)

    def is_over(self, handle: WriteHandle) -> bool:
        try:
            return self.transport.poll(handle) is not WriteState.PENDING
        except PeerLostError:
            raise
        except TransportError:
            return True


@pytest.mark.parametrize("_shared_link", ["nixl", "nixl-4-threads"], indirect=True)
def test_a_failed_write_is_over_when_all_of_it_has_landed(link: NixlLink) -> None:
    failing, count = Failing(link), SPLIT_AT - 1
    ids = np.arange(count, dtype=np.int32)
    link.freeze()
    try:
        handle = failing.transport.post_write(link.route, ids, ids)
        looks = [failing.is_over(handle) for _ in range(500)]
    finally:
        link.thaw()
    until(lambda: failing.is_over(handle))
    landed = link.memory()
    failing.transport.release(handle)
    assert not any(looks), "the WRITE was over while D was frozen"
    missing = np.flatnonzero((landed[:count] != link.source[:count]).any(axis=1))
    assert missing.size == 0, f"{missing.size} of {count} pieces landed after the WRITE was over"


@pytest.mark.exhaustive
@pytest.mark.parametrize("own_link", ["libfabric"], indirect=True)
def test_a_failed_write_is_not_over_where_nothing_flushes_it(own_link: NixlLink) -> None:
    """All of it has landed, and no confirmation can prove that."""
    failing = Failing(own_link, split_at=0)
    ids = np.arange(64, dtype=np.int32)
    handle = failing.transport.post_write(own_link.route, ids, ids)
    until(lambda: not failing.is_over(handle) and bool((own_link.memory()[:64] == own_link.source[:64]).all()))
    assert not any(failing.is_over(handle) for _ in range(500))


@pytest.mark.parametrize("own_link", ["nixl-4-threads"], indirect=True)
def test_a_failed_write_is_over_when_its_peer_is_dead(own_link: NixlLink) -> None:
    """Also for a WRITE that is too large for a confirmation."""
    failing = Failing(own_link)
    ids = np.arange(2 * SPLIT_AT, dtype=np.int32)
    handle = failing.transport.post_write(own_link.route, ids, ids)
    looks = [failing.is_over(handle) for _ in range(2000)]
    own_link.kill()
    assert not any(looks)
    with pytest.raises(PeerLostError):
        until(lambda: failing.is_over(handle))
    failing.transport.release(handle)
