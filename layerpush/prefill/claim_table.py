"""The claims of decode engines on one prefill rank, by key and, while they wait or are unwanted, by name. Pure.

Bounded by state in number, bytes and time. A claim that a live push serves stays.
"""

from __future__ import annotations

from collections.abc import Callable

from layerpush.core.bounded_dict import BoundedDict
from layerpush.core.bounded_index import BoundedIndex
from layerpush.prefill.claim_protocol import State
from layerpush.prefill.claim_session import Claim, Key
from layerpush.prefill.pairing import Pairing, Prompt

WAITING = 4096
WAITING_BYTES = 128 << 20
WAITING_S = 480.0
UNWANTED_BYTES = 32 << 20
REMEMBERED = 4096
REMEMBERED_BYTES = 32 << 20
"""Of those with a push, and of those that are over."""


class ClaimTable:
    """``is_live``: whether a push with this key is not over."""

    def __init__(self, pairing: Pairing, is_live: Callable[[Key], bool]) -> None:
        self._pairing = pairing
        self._is_live = is_live
        self.waiting = BoundedIndex[Claim](WAITING, WAITING_BYTES, WAITING_S)
        """`UNCONNECTED` and `PENDING`."""
        self.unwanted = BoundedIndex[Claim](REMEMBERED, UNWANTED_BYTES, WAITING_S)
        self._served = BoundedDict[Key, Claim](REMEMBERED, REMEMBERED_BYTES)
        self._over = BoundedDict[Key, Claim](REMEMBERED, REMEMBERED_BYTES)
        """All others that are not forgotten."""
        self._indices = {
            State.UNCONNECTED: self.waiting,
            State.PENDING: self.waiting,
            State.UNWANTED: self.unwanted,
        }

    def get(self, key: Key) -> Claim:
        """A claim, or a new one that is not kept."""
        for found in (*self.waiting.find([key]), *self.unwanted.find([key])):
            return found
        return self._served.get(key) or self._over.get(key) or Claim(key)

    def keep(self, claim: Claim, now: float) -> list[Claim]:
        """Sort a claim by its state. Returns the claims that have waited or been unwanted for too long, and the oldest
        of them beyond the limits: they are dropped.
        """
        key, index = claim.key, self._indices.get(claim.state)
        if index is not None and key in index and claim.filed_as is claim.named:
            return index.grown(key)
        self.waiting.drop([key])
        self.unwanted.drop([key])
        self._served.pop(key, None)
        self._over.pop(key, None)
        claim.filed_as = None if index is None else claim.named
        if index is not None:
            assert claim.named is not None
            return index.add(claim, [key, *self._pairing.keys(claim.named)], now)
        if claim.state is not State.IDLE or claim.registration is not None:
            memory = self._served if claim.state is State.SERVED else self._over
            memory.put(key, claim, self._is_live)
        return []

    def expire(self, now: float) -> list[Claim]:
        """Drop and return the claims that have waited or been unwanted for too long."""
        return [*self.waiting.expire(now), *self.unwanted.expire(now)]

    def waiting_with(self, prompt: Prompt, now: float = float("-inf")) -> list[Claim]:
        """The claims that wait and have a key of this request, oldest first."""
        return self.waiting.find(self._pairing.keys_of(prompt), now)

    def waiting_for(self, prompt: Prompt, now: float) -> list[Claim]:
        """The claims that wait and may mean this request, oldest first."""
        return [each for each in self.waiting_with(prompt, now) if self._means(each, prompt)]

    def unwanted_for(self, prompt: Prompt, now: float = float("-inf")) -> list[Claim]:
        """The claims that may mean this request and want it dropped, oldest first."""
        found = self.unwanted.find(self._pairing.keys_of(prompt), now)
        return [each for each in found if self._means(each, prompt)]

    def _means(self, claim: Claim, prompt: Prompt) -> bool:
        return claim.named is not None and self._pairing.is_for(claim.named, prompt)
