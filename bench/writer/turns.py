"""The writer's own processor time: steps over a transport that costs nothing."""

from __future__ import annotations

import time

from bench.forward.lane import Lane
from bench.forward.models import BLOCK_TOKENS
from bench.pair.reach import DECODE, Reach
from bench.writer.prices import step_of
from layerpush.core.step_plan import PromptProgress, StepPlan
from layerpush.core.wire import Registration
from layerpush.transport.base import DescriptorIds, Route, WriteHandle, WriteState
from layerpush.worker.wake import Waker


class FreeTransport:
    """Moves nothing. A WRITE lands at its second poll."""

    def __init__(self) -> None:
        self.writes = 0
        self._polled: set[WriteHandle] = set()

    def post_write(self, route: Route, local: DescriptorIds, remote: DescriptorIds) -> WriteHandle:  # noqa: ARG002
        self.writes += 1
        return self.writes

    def poll(self, handle: WriteHandle) -> WriteState:
        if handle in self._polled:
            return WriteState.LANDED
        self._polled.add(handle)
        return WriteState.PENDING

    def release(self, handle: WriteHandle) -> None:
        self._polled.remove(handle)

    def notify(self, agent: str, payload: bytes) -> None:
        """Does nothing."""

    def notifications(self) -> list[tuple[str, bytes]]:
        return []


def turns(reach: Reach, seed: int, mode: str, requests: int) -> dict[str, float]:
    """One step. ``turn_s``: processor seconds of all turns with something to do; ``poll_s``: of one without.

    Three turns follow each event: one takes it and posts, one polls in vain, one lands. Raises ``RuntimeError`` if a
    push does not end well.
    """
    step, transport = step_of(requests), FreeTransport()
    lane = Lane(mode, reach, transport, Waker(), None)
    events, spent = lane.step_events, [0.0, 0.0, 0.0]

    def turn() -> None:
        for index in range(3):
            before = time.thread_time()
            lane.writer.turn()
            spent[index] += time.thread_time() - before

    draws = {f"request-{index}": draw for index, draw in enumerate(step.draws(reach.cache.blocks, seed))}
    lane.host.expects(tuple(draws))
    chunks = []
    for name, draw in draws.items():
        lane.host.registered(
            Registration(
                request_id=name,
                decode_engine_id=DECODE,
                decode_host="127.0.0.1",
                decode_port=1,
                decode_tp_size=1,
                local_block_ids=(draw.targets,),
            )
        )
        chunks.append(PromptProgress(name, (BLOCK_TOKENS,)).advance(0, step.tokens, step.tokens, [list(draw.sources)]))
    events.arm(StepPlan(tuple(filter(None, chunks))))
    turn()
    for layer in lane.layout.layers:
        events.layer_saved(layer.name)
        turn()
    events.sweep()
    turn()
    for name, draw in draws.items():
        events.finish(name, (list(draw.sources),))
    turn()
    if lane.host.problems or not lane.host.all_over.is_set():
        raise RuntimeError(f"{step}: {'; '.join(lane.host.problems) or 'a push did not end'}")
    return {"turn_s": spent[0] + spent[2], "poll_s": spent[1] / (step.layers + 3), "writes": transport.writes}
