"""P's process: the writer's turns over a free transport, and NIXL's calls for WRITEs to D.

A script. Arguments: file descriptors of its ends of two socket pairs, with the command and with D.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.pair.end import digest_of, fill_with_noise
from bench.pair.meeting import PrefillSide, run_prefill
from bench.pair.reach import Reach
from bench.pair.settings import Settings
from bench.pair.tables import draw_blocks
from bench.push.orders import Check
from bench.writer.prices import CASES, Measure, Samples, step_of
from bench.writer.turns import turns
from layerpush.prefill.writer import WRITE_POLL_S

WARM_UP = 2
"""Rounds that do not count."""
LAND_TIMEOUT_S = 20.0


class PrefillEnd(PrefillSide):
    def __init__(self, link: str, decode: Connection, settings: Settings) -> None:
        super().__init__(link, decode, settings)
        fill_with_noise(self._end.memory, settings.seed)
        self._other = self._meet(digest_of(self._end.memory))
        self._random = random.Random(settings.seed)

    def obey(self, order: Measure) -> list[Samples]:
        """Raises ``WrongBytesError`` when a byte is not where it must be."""
        geometry = step_of(1).block_bytes, step_of(1).layers if order.part == "turns" else 1
        self._is_new(*geometry)
        reach = Reach(self._end, self._other, *geometry)
        take: Callable[..., dict[str, float]] = turns if order.part == "turns" else self._calls
        samples = [Samples(case) for case in CASES[order.part]]
        for turn in range(-WARM_UP, order.rounds):
            for each in self._random.sample(samples, len(samples)):  # the sample before one affects its time
                taken = take(reach, self._random.getrandbits(32), **each.case)
                if turn >= 0:
                    each.add(taken)
        self._check_rest(reach.cache, f"after all {order.part}")
        reach.close()
        return samples

    def _calls(self, reach: Reach, seed: int, descriptors: int) -> dict[str, float]:
        """One WRITE: processor seconds of each of NIXL's calls, and the number of its polls."""
        draw = draw_blocks("random", descriptors, reach.cache.blocks, (seed,))
        local, remote = (np.array(side, np.int32) for side in (draw.sources, draw.targets))
        (route,), agent, taken, polls = reach.link.routes, self._end.agent, dict[str, float](), 0

        def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
            before = time.thread_time()
            answer = call(*arguments)
            taken[name] = taken.get(name, 0.0) + time.thread_time() - before
            return answer

        sides = (route.local_descriptors, local, route.remote_descriptors, remote)
        handle = timed("make", agent.make_prepped_xfer, "WRITE", *sides)
        deadline = time.monotonic() + LAND_TIMEOUT_S
        state = timed("transfer", agent.transfer, handle)
        while not polls or (state == "PROC" and time.monotonic() < deadline):  # a writer polls each WRITE at least once
            time.sleep(WRITE_POLL_S)
            state = timed("check", agent.check_xfer_state, handle)
            polls += 1
        if state != "DONE":
            raise RuntimeError(f"a WRITE of {descriptors} descriptors has not landed: {state}")
        timed("release", agent.release_xfer_handle, handle)
        self._check(Check(draw), f"{descriptors} descriptors")
        return taken | {"polls": polls}


if __name__ == "__main__":
    run_prefill(PrefillEnd, *sys.argv[1:])
