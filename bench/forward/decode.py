"""D's process: registers blocks, is written to, and checks every byte.

A script. Argument: file descriptor of its end of a socket pair with P.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection

import torch

from bench.forward.kv import Noise
from bench.forward.orders import Check, CheckCeiling, Checked, CheckRest, Register
from bench.forward.settings import ForwardSettings
from bench.pair.end import Cache, End, digest_of, settle, strays
from bench.pair.meeting import meet_prefill, run_decode
from bench.pair.orders import UseCache
from bench.pair.settings import POISON
from bench.pair.unpacking import Unpacking
from layerpush.core.wire import Completion, Registration, Unpack, encode_registration, read

PREFILL = "P"
NOTIFICATION_POLL_S = 1e-3
"""As the writer thread of a worker that awaits something."""
COMPLETION_TIMEOUT_S = 5.0


class DecodeEnd:
    def __init__(self, prefill: Connection, settings: ForwardSettings) -> None:
        self._prefill = prefill
        self._end = End("D", settings)
        self._noise = Noise(settings.noise_bytes, settings.seed, self._end.device)
        meet_prefill(self._end, prefill, digest_of(self._noise.bytes))
        self._corrupts = settings.corrupt
        self._cache: Cache | None = None
        self._unpacking: Unpacking | None = None
        self._registrations: dict[str, Registration] = {}
        self._completed: set[str] = set()
        self._cpu_began = 0.0

    def serve(self) -> None:
        """Until P hangs up."""
        while True:
            self._turn()
            if self._prefill.poll(NOTIFICATION_POLL_S):
                answer = self._obey(self._prefill.recv())
                settle(self._end.device)
                self._prefill.send(answer)

    def _turn(self) -> None:
        for sender, payload in self._end.transport.notifications():
            match read(payload):
                case Unpack() as message:
                    assert self._unpacking is not None
                    self._unpacking.heard(sender, message)
                case Completion(request_id):
                    self._completed.add(request_id)
                case other:
                    raise ValueError(f"{PREFILL} said {other}")
        if self._unpacking is not None:
            self._unpacking.turn()

    def _obey(self, order: object) -> Checked | str | None:
        match order:
            case UseCache(block_bytes, layers):
                self._cache = self._end.cache(block_bytes, layers)
                self._unpacking = Unpacking(self._end, self._cache)
            case Register(request_id, targets):
                self._register(request_id, targets)
            case Check(turn, request_ids):
                used = time.process_time() - self._cpu_began
                return Checked(self._check(turn, request_ids), used)
            case CheckCeiling(size):
                return self._check_ceiling(size)
            case CheckRest():
                return self._check_rest()
            case _:
                raise ValueError(order)
        return None

    def _register(self, request_id: str, targets: tuple[int, ...]) -> None:
        assert self._unpacking is not None
        registration = self._registrations[request_id] = self._unpacking.expect(request_id, targets)
        self._end.transport.notify(PREFILL, encode_registration(registration))
        self._cpu_began = time.process_time()

    def _check(self, turn: int, request_ids: tuple[str, ...]) -> str | None:
        assert self._cache is not None
        assert self._unpacking is not None
        missing = self._await(request_ids)
        if missing:
            return f"no completion came for {', '.join(missing)}"
        wanted = [block for name in request_ids for block in self._registrations[name].local_block_ids[0]]
        targets = torch.tensor(wanted, device=self._end.device)
        if self._corrupts:
            self._cache.slots[0][targets[-1], -1] ^= 0x01
        wrong = 0
        for layer, got in enumerate(self._cache.slots):
            here = got.index_select(0, targets)
            there = self._noise.layer(turn, layer, here.numel()).view(here.shape)
            if not torch.equal(here, there):
                wrong += int((here != there).sum())
            got.index_fill_(0, targets, POISON)
        for name in request_ids:
            self._unpacking.forget(name)
            del self._registrations[name]
            self._completed.discard(name)
        return f"{wrong} bytes of D's blocks are not what the forward computed" if wrong else None

    def _await(self, request_ids: tuple[str, ...]) -> list[str]:
        """The requests whose completion does not come."""
        deadline = time.monotonic() + COMPLETION_TIMEOUT_S
        while not self._completed.issuperset(request_ids) and time.monotonic() < deadline:
            self._turn()
            time.sleep(NOTIFICATION_POLL_S)
        return sorted(set(request_ids) - self._completed)

    def _check_ceiling(self, size: int) -> str | None:
        got, wanted = self._end.ring[:size], self._noise.bytes[:size]
        problem = None if torch.equal(got, wanted) else "the wire's ceiling was measured with bytes that did not arrive"
        got.fill_(POISON)
        return problem

    def _check_rest(self) -> str | None:
        assert self._unpacking is not None
        leftovers = self._unpacking.leftovers()
        if leftovers is not None:
            return leftovers
        stray = strays(self._end.memory)
        return f"{stray} bytes were written outside D's blocks" if stray else None


if __name__ == "__main__":
    run_decode(DecodeEnd, sys.argv[1])
