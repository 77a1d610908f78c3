"""``HandshakeExecutor``: handshakes that neither wait for each other's hosts nor take answers without a limit.

vLLM has one handshake thread, and its query waits up to 5 s for each rank. So one silent host delays the connections to
all others, and an answer without end fills the memory. Here each side channel is asked first, on a thread of its own.
vLLM's handshake then runs on vLLM's thread, as it is, with the answers in the place of its ZeroMQ socket.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import msgspec

from layerpush.compat.handshake import MAX_ANSWER_BYTES, HandshakeAnswer, handshake_query, read_answer
from layerpush.core.bounded_dict import BoundedDict
from layerpush.transport.zmtp import Req, ZmtpError, connect

TIMEOUT_S = 5.0
MAX_HANDSHAKES = 256
MAX_WITH_HOST = 32
MAX_RUNNING = 32
MAX_RUNNING_WITH_HOST = 4
MAX_UNPROVEN = 192
MAX_RUNNING_UNPROVEN = 24
"""With hosts with which the last handshake did not succeed: silent ones take no place of hosts that answer."""
MAX_ANSWERS_BYTES = 8 << 20
"""Of all ranks of an engine together."""
PROVEN_KEPT = 4096
PROVEN_BYTES = 2 << 20

_thread = threading.local()


class HandshakeError(Exception):
    """A handshake that failed before vLLM's own part of it; the text is the reason."""


class Answers:
    """The answers of an engine's side channel. vLLM's handshake uses it like the ZeroMQ socket that it would ask.

    ``clock_ahead`` is how many seconds the engine's clock is ahead of ours, by the fastest answer; None if it has not
    given its clock. vLLM takes the middle between its query and the answer for the time of that clock.
    """

    def __init__(self, parts: dict[bytes, list[bytes]], clock_ahead: float | None) -> None:
        self._parts = parts
        self._clock_ahead = clock_ahead
        self._query = b""
        self.first = read_answer(next((parts[0] for parts in parts.values() if parts), b""))
        """The answer to the first query, which is read once; None if there is none, or if it cannot be read."""

    def setsockopt(self, *_: object) -> None:
        """Does nothing: the answers are here."""

    def send(self, query: bytes) -> None:
        self._query = query

    def recv_multipart(self) -> list[bytes]:
        parts = self._parts.pop(self._query)
        if self._clock_ahead is not None and len(parts) == 2:
            return [parts[0], msgspec.msgpack.encode(time.perf_counter() + self._clock_ahead)]
        return parts


def ask(host: str, port: int, queries: Sequence[bytes]) -> Answers:
    """Ask a side channel one query after the other, until an answer has not the two parts of a good one.

    Returns or raises within ``TIMEOUT_S``. Reads ``MAX_ANSWER_BYTES`` of each answer at most, and ``MAX_ANSWERS_BYTES``
    of all. Raises ``HandshakeError``.
    """
    deadline = time.monotonic() + TIMEOUT_S
    answers: dict[bytes, list[bytes]] = {}
    fastest, clock_ahead, left = float("inf"), None, MAX_ANSWERS_BYTES
    try:
        with connect(host, port, deadline) as connection:
            req = Req(connection, deadline, MAX_ANSWER_BYTES)
            req.greet()
            for query in queries:
                sent = time.perf_counter()
                parts = answers[query] = req.ask(query)
                received = time.perf_counter()
                left -= sum(map(len, parts))
                if left < 0:
                    raise ZmtpError(f"more than {MAX_ANSWERS_BYTES} bytes in all answers")
                if len(parts) != 2:
                    break
                clock = _clock(parts[1])
                if clock is not None and received - sent < fastest:
                    fastest, clock_ahead = received - sent, clock - (sent + received) / 2
    except TimeoutError:
        raise HandshakeError(f"timeout: the side channel did not answer within {TIMEOUT_S:g} s") from None
    except (OSError, ZmtpError, ValueError, OverflowError) as error:
        raise HandshakeError(f"the side channel gave no answer: {str(error) or type(error).__name__}") from None
    return Answers(answers, clock_ahead)


def _clock(encoded: bytes) -> float | None:
    """None if it is no finite number: vLLM then gets it as it came."""
    try:
        clock = msgspec.msgpack.decode(encoded, type=float)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return clock if math.isfinite(clock) else None


@dataclass(slots=True, eq=False)
class _Handshake:
    host: str
    port: int
    queries: Callable[[], Sequence[bytes]]
    of_vllm: Callable[[], Any]
    outcome: Future[Any] = field(default_factory=Future)


class HandshakeExecutor:
    """Takes the place of vLLM's executor, and uses it. ``ranks_of`` returns the ranks to ask of an engine with these
    tensor and decode context parallel sizes. ``refusal`` returns the reason why the handshake with an engine that gave
    such an answer must fail, or None.

    At most ``MAX_RUNNING`` handshakes run at a time, ``MAX_RUNNING_WITH_HOST`` of them with one host. So many threads
    hold answers. Others wait. Some places are kept for hosts with which the last handshake succeeded. Any thread may
    call it.
    """

    def __init__(
        self,
        executor: Executor,
        ranks_of: Callable[[int, int], Sequence[int]],
        refusal: Callable[[HandshakeAnswer | None], str | None],
    ) -> None:
        self._executor = executor
        self._ranks_of = ranks_of
        self._refusal = refusal
        self._lock = threading.Lock()
        self._waiting: list[_Handshake] = []
        self._running: Counter[str] = Counter()
        self._proven: BoundedDict[str, None] = BoundedDict(PROVEN_KEPT, PROVEN_BYTES)
        """Hosts with which the last handshake succeeded."""

    def submit(
        self,
        of_vllm: Callable[..., Any],
        host: str,
        port: int,
        tp_size: int,
        engine_id: str,
        dcp_size: int = 1,
        pp_size: int = 1,
        notif_agents_only: bool = False,
    ) -> Future[Any]:
        """Ask the engine's side channel, and run vLLM's handshake with its answers. The arguments are vLLM's.

        If too many handshakes wait, the future has failed with ``HandshakeError`` already.
        """
        handshake = _Handshake(
            host,
            port,
            lambda: [handshake_query(pp, tp) for pp, tp in product(range(pp_size), self._ranks_of(tp_size, dcp_size))],
            partial(of_vllm, host, port, tp_size, engine_id, dcp_size, pp_size, notif_agents_only),
        )
        with self._lock:
            under_way = self._running + Counter(each.host for each in self._waiting)
            if under_way[host] >= MAX_WITH_HOST:
                refusal = f"{under_way[host]} other handshakes with host {host} are under way"
            elif not self._has_place(host, under_way, MAX_HANDSHAKES, MAX_UNPROVEN):
                refusal = f"{under_way.total()} other handshakes are under way"
            else:
                refusal = None
                self._waiting.append(handshake)
        if refusal is None:
            self._start()
        else:
            handshake.outcome.set_exception(HandshakeError(refusal))
        return handshake.outcome

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As an executor's. Handshakes that wait then fail."""
        self._executor.shutdown(wait, cancel_futures=cancel_futures)

    def _start(self) -> None:
        """Start the handshakes that may run. One whose thread cannot start fails."""
        while (handshake := self._next()) is not None:
            try:
                threading.Thread(target=self._run, args=(handshake,), name="layerpush-handshake", daemon=True).start()
            except RuntimeError as error:  # the process may have no more threads
                self._end(handshake, None, error)

    def _next(self) -> _Handshake | None:
        """Take a handshake that may run; None: there is none."""
        with self._lock:
            for handshake in self._waiting:
                host = handshake.host
                if self._running[host] < MAX_RUNNING_WITH_HOST and self._has_place(
                    host, self._running, MAX_RUNNING, MAX_RUNNING_UNPROVEN
                ):
                    self._waiting.remove(handshake)
                    self._running[handshake.host] += 1
                    return handshake
        return None

    def _has_place(self, host: str, under_way: Counter[str], limit: int, unproven: int) -> bool:
        """Whether there may be one more handshake with this host beside these, of which ``unproven`` may be with hosts
        whose last handshake did not succeed.
        """
        others = sum(number for each, number in under_way.items() if each not in self._proven)
        return under_way.total() < limit and (host in self._proven or others < unproven)

    def _run(self, handshake: _Handshake) -> None:
        result, failure = None, None
        try:
            answers = ask(handshake.host, handshake.port, handshake.queries())
            refusal = self._refusal(answers.first)
            if refusal is not None:
                raise HandshakeError(refusal)
            result = self._executor.submit(_with_answers, answers, handshake.of_vllm).result()
        except BaseException as error:  # noqa: BLE001  # the future's callers get it, as from vLLM's executor
            failure = error
        self._end(handshake, result, failure)
        self._start()

    def _end(self, handshake: _Handshake, result: Any, failure: BaseException | None) -> None:
        with self._lock:
            self._running[handshake.host] -= 1
            self._running += Counter()  # without hosts that have none
            self._proven.pop(handshake.host, None)
            if failure is None:
                self._proven.put(handshake.host, None)
        if failure is None:
            handshake.outcome.set_result(result)
        else:
            handshake.outcome.set_exception(failure)


def _with_answers(answers: Answers, of_vllm: Callable[[], Any]) -> Any:
    _thread.answers = answers
    try:
        return of_vllm()
    finally:
        _thread.answers = None


def answered_by_layerpush() -> bool:
    """Whether this thread runs vLLM's handshake with an engine that has said that it runs layerpush."""
    answers = getattr(_thread, "answers", None)
    return answers is not None and answers.first is not None and answers.first.layerpush


def answering(plain: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's ``zmq_ctx``: a thread that has answers gets them; all other code of this process gets a socket."""

    @functools.wraps(plain)
    @contextlib.contextmanager
    def answers_or_socket(socket_type: Any, path: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        answers = getattr(_thread, "answers", None)
        if answers is not None:
            yield answers
            return
        with plain(socket_type, path, *args, **kwargs) as socket:
            yield socket

    return answers_or_socket
