"""The writer with a scheduled policy: layers wait, leave in time, and nothing is lost."""

from __future__ import annotations

import pytest

from layerpush.core.link_speed import LinkSpeed
from layerpush.core.push_policy import Policy
from layerpush.prefill.layer_interval import LONGEST_S, LayerInterval
from layerpush.prefill.step_events import StepEvents
from layerpush.prefill.writer import PEER_POLL_S, WRITE_POLL_S
from tests.unit.writer_rig import BLOCK_BYTES, Prompt, Rig

LAYERS, TOKENS = 12, 22
SCHEDULED = Policy(scheduled=True)


def rig_with(layer_s: float | None, byte_s: float | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, Prompt]:
    """A writer that takes layers and links for so slow. None: it knows nothing of them."""
    monkeypatch.setattr(LayerInterval, "layer_s", layer_s)
    monkeypatch.setattr(LinkSpeed, "is_known", byte_s is not None)
    monkeypatch.setattr(LinkSpeed, "line", (0.0, byte_s or 0.0))
    monkeypatch.setattr(LinkSpeed, "slowdown", lambda *_: 1.0)
    return Rig(layers=LAYERS, policy=SCHEDULED), Prompt("p-1", TOKENS, list(range(1, 9)), "auto")


def written(rig: Rig) -> list[tuple[int, int]]:
    """The layers of each WRITE."""
    return [write.layers for record in rig.trace.records for write in record.writes]


@pytest.mark.parametrize(
    ("layer_s", "byte_s", "layers"),
    [
        (None, 1e-9, [(layer, layer) for layer in range(LAYERS)]),
        (1000.0, None, [(layer, layer) for layer in range(LAYERS)]),
        (1000.0, 1e-9, [(0, 0), (1, 9), (10, 10), (11, 11)]),
        (1.0, 1e-4, [(0, 0), (1, 9), (10, 10), (11, 11)]),
        (1.0, 1.0, [(layer, layer) for layer in range(LAYERS)]),
    ],
    ids=["layers are not known", "the link is not known", "an idle link", "a fast link", "a full link"],
)
def test_layers_leave_when_the_rule_says_so(
    layer_s: float | None, byte_s: float | None, layers: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, prompt = rig_with(layer_s, byte_s, monkeypatch)
    wanted = rig.registers(prompt)
    rig.step((prompt, TOKENS), between=rig.settle)
    rig.settle()
    rig.finish(prompt)
    assert written(rig) == layers
    rig.assert_delivered(prompt, wanted)
    rig.assert_clean()


def test_a_chunk_that_is_not_the_last_goes_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, prompt = rig_with(1000.0, 1e-9, monkeypatch)
    wanted = rig.registers(prompt)
    rig.step((prompt, 9), between=rig.settle)
    rig.step((prompt, 13), between=rig.settle)
    rig.settle()
    rig.finish(prompt)
    assert written(rig) == [(0, 0), (1, 11), (0, 9), (10, 10), (11, 11)]
    rig.assert_delivered(prompt, wanted)
    rig.assert_clean()


def test_the_writer_sleeps_until_layers_have_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, prompt = rig_with(10.0, 1e-9, monkeypatch)
    rig.registers(prompt)
    timeouts: list[float] = []

    def between() -> None:
        rig.settle()
        if rig.writer.layer_poll_timeout is not None:
            timeouts.append(rig.writer.layer_poll_timeout)

    rig.step((prompt, TOKENS), between=between)
    assert max(timeouts) == pytest.approx(80, abs=10), "until layer 11 of 12 is ready, from layer 2 or 3 on"
    assert min(timeouts) < 10, "then for each layer"


def test_the_writer_looks_early_at_a_write_while_no_layer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a WRITE never seems to land earlier than the next layer, and layers never wait."""
    layer_s, write_s = 8e-3, 4e-3
    rig, prompt = rig_with(layer_s, write_s / (6 * BLOCK_BYTES), monkeypatch)
    rig.fabric.faults.hold_writes.update(dict.fromkeys(range(LAYERS), 1000))
    rig.registers(prompt)
    timeouts: list[float | None] = []
    rig.step((prompt, TOKENS), between=lambda: timeouts.append(rig.writer.poll_timeout))
    assert all(timeout is not None and timeout <= write_s / 2 for timeout in timeouts[: LAYERS - 1])
    assert max(timeout for timeout in timeouts if timeout is not None) > WRITE_POLL_S, "and not all the time"


def test_the_writer_looks_for_fences_while_layers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing wakes it for a fence, and a step's last layer may come much earlier than expected."""
    rig, prompt = rig_with(10.0, 1e-9, monkeypatch)
    rig.registers(prompt)
    timeouts: list[float | None] = []

    def between() -> None:
        rig.settle()
        with monkeypatch.context() as patch:
            patch.setattr(StepEvents, "pending", True)
            rig.writer.turn()
            timeouts.append(rig.writer.poll_timeout)

    rig.step((prompt, TOKENS), between=between)
    assert max(timeout for timeout in timeouts if timeout is not None) == LONGEST_S


def test_the_writer_looks_for_a_registration_while_layers_of_another_prompt_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, prompt = rig_with(10.0, 1e-9, monkeypatch)
    rig.registers(prompt)
    timeouts: list[float | None] = []

    def between() -> None:
        rig.settle()
        timeouts.append(rig.writer.poll_timeout)

    rig.step((prompt, TOKENS), (Prompt("p-2", TOKENS, list(range(20, 28)), "auto"), TOKENS), between=between)
    assert max(timeout for timeout in timeouts if timeout is not None) <= PEER_POLL_S
