"""The tables of `bench.returned`."""

from __future__ import annotations

from typing import Any

import pytest

from bench.returnedpage import ANOTHER, AUTO, ONE, RETURNS, SAME, tables


def turn(mode: str, p: str, number: int, computed: int, *times: float) -> list[dict[str, Any]]:
    return [{"mode": mode, "p": p, "turn": number, "computed": computed, "first_token_s": each} for each in times]


RESULT: dict[str, Any] = {
    "date": "2026-11-26T20:30:00", "machine": {"cpus": 2}, "versions": {"python": "3.11.7"}, "wrong": 0,
    "settings": {"first": 4096, "new": 2560, "answer": 512, "turns": 2, "rounds": 3, "step_tokens": 512},
    "samples": [
        *turn(RETURNS, ANOTHER, 0, 4096, 1.0), *turn(RETURNS, ANOTHER, 1, 2592, 1.5, 0.5, 0.75),
        *turn(AUTO, SAME, 0, 4096, 1.0), *turn(AUTO, SAME, 1, 3104, 2.0),
        *turn(ONE, SAME, 0, 4096, 0.5), *turn(ONE, SAME, 1, 2592, 0.25),
    ],
}  # fmt: skip


def test_the_tables_have_medians_by_turn() -> None:
    lines = tables(RESULT).splitlines()
    assert lines[2:7] == [
        "|  | P | 4,096 | 7,168 |",
        "| --- | --- | ---: | ---: |",
        "| one engine |  | 4,096 | 2,592 |",
        "| layerpush | the same P | 4,096 | 3,104 |",
        "| layerpush, returns | another P | 4,096 | 2,592 |",
    ]
    assert "| layerpush, returns | another P | 1.00 s (1.00-1.00) | 0.75 s (0.50-1.50) |" in lines


def test_a_run_with_wrong_answers_is_not_published() -> None:
    with pytest.raises(ValueError, match="2 wrong answers"):
        tables(RESULT | {"wrong": 2})
