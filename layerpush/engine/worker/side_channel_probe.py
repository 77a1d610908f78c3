"""The probe: asks an engine's side channel whether the process of a NIXL agent lives, or for the agent's address."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

from layerpush.compat.engine_threads import EngineThreads
from layerpush.compat.handshake import MAX_ANSWER_BYTES, Agent, agent_of_handshake, handshake_query
from layerpush.core.liveness import Verdict
from layerpush.transport.zmtp import Req, ZmtpError, connect

logger = logging.getLogger(f"vllm.{__name__}")

TIMEOUT_S = 2.0
MAX_PENDING = 256
MAX_SEARCHING = 16
"""Limit of queued jobs beyond which a new search is dropped, and the number of later probes that may overtake one."""
NO_SUCH_RANK = b""
"""Our listener's answer for a rank that its engine does not have: an engine with more ranks was there before."""


def probe(
    host: str,
    port: int,
    agent_name: str,
    tp_rank: int,
    pp_rank: int = 0,
    timeout_s: float = TIMEOUT_S,
    engine_id: str | None = None,
) -> Verdict:
    """Whether the process of an agent of engine ``engine_id`` lives. Returns within ``timeout_s`` seconds, raises
    nothing, and leaves no socket open.

    It sends vLLM's handshake query, which a stock engine answers, too. Any thread.
    """
    try:
        name = agent_name.encode()
    except UnicodeEncodeError:
        name = b""
    if not name:
        return Verdict.UNKNOWN
    answer = _query(host, port, tp_rank, pp_rank, timeout_s)
    if isinstance(answer, Verdict):
        return answer
    if name not in answer.description:
        return Verdict.REPLACED if answer.engine_id == engine_id else Verdict.ENDED
    return Verdict.SPEAKS_LAYERPUSH if answer.layerpush else Verdict.ALIVE


def contact_of(host: str, port: int, tp_rank: int, pp_rank: int = 0, timeout_s: float = TIMEOUT_S) -> bytes | None:
    """NIXL's description of the agent of a rank; None if the side channel gives none. Otherwise as ``probe``."""
    answer = _query(host, port, tp_rank, pp_rank, timeout_s)
    return None if isinstance(answer, Verdict) else answer.description


def agent_of(host: str, port: int, tp_rank: int = 0, pp_rank: int = 0, timeout_s: float = TIMEOUT_S) -> Agent | None:
    """The agent of a rank; None: there is no such rank. Takes ``timeout_s`` seconds at most, and leaves no socket open.

    Raises ``ConnectionRefusedError`` if nothing listens, ``ZmtpError``, ``ValueError`` or ``RecursionError`` if no side
    channel answers, else another ``OSError``.
    """
    deadline = time.monotonic() + timeout_s
    with connect(host, port, deadline) as connection:
        req = Req(connection, deadline, MAX_ANSWER_BYTES)
        req.greet()
        parts = req.ask(handshake_query(pp_rank, tp_rank))
    if parts == [NO_SUCH_RANK]:
        return None
    if len(parts) != 2:
        raise ZmtpError(f"{len(parts)} parts in the answer")
    return agent_of_handshake(parts[0])


def _query(host: str, port: int, tp_rank: int, pp_rank: int, timeout_s: float) -> Agent | Verdict:
    """The agent of a rank. ENDED: there is no such rank, or no engine. UNKNOWN: no answer."""
    if not 0 < port < 1 << 16:
        return Verdict.UNKNOWN
    try:
        return agent_of(host, port, tp_rank, pp_rank, timeout_s) or Verdict.ENDED
    except ConnectionRefusedError:
        return Verdict.ENDED
    except (OSError, ZmtpError, ValueError, RecursionError):
        return Verdict.UNKNOWN


class Prober:
    """Runs probes and searches one by one, on a thread of its own that the first one starts. A probe overtakes the
    searches that are queued. Any thread may call it.

    Without the thread nobody would learn of the end of a peer: ``threads`` watches it.
    """

    def __init__(self, threads: EngineThreads) -> None:
        self._threads = threads
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue(MAX_PENDING)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(
        self,
        host: str,
        port: int,
        agent_name: str,
        tp_rank: int,
        on_verdict: Callable[[Verdict], None],
        pp_rank: int = 0,
        engine_id: str | None = None,
    ) -> None:
        """Queue a probe. ``on_verdict`` gets the verdict on the prober's thread.

        If the queue is full, or no thread can start, it gets UNKNOWN at once.
        """

        def job() -> None:
            verdict = Verdict.UNKNOWN
            try:
                verdict = probe(host, port, agent_name, tp_rank, pp_rank, engine_id=engine_id)
            except Exception:  # a defect costs this verdict; the caller needs one, and the next probe asks again
                logger.exception("layerpush: the probe of %s:%d failed", host, port)
            on_verdict(verdict)

        if not self._queue(job):
            on_verdict(Verdict.UNKNOWN)

    def search(self, host: str, port: int, tp_rank: int, on_contact: Callable[[bytes], None], pp_rank: int = 0) -> None:
        """Queue a search for the contact of a rank: NIXL's description of its agent. ``on_contact`` gets it on the
        prober's thread. It is not called if the side channel has none, or if too many jobs wait.
        """

        def job() -> None:
            try:
                contact = contact_of(host, port, tp_rank, pp_rank)
            except Exception:  # a defect costs this contact: nobody waits for it
                logger.exception("layerpush: the search for the contact of %s:%d failed", host, port)
                return
            if contact is not None:
                on_contact(contact)

        if self._jobs.qsize() < MAX_SEARCHING:
            self._queue(job, after=MAX_SEARCHING)

    def close(self) -> None:
        """Drop queued jobs. The one under way may still report; this does not wait for it."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):  # the thread may take the last one meanwhile
                while True:
                    self._jobs.get_nowait()
            self._jobs.put_nowait((-1, 0, None))

    def _queue(self, job: Callable[[], None], after: int = 0) -> bool:
        """Queue a job that ``after`` later ones may overtake; False if the queue is full, or no thread can start."""
        with self._lock:
            if self._closed:
                return True
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="layerpush-probe", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    logger.warning("layerpush: cannot ask a side channel: %s", error)
                    return False
                self._thread = thread
            try:
                number = next(self._numbers)
                self._jobs.put_nowait((number + after, number, job))
            except queue.Full:
                return False
            return True

    def _run(self) -> None:
        with self._threads.watched():
            while (job := self._jobs.get()[2]) is not None:
                job()
