"""Under which names a registration's request may come to this engine. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

from layerpush.core.wire import Registration

_ANSWER = re.compile(r"^\d+_")
_PROMPT = re.compile(r"^(cmpl-.*)-\d+$")
"""What vLLM puts around a router's id: which of several answers, and, in completions, which of several prompts."""


class RequestNames:
    """``base_id`` strips the suffix that an engine adds to the id its router gave."""

    def __init__(self, base_id: Callable[[str], str]) -> None:
        self._base_id = base_id

    def base(self, request_id: str) -> str:
        return self._base_id(request_id)

    def names(self, registration: Registration) -> tuple[str, ...]:
        """The one that D was told, if any, and D's own.

        A router tells one name for all prompts of a request: for the others, which have D's numbers, it counts not.
        """
        own, told = registration.request_id, registration.prefill_request_id
        return (own,) if told is None or self._are_siblings(own, told) else (told, own)

    def agree(self, registration: Registration, request_id: str) -> bool:
        """Whether the request may be the registration's, as far as names go."""
        names = self.names(registration)
        return request_id in names or self.base(request_id) in map(self.base, names)

    def _are_siblings(self, one: str, other: str) -> bool:
        first, second = self.base(one), self.base(other)
        return first != second and _stem(first) == _stem(second)


def _stem(base: str) -> str:
    return _PROMPT.sub(r"\1", _ANSWER.sub("", base))
