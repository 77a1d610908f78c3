"""The checks of this suite can fail: they notice wrong bytes, a silent fallback and a leak."""

import re

import pytest

from tests.e2e import engines, probes
from tests.e2e.conftest import check_nothing_left
from tests.e2e.fixtures import LogReader
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Reference, check, introduce, new_id, prompt, send
from tests.e2e.streamchecks import check_streamed

LENGTH = 700


def test_wrong_bytes_on_the_wire_change_kv_and_tokens(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_WRONG, engines.D_LAYER)
    p.call(probes.damage, "wire", 0.0)
    introduce(p, d)
    handoff = send(p, d, prompt(LENGTH, seed=70), "early", max_tokens=24)
    outcome = handoff.outcome()
    check_streamed(handoff)
    assert {layer for layer, _ in handoff.differing_cells()} == {engines.CORRUPTED_LAYER}
    assert outcome.d_tokens != reference.tokens(handoff.token_ids, 24)
    with pytest.raises(AssertionError, match="KV differs"):
        check(outcome, reference)


def test_wrong_bytes_on_the_wire_fail_the_load(fleet: Fleet, reference: Reference, logs: LogReader) -> None:
    """D compares checksums, and computes the prompt itself."""
    p, d = fleet.get(engines.P_WRONG, engines.D_RECOMPUTING)
    p.call(probes.damage, "wire", 1.0)
    introduce(p, d)
    handoff = send(p, d, prompt(LENGTH, seed=76), "early", max_tokens=24)
    assert handoff.outcome().d_tokens == reference.tokens(handoff.token_ids, 24)
    (line,) = logs.errors(d)
    layer = f"model.layers.{engines.CORRUPTED_LAYER}.self_attn.attn"
    assert re.search(f"{handoff.request_id}.*{p.engine_id}.*is not what it has sent: layer {layer}, tokens 0", line)


def test_wrong_kv_in_p_changes_tokens(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_WRONG, engines.D_LAYER)
    p.call(probes.damage, "cache", 1.0)
    handoff = send(p, d, prompt(LENGTH, seed=71), "early", max_tokens=24)
    outcome = handoff.outcome()
    assert handoff.differing_cells() == []
    assert outcome.d_tokens != reference.tokens(handoff.token_ids, 24)


def test_a_silent_fallback_is_noticed(fleet: Fleet) -> None:
    p, d = fleet.get(engines.P_WHOLE, engines.D_LAYER)
    handoff = send(p, d, prompt(LENGTH, seed=72), "early")
    handoff.outcome()
    with pytest.raises(AssertionError, match="request"):
        check_streamed(handoff)


def test_a_leak_is_noticed(fleet: Fleet) -> None:
    """A handoff without a D holds blocks and table entries on P."""
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    handoff = Handoff(new_id(), prompt(100, seed=73), p, d)
    p.add(handoff.to_p())
    p.peek_output(handoff.request_id)
    with pytest.raises(AssertionError):
        check_nothing_left(p)
    assert p.call(probes.mentions, [handoff.request_id])
    d.add(handoff.to_d())
    handoff.outcome()


def test_an_error_in_a_log_is_noticed(fleet: Fleet, logs: LogReader) -> None:
    (p,) = fleet.get(engines.P_LAYER)
    assert logs.errors(p) == []
    p.call(probes.log_an_error)
    assert len(logs.errors(p)) == 1


def test_poison_would_be_seen(fleet: Fleet) -> None:
    """D's registered blocks hold a pattern until bytes arrive, so missing KV cannot pass for pushed KV."""
    p, d = fleet.get(engines.P_LAYER, engines.D_LAYER)
    token_ids = prompt(64, seed=74)
    first = send(p, d, token_ids, "early")
    first.outcome()
    other = send(p, d, prompt(64, seed=75), "early")
    other.outcome()
    assert first.d.digest(first.request_id).differing(other.d.digest(other.request_id)) != []
