"""A prefill rank's use of a window that a decode rank offers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from layerpush.core.config import LayerPushConfig
from layerpush.core.wire import (
    MAX_RING_BYTES,
    Registration,
    Window,
    encode_registration,
)
from layerpush.engine.worker.prefill_host import WorkerHost
from layerpush.transport.base import Route
from layerpush.transport.link import Link
from layerpush.transport.packing.memory import PIECE_BYTES
from tests.unit.builders import layout_of, registration

LAYOUT = layout_of([0, 0])
LINK = Link("D", (Route("d-0", 3, "kv", "kv"),), (64, 64))
RING = Route("d-0", 3, "pieces", "ring")
OFFER = Window(
    rank=3,
    ring=1 << 40,
    ring_size=16 * PIECE_BYTES,
    device=0,
    offset=4 * PIECE_BYTES,
    size=2 * PIECE_BYTES,
    layout=LAYOUT.digest,
)


class Packing:
    """The offered ring can be written to, unless ``strategy`` is None."""

    def __init__(self, strategy: str | None) -> None:
        self.strategy = strategy

    def ring_of(self, engine_id: str, agent: str, window: Window) -> Route | None:
        assert (engine_id, agent) == ("D", "d-0")
        return RING


class FakeRegistrations:
    """Agent ``d-0`` registers."""

    def window(self, registration: Registration, agent: str) -> Window | None:
        assert agent == "d-0"
        return registration.window


def host(packs: bool = True) -> WorkerHost:
    stats = SimpleNamespace(pushed=None, failed=None)
    nothing = cast("Any", SimpleNamespace(fail=None, report_sent=None, whole_write_ended=None, transfer_stats=stats))
    registrations = cast("Any", FakeRegistrations())
    packing = cast("Any", Packing("auto" if packs else None))
    return WorkerHost(nothing, nothing, packing, LAYOUT, nothing, lambda _: nothing, lambda _: registrations)


def offering(**changes: Any) -> Registration:
    return msgspec.structs.replace(registration((1, 2)), window=msgspec.structs.replace(OFFER, **changes))


def test_a_valid_offer_is_accepted() -> None:
    window = host()._window(LINK, offering())
    assert window is not None
    assert (window.route, window.request_id) == (RING, "d-1")
    assert window.spans.capacity_bytes == OFFER.size


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 2},
        {"layout": "another"},
        {"offset": 4 * PIECE_BYTES + 1},
        {"size": PIECE_BYTES + 1},
        {"offset": 15 * PIECE_BYTES},
        {"size": MAX_RING_BYTES},
    ],
)
def test_an_offer_for_another_rank_or_outside_its_ring_is_ignored(changes: dict[str, Any]) -> None:
    assert host()._window(LINK, offering(**changes)) is None


@pytest.mark.parametrize(
    "link",
    [
        Link("D", (), (), refusal="other blocks"),
        replace(LINK, routes=LINK.routes * 2),
        replace(LINK, share=0.5),
    ],
)
def test_an_offer_of_an_engine_with_split_blocks_is_ignored(link: Link) -> None:
    assert host()._window(link, offering()) is None


def test_an_offer_is_ignored_without_packing() -> None:
    assert host(packs=False)._window(LINK, offering()) is None
    assert host()._window(LINK, registration((1, 2))) is None


def test_staging_bytes_are_limited_to_the_largest_valid_ring() -> None:
    assert LayerPushConfig.from_extra_config({"staging_bytes": MAX_RING_BYTES}).staging_bytes == MAX_RING_BYTES
    with pytest.raises(ValueError, match="staging_bytes"):
        LayerPushConfig.from_extra_config({"staging_bytes": MAX_RING_BYTES + 1})


def test_the_fingerprint_of_a_registration_ignores_the_window() -> None:
    """Each rank of a decode engine offers its own window."""
    assert offering().fingerprint == registration((1, 2)).fingerprint


def test_an_offer_adds_few_bytes_to_a_registration() -> None:
    """NIXL's notifications are slow."""
    assert len(encode_registration(offering())) - len(encode_registration(registration((1, 2)))) < 200
