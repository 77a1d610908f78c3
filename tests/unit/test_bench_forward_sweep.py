"""A run of two processes that ends too early, and the figures that it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from bench.forward import sweep as sweeping
from bench.forward.orders import WrongBytesError
from bench.forward.processes import PairError
from bench.forward.settings import Settings
from bench.forward.sweep import sweep
from bench.unfinished import Unfinished


class Case:
    weight = 1


class Pair:
    """Answers with the order's number, and keeps the file's cells before each answer."""

    about: Mapping[str, object] = {"ucx": "1.23"}

    def __init__(self, failure: Exception | None, path: Path) -> None:
        self.failure, self.path, self.seen = failure, path, list[Any]()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, order: int) -> int:
        self.seen.append(json.loads(self.path.read_text())["cells"] if self.path.exists() else None)
        if order == 2 and self.failure is not None:
            raise self.failure
        return order


@contextmanager
def no_wire(*_: object) -> Iterator[object]:
    yield None


def run(tmp_path: Path, failure: Exception | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, Unfinished]:
    def body(answers: Sequence[Any], about: Mapping[str, object]) -> dict[str, object]:
        return {"about": about, "cells": list(answers)}

    unfinished = Unfinished(tmp_path / "forward.json", body)
    assert unfinished.path is not None
    pair = Pair(failure, unfinished.path)
    monkeypatch.setattr(sweeping, "Pair", lambda *_: pair)
    orders: Any = [("shm", Case(), number) for number in range(3)]
    sweep(Console(quiet=True), no_wire, orders, Settings(), str, unfinished)
    return pair, unfinished


def test_figures_are_saved_from_the_first_case_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, unfinished = run(tmp_path, None, monkeypatch)
    assert pair.seen == [None, [0], [0, 1]]
    assert [each.name for each in tmp_path.iterdir()] == ["forward.unfinished.json"]
    unfinished.remove()
    assert not list(tmp_path.iterdir())


def test_a_failed_run_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.Exit):
        run(tmp_path, PairError("a process has ended"), monkeypatch)
    left = json.loads((tmp_path / "forward.unfinished.json").read_text())
    assert left == {"about": {"shm": {"ucx": "1.23"}}, "cells": [0, 1]}


def test_a_wrong_byte_leaves_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.Exit):
        run(tmp_path, WrongBytesError("a byte"), monkeypatch)
    assert not list(tmp_path.iterdir())


def test_without_a_file_no_figures_are_saved() -> None:
    unfinished = Unfinished(None, lambda *_: {})
    unfinished.keep([1], {})
    unfinished.remove()
