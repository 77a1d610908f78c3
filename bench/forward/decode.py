"""D's process: registers blocks, is written to, and checks every byte.

A script. Argument: file descriptor of its end of a socket pair with P.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection

import torch

from bench.forward.kv import Noise
from bench.forward.orders import Check, CheckCeiling, Checked, Register
from bench.forward.settings import ForwardSettings
from bench.pair.end import digest_of
from bench.pair.meeting import NOTIFICATION_POLL_S, DecodeSide, run_decode
from bench.pair.settings import POISON
from layerpush.core.wire import Completion, Registration, encode_registration

PREFILL = "P"
COMPLETION_TIMEOUT_S = 5.0
BEHIND_P = 10
"""D's nice value on a core that it shares with P's writer thread. If D stops that thread while it holds Python's lock,
the forward waits for D. Engines on hosts of their own do not do that.
"""


class DecodeEnd(DecodeSide):
    def __init__(self, prefill: Connection, settings: ForwardSettings) -> None:
        if settings.cores is not None:
            os.nice(BEHIND_P)  # inherited by the threads of its agent
        super().__init__(prefill, settings)
        self._noise = Noise(settings.noise_bytes, settings.seed, self._end.device)
        self._meet(digest_of(self._noise.bytes))
        self._registrations: dict[str, Registration] = {}
        self._completions: Counter[str] = Counter()
        self._cpu_began = 0.0

    def heard(self, message: object) -> None:
        match message:
            case Completion(request_id):
                self._completions[request_id] += 1
            case other:
                raise ValueError(f"{PREFILL} sent {other}")

    def obey(self, order: object) -> Checked | str | None:
        match order:
            case Register(request_id, targets):
                self._register(request_id, targets)
            case Check(turn, request_ids):
                used = time.process_time() - self._cpu_began
                return Checked(self._check(turn, request_ids), used)
            case CheckCeiling(size):
                return self._check_ceiling(size)
            case _:
                raise ValueError(order)
        return None

    def _register(self, request_id: str, targets: tuple[int, ...]) -> None:
        registration = self._registrations[request_id] = self._needed.expect(request_id, targets)
        self._end.transport.notify(PREFILL, encode_registration(registration))
        self._cpu_began = time.process_time()

    def _check(self, turn: int, request_ids: tuple[str, ...]) -> str | None:
        assert self._cache is not None
        missing = self._await(request_ids)
        if missing:
            return f"not every rank got a completion for {', '.join(missing)}"
        targets = [block for name in request_ids for block in self._registrations[name].local_block_ids[0]]
        shape = (len(targets), self._cache.slots[0].shape[1])
        size = shape[0] * shape[1]
        expected = (self._noise.layer(turn, layer, size).view(shape) for layer in range(len(self._cache.slots)))
        wrong = self._wrong_bytes(targets, expected)
        for name in request_ids:
            self._needed.forget(name)
            del self._registrations[name]
            del self._completions[name]
        return f"{wrong} bytes of D's blocks are not what the forward computed" if wrong else None

    def _await(self, request_ids: tuple[str, ...]) -> list[str]:
        """The requests without a completion for each rank."""
        deadline = time.monotonic() + COMPLETION_TIMEOUT_S
        while (missing := self._incomplete(request_ids)) and time.monotonic() < deadline:
            self._turn()
            time.sleep(NOTIFICATION_POLL_S)
        return missing

    def _incomplete(self, request_ids: tuple[str, ...]) -> list[str]:
        return sorted(name for name in request_ids if self._completions[name] < len(self._ranks))

    def _check_ceiling(self, size: int) -> str | None:
        got, wanted = self._end.ring[:size], self._noise.bytes[:size]
        problem = None if torch.equal(got, wanted) else "the wire's ceiling was measured with bytes that did not arrive"
        got.fill_(POISON)
        return problem


if __name__ == "__main__":
    run_decode(DecodeEnd, sys.argv[1])
