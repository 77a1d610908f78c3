"""The part of P's and D's processes that every benchmark shares."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.pair.end import Cache, End, by_rank, settle, strays
from bench.pair.orders import CheckRest, Introduction, UseCache, WrongBytesError
from bench.pair.settings import POISON, Settings
from bench.pair.unpacking import Unpacking
from bench.ucx import of_this_process
from layerpush.core.wire import Unpack, read

NOTIFICATION_POLL_S = 1e-3
"""Poll interval of a worker's writer thread that awaits a message, in seconds."""
GONE = (EOFError, ConnectionResetError, BrokenPipeError)


class PrefillSide:
    """P's process; a bench implements ``obey``. P and D have equal ``settings``."""

    def __init__(self, link: str, decode: Connection, settings: Settings) -> None:
        self._link = link
        self._decode = decode
        self._end = End("P", settings)
        self._geometry: UseCache | None = None
        self._requests = 0

    def obey(self, order: Any) -> Any:
        """The answer to the command. Raises ``WrongBytesError``."""
        raise NotImplementedError

    def _meet(self, digest: bytes) -> Introduction:
        """Introduce P and D to each other."""
        other: Introduction = self._decode.recv()
        self._decode.send(_introduction(self._end, digest))
        self._end.agent.add_remote_agent(other.metadata)
        return other

    def _ask(self, order: object) -> Any:
        """D's answer."""
        self._decode.send(order)
        return self._decode.recv()

    def _is_new(self, block_bytes: int, layers: int, ranks: int = 1) -> bool:
        """Whether this geometry differs from the last one. D uses it from now on."""
        geometry = UseCache(block_bytes, layers, ranks)
        if self._geometry == geometry:
            return False
        self._geometry = geometry
        self._ask(geometry)
        return True

    def _names(self, count: int) -> tuple[str, ...]:
        """Ids of ``count`` new requests."""
        self._requests += count
        return tuple(f"request-{self._requests - index}" for index in range(count))

    def _check_rest(self, cache: Cache, where: str) -> None:
        """Check that only D's blocks were written and that both rings are free. Raises ``WrongBytesError``."""
        raise_if_wrong(self._ask(CheckRest()), where)
        if not cache.ring_is_free:
            raise WrongBytesError(f"{where}: not all spans of P's ring were given back")

    def _check(self, order: object, where: str) -> None:
        """Raises ``WrongBytesError`` when D finds something wrong."""
        raise_if_wrong(self._ask(order), where)


class DecodeSide:
    """D's process: a cache to be written to, our unpacker, and the check of every byte."""

    def __init__(self, prefill: Connection, settings: Settings) -> None:
        self._prefill = prefill
        self._end = End("D", settings)
        self._pause = NOTIFICATION_POLL_S if settings.polls == "engine" else 0.0
        self._corrupts = settings.corrupt
        self._cache: Cache | None = None
        self._ranks: list[list[torch.Tensor]] = []
        self._unpacking: Unpacking | None = None

    def obey(self, order: Any) -> Any:
        """The answer to an order of P's that this class does not know."""
        raise NotImplementedError

    def heard(self, message: Any) -> None:
        """A message of P's that is not for the unpacker."""

    def serve(self) -> None:
        """Serve P until it hangs up."""
        while True:
            self._turn()
            if self._prefill.poll(self._pause):
                answer = self._answer(self._prefill.recv())
                settle(self._end.device)
                self._prefill.send(answer)

    def _meet(self, digest: bytes) -> None:
        """Introduce D and P to each other. Raises ``RuntimeError`` unless P has bytes with this digest, too."""
        self._prefill.send(_introduction(self._end, digest))
        other: Introduction = self._prefill.recv()
        if digest != other.digest:
            raise RuntimeError("P and D were not made from the same bytes")
        self._end.agent.add_remote_agent(other.metadata)

    def _turn(self) -> None:
        for sender, payload in self._end.transport.notifications():
            message = read(payload)
            if isinstance(message, Unpack):
                self._needed.heard(sender, message)
            else:
                self.heard(message)
        if self._unpacking is not None:
            self._unpacking.turn()

    @property
    def _needed(self) -> Unpacking:
        assert self._unpacking is not None, "UseCache comes first"
        return self._unpacking

    def _answer(self, order: object) -> Any:
        match order:
            case UseCache(block_bytes, layers, ranks):
                self._cache = self._end.cache(block_bytes, layers)
                self._ranks = by_rank(self._end.memory, block_bytes, layers, ranks)
                self._unpacking = Unpacking(self._end, self._cache)
                return None
            case CheckRest():
                return self._rest()
            case _:
                return self.obey(order)

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

    def _rest(self) -> str | None:
        leftovers = self._needed.leftovers()
        if leftovers is not None:
            return leftovers
        stray = strays(self._end.memory)
        return f"{stray} bytes were written outside D's blocks" if stray else None


def run_prefill(make: Callable[[str, Connection, Any], PrefillSide], command_end: str, decode_end: str) -> None:
    """P's process: ``make(link, decode, settings)``, then answer orders until the command hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    command, decode = Connection(int(command_end)), Connection(int(decode_end))
    try:
        link, settings = command.recv()
        decode.send(settings)
        end = make(link, decode, settings)
        command.send(of_this_process())
        while True:
            order = command.recv()
            try:
                command.send(end.obey(order))
            except WrongBytesError as error:
                command.send(error)
    except GONE as error:
        if command.poll(0):  # the command hung up: we are done
            return
        raise RuntimeError("D's process has ended") from error


def run_decode(make: Callable[[Connection, Any], DecodeSide], prefill_descriptor: str) -> None:
    """D's process: ``make(prefill, settings)``, then serve P."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prefill = Connection(int(prefill_descriptor))
    try:
        settings: Settings = prefill.recv()
        make(prefill, settings).serve()
    except GONE:
        return  # D has no work without P


def raise_if_wrong(problem: str | None, where: str) -> None:
    """Raises ``WrongBytesError`` if D found a problem."""
    if problem is not None:
        raise WrongBytesError(f"{where}: {problem}")


def _introduction(end: End, digest: bytes) -> Introduction:
    metadata = end.agent.get_agent_metadata()
    return Introduction(metadata, end.memory.data_ptr(), end.ring.data_ptr(), end.device_id, digest)
