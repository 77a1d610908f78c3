"""The configuration keys: the effects of each, and its lack of other effects."""

from tests.e2e import engines
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check, introduce, prompt, send
from tests.e2e.models import LAYERS
from tests.e2e.streamchecks import check_completed, check_streamed

CASES: tuple[tuple[int, Order], ...] = (
    (1, "late"), (32, "early"), (33, "together"), (257, "early"), (513, "late"), (900, "early"), (900, "late"),
)  # fmt: skip


def test_layerwise_off_is_whole_push(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_WHOLE, engines.D_LAYER)
    for length, order in CASES:
        handoff = send(p, d, prompt(length, seed=20), order)
        check(handoff.outcome(), reference)
        check_whole(handoff)


def check_whole(handoff: Handoff) -> None:
    push = handoff.push()
    check_completed(push, len(handoff.token_ids))
    assert (push.mode, push.fallback, len(push.writes)) == ("request", None, 1)
    assert push.writes_before_last_ready == 0


def test_chunks(fleet: Fleet, reference: Reference) -> None:
    p, d = fleet.get(engines.P_AUTO, engines.D_LAYER)
    introduce(p, d)
    for length, order in CASES:
        handoff = send(p, d, prompt(length, seed=21), order, mode="chunk")
        check(handoff.outcome(), reference)
        check_completed(handoff.push(), length)
        if (length, order) == (900, "early"):
            push = check_streamed(handoff, mode="chunk")
            assert len(push.writes) <= len(push.chunks)
            for write in push.writes:
                assert write["layers"] == [0, LAYERS - 1], "a chunk was not written with all its layers"


def test_auto_needs_no_more_writes_than_layers(fleet: Fleet, reference: Reference) -> None:
    """The first prompts may go by layer: P knows neither the link nor the time of a layer yet."""
    p, d = fleet.get(engines.P_AUTO, engines.D_LAYER)
    introduce(p, d)
    for seed in (22, 26):
        handoff = send(p, d, prompt(1200, seed=seed), "early")
        check(handoff.outcome(), reference)
        push = check_streamed(handoff, mode="auto")
        assert len(push.writes) <= len(push.chunks) * LAYERS
