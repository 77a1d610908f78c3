"""D's process: registers blocks, is written to, and checks every byte.

A script. Argument: file descriptor of its end of a socket pair with P.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection

import torch

from bench.forward.end import GONE, NOTIFICATION_POLL_S, ProcessSide, by_rank, digest_of, settle, strays
from bench.forward.kv import Noise
from bench.forward.orders import Check, CheckCeiling, Checked, CheckRest, Introduction, RegisterBlocks, UseCache
from bench.forward.settings import POISON, ForwardSettings
from layerpush.core.wire import Completed, Completion, Registration, encode_registration, read
from layerpush.decode.checks import Checks
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.kv_parts import CHECKSUM

PREFILL = "P"
COMPLETION_TIMEOUT_S = 5.0
BEHIND_P = 10
"""D's nice value on a core that it shares with P's writer thread. If D stops that thread while it holds Python's lock,
the forward waits for D. Engines on hosts of their own do not do that.
"""


class DecodeEnd:
    """A cache to be written to, and the check of every byte."""

    def __init__(self, prefill: Connection, settings: ForwardSettings) -> None:
        if settings.cores is not None:
            os.nice(BEHIND_P)  # inherited by the threads of its agent
        self._prefill = prefill
        self._end = ProcessSide("D", settings)
        self._corrupts = settings.corrupt
        self._slots: list[torch.Tensor] = []
        self._ranks: list[list[torch.Tensor]] = []
        self._noise = Noise(settings.noise_bytes, settings.seed, self._end.device)
        self._meet(digest_of(self._noise.bytes))
        self._registrations: dict[str, Registration] = {}
        self._completions: Counter[str] = Counter()
        self._load, self._completed_at = LoadRecord(request_id="", engine_id="D"), 0.0

    def serve(self) -> None:
        """Serve P until it hangs up."""
        while True:
            self._turn()
            if self._prefill.poll(NOTIFICATION_POLL_S):
                answer = self._answer(self._prefill.recv())
                settle(self._end.device)
                self._prefill.send(answer)

    def _meet(self, digest: bytes) -> None:
        """Introduce D and P to each other. Raises ``RuntimeError`` unless P has bytes with this digest, too."""
        self._prefill.send(self._end.introduction(digest))
        other: Introduction = self._prefill.recv()
        if digest != other.digest:
            raise RuntimeError("P and D were not made from the same bytes")
        self._end.agent.add_remote_agent(other.metadata)

    def _turn(self) -> None:
        for _, payload in self._end.transport.notifications():
            match read(payload):
                case Completed() as message:
                    self._compare(message)
                    self._completions[message.request_id] += 1
                case Completion(request_id):
                    self._completions[request_id] += 1
                case other:
                    raise ValueError(f"{PREFILL} sent {other}")
            self._completed_at = time.perf_counter()

    def _compare(self, message: Completed) -> None:
        """As an engine does. Raises ``ValueError``."""
        wrong = self._checks.difference(
            self._registrations[message.request_id], message.tokens, message.sums, self._load
        )
        if wrong is not None:
            raise ValueError(f"right KV has other checksums: {wrong}")

    def _answer(self, order: object) -> str | Checked | None:
        match order:
            case UseCache(block_bytes, layers, ranks):
                cache = self._end.cache(block_bytes, layers)
                self._slots, self._checks = cache.slots, Checks(cache.parts, Recorder())
                self._ranks = by_rank(self._end.memory, block_bytes, layers, ranks)
                return None
            case RegisterBlocks(request_id, targets):
                self._register(request_id, targets)
                return None
            case Check(turn, request_ids):
                problem = self._check(turn, request_ids)
                verified, self._load.verified_parts = self._load.verified_parts, 0
                return Checked(problem, self._completed_at, verified)
            case CheckCeiling(size):
                return self._check_ceiling(size)
            case CheckRest():
                stray = strays(self._end.memory)
                return f"{stray} bytes were written outside D's blocks" if stray else None
            case _:
                raise ValueError(order)

    def _register(self, request_id: str, targets: tuple[int, ...]) -> None:
        registration = self._registrations[request_id] = Registration(
            request_id=request_id,
            decode_engine_id="D",
            decode_host="127.0.0.1",
            decode_port=1,
            decode_tp_size=1,
            local_block_ids=(targets,),
            verifies=CHECKSUM,
        )
        self._end.transport.notify(PREFILL, encode_registration(registration))

    def _check(self, turn: int, request_ids: tuple[str, ...]) -> str | None:
        missing = self._await(request_ids)
        if missing:
            return f"not every rank got a completion for {', '.join(missing)}"
        targets = [block for name in request_ids for block in self._registrations[name].local_block_ids[0]]
        shape = (len(targets), self._slots[0].shape[1])
        size = shape[0] * shape[1]
        expected = (self._noise.layer(turn, layer, size).view(shape) for layer in range(len(self._slots)))
        wrong = self._wrong_bytes(targets, expected)
        for name in request_ids:
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

    def _wrong_bytes(self, targets: Sequence[int], expected: Iterable[torch.Tensor]) -> int:
        """The number of wrong bytes in these blocks, on all ranks. ``expected``: ``uint8 [blocks, block_bytes]`` for
        each layer. Poisons the blocks.
        """
        places = torch.tensor(targets, device=self._end.device)
        if self._corrupts:
            self._ranks[-1][0][places[-1], -1] ^= 0x01
        wrong = 0
        for layer, whole in zip(zip(*self._ranks, strict=True), expected, strict=True):
            for got, there in zip(layer, whole.chunk(len(layer), dim=1), strict=True):
                here = got.index_select(0, places)
                if not torch.equal(here, there):
                    wrong += int((here != there).sum())
                got.index_fill_(0, places, POISON)
        return wrong

    def _check_ceiling(self, size: int) -> str | None:
        got, wanted = self._end.ring[:size], self._noise.bytes[:size]
        problem = None if torch.equal(got, wanted) else "the wire's ceiling was measured with bytes that did not arrive"
        got.fill_(POISON)
        return problem


def run(prefill_end: str) -> None:
    """Serve P until it hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prefill = Connection(int(prefill_end))
    try:
        settings: ForwardSettings = prefill.recv()
        DecodeEnd(prefill, settings).serve()
    except GONE:
        return  # D has no work without P


if __name__ == "__main__":
    run(sys.argv[1])
