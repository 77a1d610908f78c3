"""Packed blocks on a decode rank: offers windows of its staging ring, scatters the bytes that prefill ranks write."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from msgspec.structs import replace

from layerpush.core.bounded_dict import BoundedDict
from layerpush.core.layout import CacheLayout
from layerpush.core.wire import NULL_BLOCK, Part, Registration, Unpack, Unpacked, Window
from layerpush.transport.packing.memory import PIECE_BYTES, Copies, Staging
from layerpush.transport.packing.windows import Windows

logger = logging.getLogger(f"vllm.{__name__}")

ANSWERS_KEPT = 4096
"""For each agent: no agent can push out the answers to another."""
ANSWERS_BYTES = 2 << 20
AGENTS_KEPT = 1024
AGENTS_BYTES = 64 << 20


class UnpackError(ValueError):
    """A prefill rank may not pack these blocks for this request. The text is the reason."""


class UnpackReply(NamedTuple):
    """``message`` is for ``agent``; None: ``ended`` returns it later. ``error`` is the agent's mistake."""

    agent: str
    message: Unpacked | None
    error: str | None = None


@dataclass(slots=True)
class _Scatter:
    request_id: str
    agent: str
    number: int
    copies: Copies


class Unpacker:
    """Writer thread only. ``ring`` is the address of the staging ring, on device ``device``."""

    def __init__(
        self, staging: Staging, windows: Windows, layout: CacheLayout, rank: int, ring: int, device: int
    ) -> None:
        self._staging = staging
        self._windows = windows
        self._layout = layout
        self._offer = Window(
            rank=rank,
            ring=ring,
            ring_size=staging.ring.capacity_bytes,
            device=device,
            offset=0,
            size=windows.size,
            layout=layout.digest,
        )
        self._expand = lru_cache(maxsize=64)(layout.expand)
        self._running: list[_Scatter] = []
        self._answered: BoundedDict[str, BoundedDict[int, bool]] = BoundedDict(AGENTS_KEPT, AGENTS_BYTES)

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being scattered."""
        return bool(self._running)

    def is_unpacking(self, request_id: str) -> bool:
        """Whether blocks of this request are being scattered."""
        return any(scatter.request_id == request_id for scatter in self._running)

    def offer(self, request_id: str) -> Window | None:
        """A window for a request that is about to be registered."""
        offset = self._windows.open(request_id)
        if offset is None:
            return None
        return replace(self._offer, offset=offset)

    def close(self, request_id: str) -> None:
        """No prefill rank writes for the request any more."""
        self._windows.close(request_id)

    def on_message(self, agent: str, message: Unpack, registration: Registration | None) -> UnpackReply:
        """Begin to scatter, or answer the message as it was answered before. Without a registration, the agent may not
        write for this request (any more), and nothing is scattered.
        """
        answer = self.again(agent, message)
        if answer is not None:
            return answer
        if registration is None:
            return self._refuse(agent, message.number)
        try:
            self.unpack(agent, message, registration)
        except UnpackError as error:
            refused = self._refuse(agent, message.number)
            return refused._replace(error=f"blocks that agent {agent} packed for {message.request_id}: {error}")
        return UnpackReply(agent, None)

    def unpack(self, agent: str, message: Unpack, registration: Registration) -> None:
        """Begin to scatter; ``ended`` returns the answer. A message whose blocks are being scattered changes nothing.

        Raises ``UnpackError``, when nothing has been scattered.
        """
        if self._is_running(agent, message.number):
            return
        sizes = [self._size_of(part, registration) for part in message.parts]
        if message.offset % PIECE_BYTES:
            raise UnpackError(f"byte {message.offset} is not where a piece begins")
        if not self._windows.holds(message.request_id, message.offset, sum(sizes)):
            raise UnpackError(f"{sum(sizes)} bytes from {message.offset} on are not all in the window of the request")
        blocks = [_blocks(part, registration) for part in message.parts]
        scatter = _Scatter(message.request_id, agent, message.number, Copies())
        self._windows.read_begun(message.request_id)
        self._running.append(scatter)
        offset = message.offset
        for wanted, part, size in zip(blocks, message.parts, sizes, strict=True):
            layers, ids = slice(part.first_layer, part.end_layer), self._expand(wanted)
            scatter.copies.begin(partial(self._staging.scatter, layers, ids, offset))
            offset += size

    def again(self, agent: str, message: Unpack) -> UnpackReply | None:
        """The answer that this message got before; None if it got none."""
        answers = self._answered.get(agent)
        done = None if answers is None else answers.get(message.number)
        return None if done is None else UnpackReply(agent, Unpacked(message.number, done))

    def ended(self) -> list[UnpackReply]:
        """The answers to the messages whose blocks have been scattered since the last call."""
        running, over = self._running, list[_Scatter]()
        self._running = []
        for scatter in running:
            (over if scatter.copies.are_over() else self._running).append(scatter)
        for scatter in over:
            self._windows.read_ended(scatter.request_id)
            if scatter.copies.failure is not None:
                logger.error("blocks of %s were not unpacked: %s", scatter.request_id, scatter.copies.failure)
        return [self._answer(scatter.agent, scatter.number, done=scatter.copies.failure is None) for scatter in over]

    def _is_running(self, agent: str, number: int) -> bool:
        return any((scatter.agent, scatter.number) == (agent, number) for scatter in self._running)

    def _size_of(self, part: Part, registration: Registration) -> int:
        """Bytes of a part. Raises ``UnpackError`` if it is none of this registration."""
        layers = self._layout.layers[part.first_layer : part.end_layer]
        if part.end_layer > len(self._layout.layers) or not layers:
            raise UnpackError(f"layers {part.first_layer}-{part.end_layer - 1} of {len(self._layout.layers)}")
        if any(layer.group != part.group for layer in layers) or part.group >= len(registration.local_block_ids):
            raise UnpackError(f"layers {part.first_layer}-{part.end_layer - 1} are not all of group {part.group}")
        registered = len(registration.local_block_ids[part.group])
        if not part.first < part.end <= registered:
            raise UnpackError(f"blocks {part.first}-{part.end - 1} of {registered} that were registered")
        return (part.end - part.first) * sum(self._layout.layer_bytes[part.first_layer : part.end_layer])

    def _refuse(self, agent: str, number: int) -> UnpackReply:
        """Nothing is scattered for this message, unless it is being scattered already."""
        if self._is_running(agent, number):
            return UnpackReply(agent, None)
        return self._answer(agent, number, done=False)

    def _answer(self, agent: str, number: int, *, done: bool) -> UnpackReply:
        answers = self._answered.get(agent) or BoundedDict(ANSWERS_KEPT, ANSWERS_BYTES)
        answers.note(number, done)
        self._answered.note(agent, answers)
        return UnpackReply(agent, Unpacked(number, done))


def _blocks(part: Part, registration: Registration) -> tuple[int, ...]:
    wanted = registration.local_block_ids[part.group][part.first : part.end]
    if NULL_BLOCK in wanted:
        raise UnpackError(f"blocks {part.first}-{part.end - 1} are not all this request's")
    return wanted
