"""WRITEs that fail, and WRITEs that do not end."""

import itertools
from typing import Literal

import pytest

from tests.e2e import probes, stagingfaults, wirefaults
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Order, Reference, check
from tests.faults import engines
from tests.faults.checks import (
    FEW,
    LogView,
    all_along,
    check_idle_soon,
    check_load_failed,
    check_merged,
    check_owned,
    check_planned,
    check_serves,
    check_under_way,
    described,
    early,
    run_merged,
    spoil_writes,
    start,
    warm_up,
)

LENGTH = 1000
FAULTS: tuple[Literal["fail", "err"], ...] = ("fail", "err")


@pytest.mark.parametrize(
    ("d_spec", "fault", "order", "packing"),
    [
        (engines.D, "fail", "late", "auto"),  # vLLM posts it, and would only log the error
        (engines.D_FAIL, "err", "early", "auto"),
        *(
            engines.for_test_all(d, fault, order, "auto")
            for d, fault, order in itertools.product(engines.DECODERS, FAULTS, ("early", "late"))
            if (d, fault, order) not in ((engines.D, "fail", "late"), (engines.D_FAIL, "err", "early"))
        ),
        *(engines.for_test_all(engines.D, fault, "early", plan) for fault in FAULTS for plan in engines.PLANS),
    ],
    ids=described,
)
def test_one_write_fails(
    fleet: Fleet,
    reference: Reference,
    log: LogView,
    d_spec: EngineSpec,
    fault: Literal["fail", "err"],
    order: Order,
    packing: engines.Packing,
) -> None:
    """A WRITE cannot be posted, or its handle ends in ERR: no completion, and D gets the cause."""
    p, d = fleet.get(engines.with_packing(engines.P, packing), d_spec)
    warm_up(p, d)
    spoil_writes(p, order, fault, 1)
    handoff = start(p, d, LENGTH, 370, order)
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    p.wait_output(handoff.request_id)
    cause = "(posted|cannot post|scripted)" if fault == "fail" else "error"
    log.check_one(d, handoff.request_id, cause if order == "early" else "WRITE")
    log.check_one(p, handoff.request_id, cause if order == "early" else "(WRITE|transfer)")
    assert p.call(wirefaults.sent_kinds, handoff.request_id).count("completion") == 0
    check_idle_soon(p)
    check_idle_soon(d)
    check_planned(handoff)
    if order == "early":
        assert p.call(wirefaults.seen, "post:merged")
    check_serves(p, d, reference, seed=371)


@pytest.mark.parametrize("d_spec", [engines.D_KEEPS, engines.for_test_all(engines.D_FAIL)], ids=described)
def test_d_overwrites_a_block(fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec) -> None:
    """D's KV differs from P's checksums: the load fails, and nothing of it is kept."""
    p, d = fleet.get(engines.P, d_spec)
    warm_up(p, d)
    handoff = early(p, d, LENGTH, seed=410)
    d.call(wirefaults.on_messages, "hold", "completion", "", 1, "in")
    run_merged(p, handoff)
    p.wait_output(handoff.request_id)
    d.poll_until(wirefaults.seen, "got:completion")
    d.call(wirefaults.overwrite_block, handoff.request_id, 3)
    d.call(wirefaults.lift)
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    where = r"layer model\.layers\.\d+\..*, tokens 96 to 127, block \d+: checksum .{8}, on the prefill rank .{8}$"
    log.check_one(d, handoff.request_id, f"is not what it has sent: {where}", "ERROR")
    log.check_none(p, handoff.request_id)
    check_idle_soon(p)
    check_idle_soon(d)
    check_serves(p, d, reference, seed=411)


def test_blocks_cannot_be_copied(fleet: Fleet, reference: Reference, log: LogView) -> None:
    """A copy into staging memory fails: no completion, and D gets the cause."""
    p, d = fleet.get(engines.with_packing(engines.P, "gather"), engines.D)
    warm_up(p, d)
    p.call(wirefaults.watch)
    handoff = early(p, d, LENGTH, seed=408)
    p.call(stagingfaults.fail_copies, FEW)
    run_merged(p, handoff)
    check_load_failed(handoff, reference, timeout=engines.GRACE_S)
    p.wait_output(handoff.request_id)
    for host in (p, d):
        log.check_one(host, handoff.request_id, "could not be gathered: .*an error of the device")
        check_idle_soon(host)
    assert p.call(wirefaults.sent_kinds, handoff.request_id).count("completion") == 0
    check_planned(handoff)
    check_serves(p, d, reference, seed=409)


@pytest.mark.parametrize(
    ("d_spec", "order", "packing"),
    [
        (engines.D, "early", "auto"),
        engines.for_test_all(engines.D_FAIL, "late", "auto"),
        engines.for_test_all(engines.D_FAIL, "early", "auto"),
        engines.for_test_all(engines.D, "late", "auto"),
        *(engines.for_test_all(engines.D, "early", plan) for plan in engines.PLANS),
    ],
    ids=described,
)
def test_write_does_not_end(
    fleet: Fleet, reference: Reference, log: LogView, d_spec: EngineSpec, order: Order, packing: engines.Packing
) -> None:
    """P gives up the push after write_timeout_s, but its WRITE may still land. No request gets the blocks before."""
    p, d = fleet.get(engines.with_packing(engines.P_IMPATIENT, packing), d_spec)
    warm_up(p, d)
    d.call(wirefaults.watch)
    spoil_writes(p, order, "hold", 1)
    handoff = start(p, d, LENGTH, 372, order)
    p.poll_until(wirefaults.held_posts)
    check_under_way(p)
    blocks = d.call(wirefaults.registered_blocks, handoff.request_id)
    check_load_failed(handoff, reference, engines.WRITE_TIMEOUT_S + 2 * engines.PEER_TIMEOUT_S + engines.GRACE_S)
    log.check_one(d, handoff.request_id, "write_timeout_s")
    log.check_one(p, handoff.request_id, "write_timeout_s")
    check_owned(d, blocks)
    assert p.call(probes.free_blocks) < p.idle_blocks
    assert d.call(probes.free_blocks) == d.idle_blocks - len(blocks)
    p.call(wirefaults.lift)
    check_idle_soon(d)
    p.wait_output(handoff.request_id)
    check_idle_soon(p)
    check_planned(handoff)
    check_merged(handoff)
    check_serves(p, d, reference, seed=373)


@pytest.mark.parametrize("order", [engines.for_test_all("early"), "late"])
def test_lease_waits_for_writes_in_flight(fleet: Fleet, reference: Reference, log: LogView, order: Order) -> None:
    """P keeps the blocks until the last WRITE has ended, even beyond the lease."""
    p, d = fleet.get(engines.P_SHORT_LEASE, engines.D)
    warm_up(p, d)
    spoil_writes(p, order, "hold")
    d.call(wirefaults.on_messages, "drop", "heartbeat")
    handoff = start(p, d, LENGTH, 374, order)
    p.peek_output(handoff.request_id)
    p.poll_until(wirefaults.held_posts)
    assert p.call(stagingfaults.open_writes) > 0, "the check of survivors would miss open WRITEs"
    used = p.idle_blocks - -(-LENGTH // 32)
    all_along(lambda: p.call(probes.free_blocks) == used, engines.LEASE_S + 2.0, "P keeps the prompt's blocks")
    p.call(wirefaults.lift)
    check(handoff.outcome(), reference)
    check_merged(handoff)
    for host in (p, d):
        log.check_none(host, handoff.request_id)


@pytest.mark.parametrize("kind", ["completion", "cancelled", *map(engines.for_test_all, ("fail", "accepted"))])
def test_message_of_p_is_lost(fleet: Fleet, reference: Reference, log: LogView, kind: str) -> None:
    """Any single message of P may be lost: D asks again, or D's deadline ends the load."""
    p, d = fleet.get(engines.P, engines.D_HASTY)
    warm_up(p, d)
    d.call(wirefaults.on_messages, "drop", kind, "", 1, "in")
    handoff = early(p, d, LENGTH, seed=375)
    if kind == "fail":
        spoil_writes(p, "early", "fail", 1)
    run_merged(p, handoff)
    if kind == "cancelled":
        d.abort(handoff.request_id)
        check_idle_soon(d)
    else:
        timeout = engines.REGISTRATION_TIMEOUT_S + engines.PEER_TIMEOUT_S + engines.GRACE_S
        check_load_failed(handoff, reference, timeout)
    p.wait_output(handoff.request_id)
    check_idle_soon(p)
    check_serves(p, d, reference, seed=376)


@pytest.mark.parametrize("kind", ["cancel", engines.for_test_all("ping")])
def test_message_of_d_is_lost(fleet: Fleet, reference: Reference, log: LogView, kind: str) -> None:
    """D repeats a Cancel until P answers. One lost Ping does not count as silence."""
    p, d = fleet.get(engines.P, engines.D)
    d.call(wirefaults.on_messages, "drop", kind, "", 1)
    p.hold()
    handoff = early(p, d, LENGTH, seed=377)
    p.add(handoff.to_p())
    p.step(3)
    if kind == "cancel":
        d.abort(handoff.request_id)
        check_idle_soon(d)
        p.run()
        p.wait_output(handoff.request_id)
    else:
        all_along(lambda: not d.has_output(handoff.request_id), engines.PEER_TIMEOUT_S + 1.0, "D waits on")
        p.run()
        check(handoff.outcome(), reference)
        log.check_none(d, handoff.request_id)
    check_idle_soon(p)
    check_serves(p, d, reference, seed=378)


@pytest.mark.parametrize("kinds", [("completion", "accepted", "pong"), ("fail",)], ids=" and ".join)
def test_message_of_p_is_doubled(fleet: Fleet, reference: Reference, log: LogView, kinds: tuple[str, ...]) -> None:
    p, d = fleet.get(engines.P, engines.D)
    warm_up(p, d)
    for kind in kinds:
        p.call(wirefaults.on_messages, "duplicate", kind)
    handoff = early(p, d, LENGTH, seed=379)
    if "fail" in kinds:
        spoil_writes(p, "early", "fail", 1)
    run_merged(p, handoff)
    if "fail" in kinds:
        check_load_failed(handoff, reference, timeout=engines.GRACE_S)
        p.wait_output(handoff.request_id)
    else:
        check(handoff.outcome(), reference)
    check_serves(p, d, reference, seed=380)
