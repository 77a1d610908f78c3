"""The plain engine, which gives the right tokens."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.enginehost import Request
from tests.e2e.results import Finished
from tests.faults.soak import inhost
from tests.faults.soak.engine import Answer
from tests.faults.soak.engine_slots import EngineSlots

Tokens = tuple[int, ...]


class Reference:
    """Greedy tokens of a plain engine. Equal questions at the same time share one request."""

    def __init__(self, slots: EngineSlots, name: str) -> None:
        self._slots, self._name = slots, name
        self._waiting: dict[tuple[Tokens, int], list[Callable[[Tokens], None]]] = {}
        self._asked: dict[str, tuple[Tokens, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, token_ids: Tokens, max_tokens: int, then: Callable[[Tokens], None]) -> None:
        question = (token_ids, max_tokens)
        self._waiting.setdefault(question, []).append(then)
        if len(self._waiting[question]) > 1:
            return
        self._count += 1
        request_id = f"plain-{self._count:06d}"
        self._asked[request_id] = question
        request = Request(request_id, list(token_ids), None, max_tokens)
        self._slots[self._name].engine.add(request, then=_must_work)

    def take(self, finished: Finished) -> None:
        """The plain engine has finished a request."""
        question = self._asked.pop(finished.request_id)
        self._slots[self._name].engine.call(inhost.collect, [finished.request_id])
        for then in self._waiting.pop(question):
            then(finished.token_ids)


def _must_work(answer: Answer) -> None:
    if answer.error is not None:
        raise RuntimeError(f"the plain engine refuses a request:\n{answer.error}")
