"""P's first token: the sampled token on P, and on D the reason why a request starts with a token of its own. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

Missing = Literal["not_promised", "late", "other_sampling"]
"""Why a decode rank that asked for P's token has none: P promised none, the promised one has not come, or P has none
that was sampled with the request's parameters.
"""


ParameterDigests = tuple[tuple[str, str], ...]
"""Sampling parameters that are not vLLM's defaults: the name of each, and a digest of its value."""


class Sampled(NamedTuple):
    """A token that P has sampled, the digest of its request's sampling parameters, and those parameters."""

    token: int
    sampling: str
    parameters: ParameterDigests = ()

    def for_request(self, sampling: str) -> int | None:
        """The token, if a request with these sampling parameters may start with it."""
        return self.token if self.sampling == sampling else None

    def differing(self, parameters: ParameterDigests) -> tuple[str, ...]:
        """The names of the parameters that differ from those of a request, in alphabetical order."""
        return tuple(sorted({name for name, _ in set(self.parameters) ^ set(parameters)}))


def sampling_digest(parameters: Iterable[object]) -> str:
    """A digest of sampling parameters: BLAKE2b of their ``repr``, as 32 hexadecimal digits."""
    return hashlib.blake2b(repr(tuple(parameters)).encode(), digest_size=16).hexdigest()
