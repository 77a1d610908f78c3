"""The kinds of fault that the soak knows, by where they strike. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

Place = Literal["request", "engine", "wire"]
Side = Literal["P", "D"]


@dataclass(frozen=True)
class Kind:
    """One kind of fault. ``side``: the side of the struck engines. None: either side, or a request. ``inside``: it
    needs a worker in the engine's own process.
    """

    name: str
    place: Place
    meaning: str
    side: Side | None = None
    inside: bool = False


KINDS = (
    Kind("abort-p", "request", "P's request is aborted at a random moment; D goes on waiting"),
    Kind("abort-d", "request", "the client of D disconnects at a random moment; P goes on"),
    Kind("abort-both", "request", "both sides are aborted at random moments, as a router does"),
    Kind("resend-p", "request", "P's request is aborted and the same request comes again"),
    Kind("no-p", "request", "D registers for a request that P never gets"),
    Kind("no-d", "request", "P computes for a D that never comes: the lease ends"),
    Kind("late-d", "request", "D comes when P's lease has ended"),
    Kind("bad-params-p", "request", "P gets damaged kv_transfer_params"),
    Kind("bad-params-d", "request", "D gets damaged kv_transfer_params: missing keys, wrong types, nobody there"),
    Kind("unequal", "request", "D's prompt is some blocks longer than the one that P got"),
    Kind("kill-p", "engine", "SIGKILL for P, which comes back under the same engine id", "P"),
    Kind("kill-p-new", "engine", "SIGKILL for P, which comes back under a new engine id", "P"),
    Kind("kill-d", "engine", "SIGKILL for D, which comes back under the same engine id", "D"),
    Kind("kill-d-new", "engine", "SIGKILL for D, which comes back under a new engine id", "D"),
    Kind("move-p", "engine", "SIGKILL for P, which comes back under the same engine id at another port", "P"),
    Kind("move-d", "engine", "SIGKILL for D, which comes back under the same engine id at another port", "D"),
    Kind("writer-p", "engine", "P's writer thread ends by an error, and P with it", "P", inside=True),
    Kind("writer-d", "engine", "D's writer thread ends by an error, and D with it", "D", inside=True),
    Kind("shutdown-p", "engine", "P is shut down in good order with pushes in flight, and started again", "P"),
    Kind("shutdown-d", "engine", "D is shut down in good order while it waits for pushes, and started again", "D"),
    Kind("stop-p", "engine", "SIGSTOP for P for longer than peer_timeout_s, then SIGCONT", "P"),
    Kind("stop-d", "engine", "SIGSTOP for D for longer than write_timeout_s, then SIGCONT", "D"),
    Kind("preempt", "engine", "a burst of long prompts for P, whose KV cache cannot hold them: it preempts", "P"),
    Kind("fail-post", "wire", "WRITEs fail when they are posted"),
    Kind("err-handle", "wire", "WRITEs end in ERR"),
    Kind("stuck-handle", "wire", "WRITEs stay PROC for longer than write_timeout_s"),
    Kind("drop-notes", "wire", "layerpush's own notifications get lost"),
    Kind("dup-notes", "wire", "layerpush's own notifications arrive twice"),
    Kind("delay-notes", "wire", "layerpush's own notifications arrive late and out of order"),
    Kind("dup-registration", "wire", "registrations arrive twice"),
    Kind("fail-handshake", "wire", "the next handshakes with engines that are new to one cannot reach them"),
    Kind("garbage-notes", "wire", "an engine's peers get notifications that are none, or name strange requests"),
    Kind("garbage-port", "wire", "a client sends garbage to an engine's side channel"),
)


BY_NAME = {kind.name: kind for kind in KINDS}


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class UnknownNameError(ValueError):
    """The table has no such name. The message lists all names."""


def chosen(names: Iterable[str], table: Sequence[T], what: str) -> tuple[T, ...]:
    """The rows of these names, in the order of the table. No names: all rows. Raises UnknownNameError.

    ``what``: the word for a row in the message.
    """
    wanted, known = set(names), [row.name for row in table]
    for name in sorted(wanted - set(known)):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UnknownNameError(f"no {what} {name!r}; {hint}choose from: {', '.join(known)}")
    return tuple(row for row in table if not wanted or row.name in wanted)
