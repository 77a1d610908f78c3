"""Finds the request of this prefill engine that a registration means, by names and by prompt. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from layerpush.core.wire import Decline, Registration

Named = Registration | Decline
"""A message that names a request of P, and may have a digest of its prompt."""

_ANSWER = re.compile(r"^(\d+)_")
_PROMPT = re.compile(r"^(cmpl-.*)-\d+$")
"""vLLM adds numbers to a router's id: the choice's in front, and, for completions, the prompt's at the end."""


def is_one_of_several(request_id: str) -> bool:
    """Whether vLLM has given this id to one of several answers (``n`` > 1) to a prompt."""
    return _ANSWER.match(request_id) is not None


class RequestNames:
    """``base_id`` strips the suffix that an engine adds to the id its router gave. ``digests`` holds a digest of the
    prompt of each live request, as far as this engine's scheduler has sent one.
    """

    def __init__(self, base_id: Callable[[str], str], digests: Mapping[str, str]) -> None:
        self.base = base_id
        self._digests = digests

    def bases(self, registration: Named) -> list[str]:
        """The base ids of a registration's names. D's first answer to a prompt may have the only one here."""
        bases = [self.base(name) for name in self._names(registration)]
        number, prompt = self._answer(registration)
        return [*bases, prompt] if number == 0 else bases

    def match(self, registration: Named, candidates: Iterable[str]) -> str | None:
        """Find the request that a registration means: the one that it names exactly, else one with the same base id,
        else None.
        """
        meant = [candidate for candidate in candidates if self.is_for(registration, candidate)]
        return next((each for each in meant if each == registration.prefill_request_id), next(iter(meant), None))

    def is_for(self, registration: Named, request_id: str) -> bool:
        """Whether the registration may mean this request: names agree, and prompts are equal as far as is known."""
        if self._prompts_differ(registration, request_id):
            return False
        return request_id in self._names(registration) or self.base(request_id) in self.bases(registration)

    def is_misnamed(self, registration: Named, request_id: str) -> bool:
        """Whether the registration names this very request, but has another prompt: no other request will come."""
        named = registration.prefill_request_id == request_id and request_id in self._names(registration)
        return named and self._prompts_differ(registration, request_id)

    def is_spare_answer(self, registration: Named, candidates: Iterable[str]) -> bool:
        """Whether D computes several answers to a prompt and this engine one, which is among these requests, and the
        registration is not for the first answer: no other request will come.
        """
        number, prompt = self._answer(registration)
        return bool(number) and any(
            prompt == self.base(each) and not self._prompts_differ(registration, each) for each in candidates
        )

    def _answer(self, registration: Named) -> tuple[int | None, str]:
        """The number of the answer that D's own id has, if any, and the base id of its prompt."""
        own = self.base(registration.request_id)
        numbered = _ANSWER.match(own)
        return (None, own) if numbered is None else (int(numbered[1]), own[numbered.end() :])

    def _names(self, registration: Named) -> tuple[str, ...]:
        """The name that D was given, if any, and D's own.

        A router gives one name for all prompts of a request, so the given name is wrong for every prompt but one. It is
        left out if D's own name has the number of another prompt.
        """
        own, given = registration.request_id, registration.prefill_request_id
        return (own,) if given is None or self._are_siblings(own, given) else (given, own)

    def _prompts_differ(self, registration: Named, request_id: str) -> bool:
        digest = self._digests.get(request_id)
        return digest is not None and registration.prompt_digest not in (None, digest)

    def _are_siblings(self, one: str, other: str) -> bool:
        """Whether these are ids of different prompts or answers of one client's request."""
        first, second = self.base(one), self.base(other)
        return first != second and _stem(first) == _stem(second)


def _stem(base: str) -> str:
    return _PROMPT.sub(r"\1", _ANSWER.sub("", base))
