"""Prefill and decode engines against each other on one fake network: their moves, and the rules that always hold.

Everything between the engines is the real thing: sessions, registrations, loads, writers, peers, the watch, the bytes
on the wire. The world plays vLLM (schedulers that give blocks out and take them back, a forward pass), NIXL
(`tests.support.fake_transport`), handshakes, side channels and the clock.
"""

from __future__ import annotations

import logging
import random
from collections import Counter

from bench.rank import Defects
from layerpush.core.push_mode import MAX_IN_FLIGHT, PushMode
from layerpush.core.wire import Registration
from tests.support.fake_transport import FakeFabric, Faults
from tests.unit.both_sides.decode import DecodeEngine
from tests.unit.both_sides.prefill import PrefillEngine, Request
from tests.unit.both_sides.process import D_BLOCKS, LAYERS, P_BLOCKS, Process, Prompt, Turn, base_id
from tests.unit.both_sides.rings import Packing

HOME_S = 1500.0
MISTAKEN = 0.1
"""The probability that a load names the wrong host for P."""
DECODERS = ("D", "E")

Engine = PrefillEngine | DecodeEngine


class World:
    layers = LAYERS
    memory_blocks = P_BLOCKS, D_BLOCKS
    """Blocks in P's and in a D's memory."""
    base_id = staticmethod(base_id)

    def __init__(
        self,
        faults: Faults | None = None,
        seed: int = 0,
        ranks: int = 1,
        mode: PushMode = PushMode.LAYER,
        max_in_flight: int = MAX_IN_FLIGHT,
        packing: Packing | None = None,
        blocks: tuple[int, int] = (P_BLOCKS, D_BLOCKS),
        *,
        ordered: bool = True,
        equal_kv: bool = False,
        verify: float = 0.0,
        turns: bool = False,
        decode_ranks: int = 1,
    ) -> None:
        """``equal_kv``: each of P's ranks holds all KV. Otherwise each has a part of every block. ``verify``: the share
        of pushes by layer whose KV is compared; a D then damages some of its blocks. ``turns``: P keeps turns and
        returns them, as a decode engine does, and D loads them, as a prefill engine does.

        ``decode_ranks``: the ranks of each D, one or two. Each has a part of every block. Two need a P without
        ``equal_kv``.
        """
        assert decode_ranks == 1 or not equal_kv
        self.decode_ranks = decode_ranks
        self.keeps_turns = turns
        self.prefill_blocks, self.decode_blocks = blocks
        self.fabric = FakeFabric(faults, seed, ordered=ordered)
        self.equal_kv, self.verify = equal_kv, verify
        self.ranks, self.mode, self.max_in_flight = ranks, mode, max_in_flight
        self.packing = packing or Packing()
        self.copies = random.Random(self.packing.seed)
        """Draws the durations and the failures of copies."""
        self.questions = random.Random(seed)
        """Draws requests for P's first token, and their sampling parameters."""
        self.routers = random.Random(seed)
        """Draws wrong hosts of P in loads, and heartbeats that connect D to P."""
        self.mistaken = MISTAKEN
        self.tokens: Counter[str] = Counter()
        """Answers to loads that asked for P's first token: the token, or the reason for its absence."""
        self.now = 1000.0
        self.prompts: list[Prompt] = []
        self.engines: dict[str, Engine] = {}
        self.turns: list[tuple[str, Turn]] = []
        """Turns that P has kept, each with its name."""
        self.returned = 0
        """Loads of a part of such a turn that have completed."""
        self.deaf: set[str] = set()
        """Engines whose side channel refuses although they live."""
        self.kept_blocks = 0
        """Blocks that have landed of loads that have failed."""
        self.outcomes: Counter[str] = Counter()
        self.mismatches = 0
        """Loads that have failed because their KV was damaged."""
        self.whole_pushes: set[tuple[str, str]] = set()
        """Keys of registrations that a rank has pushed whole."""
        self.rewinds = 0
        """Steps that P's scheduler has taken back."""
        self.completions: Counter[tuple[str, str, tuple[str, str]]] = Counter()
        self.wrongs: list[str] = []
        """Forbidden uses of memory."""
        self.plans: Counter[str] = Counter()
        """Landed WRITEs by plan."""
        self.defects = Defects()
        logging.getLogger("vllm.layerpush").addHandler(self.defects)
        self._names = self._ids = self._checked = 0
        for engine_id in ("P", *DECODERS):
            self.start(engine_id)

    def close(self) -> None:
        logging.getLogger("vllm.layerpush").removeHandler(self.defects)

    def new_name(self, engine_id: str, rank: int) -> str:
        self._names += 1
        return f"{engine_id}{rank}#{self._names}"

    def new_id(self, base: str) -> str:
        self._ids += 1
        return f"{base}-{self._ids:08x}"

    # Engines.

    @property
    def prefill(self) -> PrefillEngine | None:
        engine = self.engines.get("P")
        return engine if isinstance(engine, PrefillEngine) else None

    @property
    def decoders(self) -> list[DecodeEngine]:
        return [engine for engine in self.engines.values() if isinstance(engine, DecodeEngine)]

    @property
    def requests(self) -> list[Request]:
        return [] if self.prefill is None else list(self.prefill.requests.values())

    def engine_of(self, agent: str) -> Engine | None:
        """The living engine with this agent."""
        living = self.engines.values()
        return next((engine for engine in living if agent in [process.name for process in engine.processes]), None)

    def start(self, engine_id: str) -> None:
        if engine_id == "P":
            self.engines["P"] = PrefillEngine(self, "P", self.ranks)
        else:
            self.engines[engine_id] = DecodeEngine(self, engine_id, self.decode_ranks)

    def kill(self, engine_id: str, lingers: int) -> None:
        for process in self.engines.pop(engine_id).processes:
            self.fabric.kill(process.name, lingers)
        self.deaf.discard(engine_id)

    def freeze(self, engine_id: str, frozen: bool) -> None:
        self.engines[engine_id].frozen = frozen
        for process in self.engines[engine_id].processes:
            (self.fabric.freeze if frozen else self.fabric.thaw)(process.name)

    @property
    def running(self) -> list[Process]:
        return [process for engine in self.engines.values() if not engine.frozen for process in engine.processes]

    def turn(self) -> None:
        if self.prefill is not None and not self.prefill.frozen:
            self.prefill.reap_leases()
            if all(request.table for request in self.requests):
                for rank in self.prefill.ranks:
                    rank.claims.short_of_blocks = False
        for process in self.running:
            process.turn()

    def note_completion(self, process: Process, registration: Registration, agent: str) -> None:
        self.completions[process.name, agent, registration.key] += 1

    # The rules, and the way home.

    def check(self) -> None:
        assert self.fabric.violations == [], self.fabric.violations[0]
        assert self.wrongs == [], self.wrongs[0]
        assert self.defects.seen == [], self.defects.seen[0]
        twice = [key for key, count in self.completions.items() if count > 1]
        assert not twice, f"completed twice: {twice}"
        self.check_posts()

    def check_posts(self) -> None:
        """No WRITE is posted from blocks that P gave away. Gathers have a check of their own."""
        for write in self.fabric.writes[self._checked :]:
            if self.prefill is None or not write.source.alive or write.route.local_descriptors == "blocks":
                continue
            holders = self.prefill.holders
            strays = [block for block in write.local.tolist() if holders.get(block % self.memory_blocks[0]) is None]
            assert not strays, f"{write} was posted from blocks {strays} that the prefill engine gave away"
        self._checked = len(self.fabric.writes)

    def drive_home(self) -> None:
        """Faults and new requests stop: everything must end by itself, and cleanly."""
        self.fabric.faults = Faults()
        self.deaf.clear()
        for engine_id in self.engines:
            self.freeze(engine_id, False)
        deadline, step_s = self.now + HOME_S, 0.25
        while self.now < deadline and self.is_busy:
            self._compute_on()
            self.turn()
            self.check()
            self.now, step_s = self.now + step_s, min(step_s * 1.05, 10.0)
        for engine in self.engines.values():
            engine.assert_idle()

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt is not over on P or on a D."""
        return bool(self.requests or any(engine.loads or engine.queue for engine in self.decoders))

    @property
    def is_busy(self) -> bool:
        engines = [(engine, process) for engine in self.engines.values() for process in engine.processes]
        return any(_is_busy(engine, process) for engine, process in engines)

    def compute_first(self) -> None:
        """One step for the request that came first, or none, if the blocks for it are not free."""
        engine, running = self.prefill, [each for each in self.requests if each.leased_until is None]
        if engine is None or not running:
            return
        if running[0].is_computed:
            engine.finish(running[0])
        elif engine.begin_step(running[0], running[0].prompt.tokens):
            while engine.step is not None:
                engine.run_layer(hooked=True)

    def _compute_on(self) -> None:
        engine = self.prefill
        if engine is None:
            return
        while engine.step is not None:
            engine.run_layer(hooked=True)
        for request in list(engine.requests.values()):
            if request.leased_until is not None:
                continue
            if request.is_computed:
                engine.finish(request)
            elif engine.begin_step(request, request.prompt.tokens):
                return


def _is_busy(engine: Engine, process: Process) -> bool:
    try:
        engine.assert_idle()
    except AssertionError:
        return True
    return bool(process.tasks)
