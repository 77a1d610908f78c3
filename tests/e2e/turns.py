"""Turns of a conversation through a P and a D that keep and load them."""

import dataclasses
from typing import Any

from tests.e2e import probes
from tests.e2e.enginehost import EngineHost
from tests.e2e.enginespec import BLOCK_SIZE, TRACE
from tests.e2e.handoff import Handoff, Outcome, new_id

ANSWER = 40
TURNS: dict[str, Any] = {"bidirectional_kv_xfer": True, "trace_dir": TRACE}


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn that is over. ``computed``: the tokens of its prompt that P was given."""

    outcome: Outcome
    computed: int
    params: dict[str, Any]
    """Those with which the next turn goes to P."""

    @property
    def text(self) -> list[int]:
        return [*self.outcome.handoff.token_ids, *self.outcome.d_tokens]


def take_turn(
    p: EngineHost,
    d: EngineHost,
    token_ids: list[int],
    before: dict[str, Any] | None = None,
    *,
    answer: int = ANSWER,
    forgets: bool = True,
) -> Turn:
    """``before``: the params that D returned with the turn before. ``forgets``: P's prefix cache has nothing of it."""
    if forgets:
        p.wait_idle()
        assert p.call(probes.reset_prefix_cache)
    p.call(probes.count_scheduled_tokens)
    handoff = begin_turn(p, d, token_ids, before, answer)
    finished = d.peek_output(handoff.request_id)
    outcome = Outcome(handoff, p.wait_output(handoff.request_id).token_ids, finished.token_ids)
    d.wait_output(handoff.request_id)
    assert finished.kv_transfer_params is not None
    return Turn(outcome, p.call(probes.scheduled_tokens, handoff.request_id), finished.kv_transfer_params)


def begin_turn(
    p: EngineHost, d: EngineHost, token_ids: list[int], before: dict[str, Any] | None = None, max_tokens: int = ANSWER
) -> Handoff:
    """Send a turn to both engines. ``before``: the params that D returned with the turn before."""
    handoff = Handoff(new_id(), token_ids, p, d, max_tokens)
    to_p = handoff.to_p()
    p.add(to_p if before is None else dataclasses.replace(to_p, kv_transfer_params=before))
    d.add(handoff.to_d())
    return handoff


def shared_tokens(turn: Turn) -> int:
    """The tokens of a turn's full blocks. Its last token has no KV."""
    return (len(turn.text) - 1) // BLOCK_SIZE * BLOCK_SIZE
