"""A run of two processes that ends too early, and the figures that it leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import typer
from rich.console import Console

from bench.forward import sweep as sweeping
from bench.forward.orders import WrongBytesError
from bench.forward.processes import PairError
from bench.forward.settings import ForwardSettings
from bench.forward.sweep import sweep


class Pair:
    """Answers with the order's number."""

    about: Mapping[str, object] = {"ucx": "1.23"}

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, order: int) -> int:
        if order == 2:
            raise self.failure
        return order


@contextlib.contextmanager
def no_wire(*_: object) -> Iterator[object]:
    yield None


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(PairError("a process has ended"), typer.Exit), (WrongBytesError("a byte"), WrongBytesError)],
)
def test_each_case_is_kept_once_it_is_measured(
    failure: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "ProcessPair", lambda *_: Pair(failure))
    monkeypatch.setattr(sweeping, "wire_of", no_wire)
    kept: list[Any] = []
    orders: Any = [("shm", number) for number in range(3)]
    with pytest.raises(raised):
        sweep(
            Console(quiet=True),
            orders,
            ForwardSettings(),
            lambda answers, about: kept.append((list(answers), dict(about))),
        )
    assert kept == [(list(range(number)), {"shm": {"ucx": "1.23"}}) for number in (1, 2)]
