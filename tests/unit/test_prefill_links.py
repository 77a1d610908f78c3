"""P's links on a network on which D has to acknowledge WRITEs: which push each D gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from layerpush.core.wire import Registration
from layerpush.prefill.links import NO_ANSWER, OLD_RELEASE, Links
from layerpush.transport.link import Link
from layerpush.transport.peers import Peers

DIRECT = Link("D", (), (8,))
STOCK = Registration(
    request_id="request-1",
    decode_engine_id="D",
    decode_host="host",
    decode_port=1,
    decode_tp_size=1,
    local_block_ids=((1, 2),),
)
OLDER = msgspec.structs.replace(STOCK, layerpush=1)
OURS = msgspec.structs.replace(OLDER, acknowledges=True)


def connect(registration: Registration, *, acknowledges: bool) -> Link | str:
    """The link, or the refusal."""
    worker: Any = SimpleNamespace(
        acknowledges=acknowledges,
        discover_link=lambda engine_id: DIRECT,
        touch_engine=lambda engine_id: None,
        mismatch=lambda engine_id: None,
    )
    connections: Any = SimpleNamespace(peers=Peers())
    links = Links(worker, connections)
    return links.refusal(registration) or links.to(registration)


@pytest.mark.parametrize("registration", [STOCK, OLDER, OURS])
def test_over_ucx_every_d_is_written_to_by_layer(registration: Registration) -> None:
    assert connect(registration, acknowledges=False) == DIRECT


def test_a_d_that_acknowledges_is_written_to_by_layer() -> None:
    assert connect(OURS, acknowledges=True) == DIRECT


def test_a_stock_d_gets_whole_requests() -> None:
    link = connect(STOCK, acknowledges=True)
    assert isinstance(link, Link)
    assert (link.refusal, link.routes) == (NO_ANSWER, ())


def test_an_older_d_of_ours_gets_nothing() -> None:
    """It would take a notification of ours for the end of bytes that are on their way."""
    assert connect(OLDER, acknowledges=True) == OLD_RELEASE


def test_a_new_connection_keeps_the_speed_of_the_engine() -> None:
    worker: Any = SimpleNamespace(
        acknowledges=False, discover_link=lambda engine_id: Link(engine_id, (), ()), touch_engine=lambda engine_id: None
    )
    connections: Any = SimpleNamespace(peers=Peers())
    links = Links(worker, connections)
    first = links.to(OURS)
    assert links.to(OURS) is first
    connections.peers["D"].link = None  # the worker drops the connection
    assert links.to(OURS) is not first
    assert links.to(OURS).speed is first.speed
