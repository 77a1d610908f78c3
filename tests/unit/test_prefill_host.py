"""P's host on a network on which D has to acknowledge WRITEs: which push each D gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from layerpush.core.wire import Registration
from layerpush.engine.worker.prefill_host import NO_ANSWER, OLD_RELEASE, WorkerHost
from layerpush.prefill.push import PeerRefusedError
from layerpush.transport.link import Link

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


def host(*, acknowledges: bool) -> WorkerHost:
    worker: Any = SimpleNamespace(
        acknowledges=acknowledges,
        agents_of=lambda engine_id: ("agent",),
        discover_link=lambda engine_id: DIRECT,
        touch_engine=lambda engine_id: None,
        mismatch=lambda engine_id: None,
        report_sent=None,
        whole_write_ended=None,
        transfer_stats=SimpleNamespace(pushed=None, failed=None),
    )
    packing: Any = SimpleNamespace(strategy=None, with_gathering=lambda link: link)
    claims: Any = SimpleNamespace(
        is_current=lambda registration: True, peers=SimpleNamespace(closing=lambda engine_id: None)
    )
    writer: Any = SimpleNamespace(fail=None)
    connections: Any = None
    return WorkerHost(
        worker,
        connections,
        packing,
        lambda engine_id: None,
        lambda _: writer,
        lambda _: claims,
    )


def connect(registration: Registration, *, acknowledges: bool) -> Link | None:
    push: Any = None
    return host(acknowledges=acknowledges).connect(push, registration)


@pytest.mark.parametrize("registration", [STOCK, OLDER, OURS])
def test_over_ucx_every_d_is_written_to_by_layer(registration: Registration) -> None:
    assert connect(registration, acknowledges=False) == DIRECT


def test_a_d_that_acknowledges_is_written_to_by_layer() -> None:
    assert connect(OURS, acknowledges=True) == DIRECT


def test_a_stock_d_gets_whole_requests() -> None:
    link = connect(STOCK, acknowledges=True)
    assert link is not None
    assert (link.refusal, link.routes) == (NO_ANSWER, ())


def test_an_older_d_of_ours_gets_nothing() -> None:
    """It would take a notification of ours for the end of bytes that are on their way."""
    with pytest.raises(PeerRefusedError, match=OLD_RELEASE):
        connect(OLDER, acknowledges=True)
