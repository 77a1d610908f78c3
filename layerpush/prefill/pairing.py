"""Whether a registration means a request of this prefill engine, by names and by prompt. Pure.

A router may give both engines the same ``transfer_id``. Where both requests have one, it decides before their ids: all
prompts and answers of a client's request share it, and their numbers tell these apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from layerpush.core.prefixes import Prefixes
from layerpush.core.request_names import answer_and_prompt, is_one_of_several, place, stem
from layerpush.core.wire import Decline, Registration

Named = Registration | Decline
"""A message that names a request of P, and may have a digest of its prompt."""


class Prompt(Protocol):
    """A request of this engine: its id, its router's ``transfer_id`` and its prompt's digest, each None if unknown."""

    request_id: str
    transfer_id: str | None
    prompt_digest: str | None
    prefixes: Prefixes | None
    """Not None: a turn that this engine keeps. Only a registration that asks for its first tokens may mean it."""


P = TypeVar("P", bound=Prompt)


class Pairing:
    """``base_id`` strips the suffix that an engine adds to the id its router gave."""

    def __init__(self, base_id: Callable[[str], str]) -> None:
        self.base = base_id

    def bases(self, named: Named) -> list[str]:
        """The base ids of a registration's names. If one engine computes several answers to a prompt and the other one,
        the first of them is that one: so the base id of its prompt counts, or that of the prompt's first answer.
        """
        bases = [self.base(name) for name in self._names(named)]
        number, prompt = answer_and_prompt(self.base(named.request_id))
        if number is None:
            return [*bases, *(f"0_{base}" for base in bases)]
        return [*bases, prompt] if number == 0 else bases

    def keys(self, named: Named) -> list[str]:
        """The keys of a registration in an index. Only requests that share one with it can be meant by it, named by it,
        or make it spare: see ``keys_of``.
        """
        keys = [*self.bases(named), answer_and_prompt(self.base(named.request_id))[1]]
        return [*keys, *_of_transfer(named.transfer_id)]

    def keys_of(self, prompt: Prompt) -> list[str]:
        """The keys of a request of this engine in an index: see ``keys``."""
        return [self.base(prompt.request_id), *_of_transfer(prompt.transfer_id)]

    def names(self, named: Named) -> list[str]:
        """The keys of the requests that a registration may mean, base ids first."""
        return [*self.bases(named), *_of_transfer(named.transfer_id)]

    def match(self, named: Named, prompts: Iterable[P]) -> P | None:
        """Find the request that a registration means: the one that it names exactly, else one with the same base id,
        else None.
        """
        meant = [each for each in prompts if self.is_for(named, each)]
        return next((each for each in meant if each.request_id == named.prefill_request_id), next(iter(meant), None))

    def is_for(self, named: Named, prompt: Prompt) -> bool:
        """Whether the registration may mean this request: names agree, and prompts are equal as far as is known."""
        return self.is_named(named, prompt) and not self.prompts_differ(named, prompt)

    def is_named(self, named: Named, prompt: Prompt) -> bool:
        """Whether the registration's names agree with this request's, whatever their prompts are."""
        if prompt.prefixes is not None or _prefix_tokens(named):
            return prompt.request_id == named.prefill_request_id
        base, same = self.base(prompt.request_id), _same_transfer(named, prompt)
        if same is not None:
            return same and place(base) == place(self.base(named.request_id))
        return prompt.request_id in self._names(named) or base in self.bases(named)

    def is_misnamed(self, named: Named, prompt: Prompt) -> bool:
        """Whether the registration names this very request, but has another prompt: no other request will come."""
        is_named = named.prefill_request_id == prompt.request_id and prompt.request_id in self._names(named)
        return is_named and self.prompts_differ(named, prompt)

    def is_spare_answer(self, named: Named, prompts: Iterable[Prompt]) -> bool:
        """Whether D computes several answers to a prompt and this engine one, which is among these requests, and the
        registration is not for the first answer: no other request will come.
        """
        number, base = answer_and_prompt(self.base(named.request_id))
        return bool(number) and any(
            self._is_prompt(named, base, each) and not self.prompts_differ(named, each) for each in prompts
        )

    def prompts_differ(self, named: Named, prompt: Prompt) -> bool:
        """Whether the digests of both prompts are known, and are not equal. A kept turn needs one: its name alone says
        nothing about the conversation.
        """
        if prompt.prefixes is not None and isinstance(named, Registration):
            return named.prompt_digest is None or named.prompt_digest != prompt.prefixes.digest(named.prefix_tokens)
        if prompt.prefixes is not None:
            return not prompt.prefixes.has(named.prompt_digest)
        if _prefix_tokens(named):
            return True
        return prompt.prompt_digest is not None and named.prompt_digest not in (None, prompt.prompt_digest)

    def _is_prompt(self, named: Named, wanted: str, prompt: Prompt) -> bool:
        """Whether a request is the only one for the prompt of which D computes several answers."""
        base, same = self.base(prompt.request_id), _same_transfer(named, prompt)
        if same is None:
            return wanted == base
        return same and not is_one_of_several(base) and place(base) == place(wanted)

    def _names(self, named: Named) -> tuple[str, ...]:
        """The name that D was given, if any, and D's own.

        A router gives one name for all prompts of a request, so the given name is wrong for every prompt but one. It is
        left out if D's own name has the number of another prompt.
        """
        own, given = named.request_id, named.prefill_request_id
        return (own,) if given is None or self._are_siblings(own, given) else (given, own)

    def _are_siblings(self, one: str, other: str) -> bool:
        """Whether these are ids of different prompts or answers of one client's request."""
        first, second = self.base(one), self.base(other)
        return first != second and stem(first) == stem(second)


def _prefix_tokens(named: Named) -> int:
    return named.prefix_tokens if isinstance(named, Registration) else 0


def _same_transfer(named: Named, prompt: Prompt) -> bool | None:
    """Whether the router gave both the same ``transfer_id``; None if one has none."""
    ours, theirs = prompt.transfer_id, named.transfer_id
    return None if ours is None or theirs is None else ours == theirs


def _of_transfer(transfer: str | None) -> list[str]:
    """A ``transfer_id`` as a key beside base ids: no base id has a line end."""
    return [] if transfer is None else [f"\n{transfer}"]
