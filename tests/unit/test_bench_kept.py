"""The table of `bench.kept`."""

from __future__ import annotations

from typing import Any

import pytest

from bench.keptpage import table


def sample(mode: str, percent: int, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"first_token_s": None, "noticed_s": None, "waited_s": None, "kept_tokens": 0}
    return {"mode": mode, "percent": percent, **found, **fields}


RESULT: dict[str, Any] = {
    "date": "2026-11-26T14:30:00", "machine": {"cpus": 2}, "versions": {"python": "3.11.7"}, "wrong": 0,
    "settings": {
        "tokens": 32768, "step_tokens": 512, "rounds": 3, "peer_timeout_s": 4.0, "stock_limit_s": 20.0, "wait_s": 30.0,
    },
    "samples": [
        sample("stock", 50, waited_s=31.4),
        *(sample("kept", 50, first_token_s=s, noticed_s=s - 2, kept_tokens=16384) for s in (4.0, 5.0, 9.0)),
        sample("nothing", 50, first_token_s=8.0, noticed_s=2.0),
    ],
}  # fmt: skip


def test_the_table_has_medians_and_what_never_came() -> None:
    lines = table(RESULT).splitlines()
    assert lines[2] == "| 50 % | 16,384 tokens | 5.0 s (4.0-9.0) | 8.0 s (8.0-8.0) | none in 31 s |"
    assert "D noticed the death after 2.0 to 7.0 s, with `peer_timeout_s` 4." in lines[-1]


def test_a_run_with_wrong_answers_is_not_published() -> None:
    with pytest.raises(ValueError, match="2 wrong answers"):
        table(RESULT | {"wrong": 2})
