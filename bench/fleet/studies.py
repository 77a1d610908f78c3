"""The studies of docs/fleet.md: which fleets are simulated, and the part of their figures that each one is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from bench.fleet.fleet import Fleet, Plan
from layerpush.core.push_mode import PushMode

MODES = (PushMode.AUTO, PushMode.LAYER, PushMode.WHOLE)
EIGHT = Plan(prefill=8, decode=8)
NEVER_FULL = 8_000_000


def load(seed: int) -> list[Plan]:
    """Eight P and eight D: every mode against load and oversubscription."""
    cells = product((1.0, 4.0), (0.3, 0.7), MODES)
    return [replace(EIGHT, seed=seed, oversubscription=over, load=at, mode=mode) for over, at, mode in cells]


def incast(seed: int) -> list[Plan]:
    """One to eight P push into one D, whose KV cache is so large that it is never full."""
    cells = product((1, 2, 4, 6, 8), MODES)
    one = Plan(decode=1, kv_tokens=NEVER_FULL, load=0.6, seed=seed)
    return [replace(one, prefill=count, mode=mode) for count, mode in cells]


def ratio(seed: int) -> list[Plan]:
    """One to eight P and one D, for each trace."""
    cells = product(("mooncake", "azure-conversation"), (1, 2, 4, 6, 8))
    one = Plan(decode=1, seconds=25.0, warm_up=5.0, seed=seed)
    return [replace(one, prefill=count, trace=trace) for trace, count in cells]


def scale(seed: int) -> list[Plan]:
    """10, 100 and 1,000 engines, half of them P. All of them are restarted at once in the middle of the run."""
    one = Plan(load=0.2, seconds=24.0, warm_up=2.0, restart_at=10.0, seed=seed)
    return [replace(one, prefill=half, decode=half) for half in (5, 50, 500)]


def deaths(seed: int) -> list[Plan]:
    """10, 100 and 1,000 engines. A tenth of them die at random times, and start again."""
    one = Plan(load=0.2, seconds=24.0, warm_up=2.0, seed=seed)
    return [replace(one, prefill=half, decode=half, deaths=half // 5) for half in (5, 50, 500)]


STUDIES = {study.__name__: study for study in (load, incast, ratio, scale, deaths)}


def simulate(plan: Plan) -> dict[str, Any]:
    """A cell of a result: the plan and its figures."""
    return {"plan": asdict(plan), **Fleet(plan).run()}


def chosen(cells: Sequence[Mapping[str, Any]], **wanted: object) -> list[Mapping[str, Any]]:
    """The cells whose plans have these values."""
    return [cell for cell in cells if all(cell["plan"][name] == value for name, value in wanted.items())]
