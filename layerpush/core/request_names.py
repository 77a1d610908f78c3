"""Names of requests, as vLLM makes them and as both engines compare them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from layerpush.core.prefixes import Prefixes

_ANSWER = re.compile(r"^(\d+)_")
_PROMPT = re.compile(r"^(?:\d+_)?(cmpl-.*)-(\d+)$")
"""vLLM adds numbers to a router's id: the choice's in front, and, for completions, the prompt's at the end."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request that has come to a prefill engine: its router's ``transfer_id`` and the digest of its prompt, each None
    if unknown. Or a turn that a decode engine keeps: then ``prefixes`` are those of its tokens.
    """

    request_id: str
    transfer_id: str | None = None
    prompt_digest: str | None = None
    prefixes: Prefixes | None = None


def answer_and_prompt(base: str) -> tuple[int | None, str]:
    """The number of the answer that a base id has, if any, and the base id of its prompt."""
    numbered = _ANSWER.match(base)
    return (None, base) if numbered is None else (int(numbered[1]), base[numbered.end() :])


def is_one_of_several(request_id: str) -> bool:
    """Whether vLLM has given this id to one of several answers (``n`` > 1) to a prompt."""
    return _ANSWER.match(request_id) is not None


def place(base: str) -> tuple[int, str]:
    """The numbers of the answer and of the prompt, the second as text. Each is 0 if the id does not have it."""
    prompt = _PROMPT.match(base)
    return answer_and_prompt(base)[0] or 0, "0" if prompt is None else prompt[2]


def stem(base: str) -> str:
    """A base id without these numbers."""
    return _PROMPT.sub(r"\1", _ANSWER.sub("", base))


def named_prompts(names: Iterable[str | None], digest: str | None) -> set[str]:
    """A prompt under each of a request's base ids and its ``transfer_id``: a router may give one to several prompts."""
    return {f"{name}/{digest or ''}" for name in names if name is not None}
