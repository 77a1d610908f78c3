"""Finds the request of this prefill engine that a registration means, by names and by prompt. Pure.

A router may give both engines the same ``transfer_id``. Where both requests have one, it decides before their ids: all
prompts and answers of a client's request share it, and their numbers tell these apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from layerpush.core.wire import Decline, Registration

Named = Registration | Decline
"""A message that names a request of P, and may have a digest of its prompt."""

_ANSWER = re.compile(r"^(\d+)_")
_PROMPT = re.compile(r"^(?:\d+_)?(cmpl-.*)-(\d+)$")
"""vLLM adds numbers to a router's id: the choice's in front, and, for completions, the prompt's at the end."""


def is_one_of_several(request_id: str) -> bool:
    """Whether vLLM has given this id to one of several answers (``n`` > 1) to a prompt."""
    return _ANSWER.match(request_id) is not None


class RequestNames:
    """``base_id`` strips the suffix that an engine adds to the id its router gave. ``digest_of`` returns the
    digest of the prompt of a request of this engine, and ``transfer_of`` its ``transfer_id``, each if it is known.
    """

    def __init__(
        self,
        base_id: Callable[[str], str],
        digest_of: Callable[[str], str | None],
        transfer_of: Callable[[str], str | None],
    ) -> None:
        self.base = base_id
        self._digest_of = digest_of
        self._transfer_of = transfer_of

    def bases(self, registration: Named) -> list[str]:
        """The base ids of a registration's names. If D computes several answers to a prompt and this engine one, the
        first of them takes that one: so the base id of its prompt counts, too.
        """
        bases = [self.base(name) for name in self._names(registration)]
        number, prompt = self._answer(registration)
        return [*bases, prompt] if number == 0 else bases

    def keys(self, registration: Named) -> list[str]:
        """The keys of a registration in an index. Only requests that share one with it can be meant by it, named by it,
        or make it spare: see ``keys_of``.
        """
        keys = [*self.bases(registration), self._answer(registration)[1]]
        transfer = registration.transfer_id
        return keys if transfer is None else [*keys, of_transfer(transfer)]

    def keys_of(self, request_id: str) -> list[str]:
        """The keys of a request of this engine in an index: see ``keys``."""
        transfer = self._transfer_of(request_id)
        return [self.base(request_id)] if transfer is None else [self.base(request_id), of_transfer(transfer)]

    def match(self, registration: Named, candidates: Iterable[str]) -> str | None:
        """Find the request that a registration means: the one that it names exactly, else one with the same base id,
        else None.
        """
        meant = [candidate for candidate in candidates if self.is_for(registration, candidate)]
        return next((each for each in meant if each == registration.prefill_request_id), next(iter(meant), None))

    def is_for(self, registration: Named, request_id: str) -> bool:
        """Whether the registration may mean this request: names agree, and prompts are equal as far as is known."""
        return self.is_named(registration, request_id) and not self.prompts_differ(registration, request_id)

    def is_named(self, registration: Named, request_id: str) -> bool:
        """Whether the registration's names agree with this request's, whatever their prompts are."""
        same = self._same_transfer(registration, request_id)
        if same is not None:
            return same and _place(self.base(request_id)) == _place(self.base(registration.request_id))
        return request_id in self._names(registration) or self.base(request_id) in self.bases(registration)

    def is_misnamed(self, registration: Named, request_id: str) -> bool:
        """Whether the registration names this very request, but has another prompt: no other request will come."""
        named = registration.prefill_request_id == request_id and request_id in self._names(registration)
        return named and self.prompts_differ(registration, request_id)

    def is_spare_answer(self, registration: Named, candidates: Iterable[str]) -> bool:
        """Whether D computes several answers to a prompt and this engine one, which is among these requests, and the
        registration is not for the first answer: no other request will come.
        """
        number, prompt = self._answer(registration)
        return bool(number) and any(
            self._is_prompt(registration, prompt, each) and not self.prompts_differ(registration, each)
            for each in candidates
        )

    def _is_prompt(self, registration: Named, prompt: str, request_id: str) -> bool:
        """Whether a request is the only one for the prompt of which D computes several answers."""
        base = self.base(request_id)
        same = self._same_transfer(registration, request_id)
        if same is None:
            return prompt == base
        return same and not is_one_of_several(base) and _place(base) == _place(prompt)

    def _same_transfer(self, registration: Named, request_id: str) -> bool | None:
        """Whether the router gave both the same ``transfer_id``; None if one has none."""
        ours = self._transfer_of(request_id)
        return None if ours is None or registration.transfer_id is None else ours == registration.transfer_id

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

    def prompts_differ(self, registration: Named, request_id: str) -> bool:
        """Whether the digests of both prompts are known, and are not equal."""
        digest = self._digest_of(request_id)
        return digest is not None and registration.prompt_digest not in (None, digest)

    def _are_siblings(self, one: str, other: str) -> bool:
        """Whether these are ids of different prompts or answers of one client's request."""
        first, second = self.base(one), self.base(other)
        return first != second and _stem(first) == _stem(second)


def named_prompts(names: Iterable[str | None], digest: str | None) -> set[str]:
    """A prompt under each of a request's base ids and its ``transfer_id``: a router may give one to several prompts."""
    return {f"{name}/{digest or ''}" for name in names if name is not None}


def of_transfer(transfer: str) -> str:
    """A ``transfer_id`` as a key beside base ids: no base id has a line end."""
    return f"\n{transfer}"


def _place(base: str) -> tuple[int, str]:
    """The numbers of the answer and of the prompt, the second as text. Each is 0 if the id does not have it."""
    answer, prompt = _ANSWER.match(base), _PROMPT.match(base)
    return 0 if answer is None else int(answer[1]), "0" if prompt is None else prompt[2]


def _stem(base: str) -> str:
    return _PROMPT.sub(r"\1", _ANSWER.sub("", base))
