"""Requests that an idle engine may still know: P keeps the registrations of a dead D for a while."""

from __future__ import annotations

import dataclasses

import pytest

from layerpush.core.wire import Registration
from layerpush.prefill.claim_protocol import Registered
from layerpush.prefill.claim_table import ClaimTable
from layerpush.prefill.pairing import Pairing
from tests.faults.soak.audits import ALLOWED, Auditor
from tests.faults.soak.inhost import Audit, audit, left_in
from tests.unit.soak_stubs import LATER, SoakRig


class Desk:
    """Keeps a registration whose request never came to P; ``pushes`` is any other table."""

    def __init__(self, request_id: str) -> None:
        self._claims = ClaimTable(Pairing(str), lambda _: False)
        self.pushes: dict[str, str] = {}
        registration = Registration(
            request_id=f"{request_id}-ab12cd34",
            decode_engine_id="D1-1",
            decode_host="127.0.0.1",
            decode_port=26000,
            decode_tp_size=1,
            local_block_ids=[[1]],
        )
        claim = self._claims.get(registration.key)
        claim.handle(Registered("d-0", registration, reachable=True, busy=False), 0.0)
        self._claims.keep(claim, 0.0)


def left(desk: Desk, texts: list[str], orphans: list[str]) -> list[str]:
    return left_in({"worker": desk}, texts, orphans, ALLOWED)


def test_the_audit_finds_a_waiting_registration_of_a_live_d() -> None:
    places = left(Desk("soak-000001"), ["soak-000001"], ["soak-000002"])
    assert places
    assert all(place.startswith("worker._claims.waiting.") for place in places)


def test_the_audit_ignores_only_the_waiting_registration_of_a_dead_d() -> None:
    desk = Desk("soak-000001")
    assert left(desk, ["soak-000002"], ["soak-000001"]) == []
    desk.pushes["soak-000001-ab12cd34"] = "a push"
    assert left(desk, [], ["soak-000001"]) == ["worker.pushes{key}"]


@pytest.mark.parametrize("way", ["replaced", "ended"])
def test_a_request_is_an_orphan_once_its_d_has_died(way: str) -> None:
    rig = SoakRig()
    rig.send()
    [request_id] = rig.traffic.sent.ids()
    assert rig.traffic.sent.orphans() == set()
    rig.slots["P1"].incarnation += 1
    assert rig.traffic.sent.orphans() == set(), "D cancels, not P"
    if way == "replaced":
        rig.slots["D1"].incarnation += 1
    else:
        rig.d.ended = True
    assert rig.traffic.sent.orphans() == {request_id}


def test_a_request_not_sent_to_its_d_is_no_orphan() -> None:
    rig = SoakRig()
    rig.send(order="p-first")
    rig.slots["D1"].incarnation += 1
    assert rig.traffic.sent.orphans() == set()


def test_an_audit_names_the_orphaned_requests() -> None:
    rig = SoakRig()
    rig.send()
    rig.slots["D1"].incarnation += 1
    rig.send(number=2)
    dead, alive = rig.traffic.sent.ids()
    rig.p.answers = Audit(3, (), (), 0, (), 9)
    auditor = Auditor([rig.slots["P1"]], rig.traffic.sent)
    assert not auditor.over(0.0)
    assert rig.p.called[-1] == (audit, ([alive], [dead], ALLOWED))
    rig.p.answers = dataclasses.replace(rig.p.answers, missing_blocks=0)
    auditor._audits[0]._next_at = 0.0
    auditor.over(0.0)
    assert auditor.over(LATER)
    assert auditor.leaks() == []
