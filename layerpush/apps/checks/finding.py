"""The result of a check of `layerpush doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple


class Grade(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One check's result; `advice` is empty if no action is needed."""

    check: str
    verdict: Grade
    found: str
    advice: str = ""


class Result(NamedTuple):
    """The return value of a check: a finding without the check's name."""

    verdict: Grade
    found: str
    advice: str = ""


ok, warn, fail = (partial(Result, verdict) for verdict in Grade)
