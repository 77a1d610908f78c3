"""A peer that misbehaves a million times gets a million on the counter and a few lines in the log."""

from __future__ import annotations

import logging

import pytest

from layerpush.telemetry.peer_errors import MAX_TEXT_CHARS, PeerErrors

LOGGER = logging.getLogger("vllm.layerpush.test_complaints")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(LOGGER, "log", lambda _, text, *args, **__: seen.append(text % args))
    return seen


def test_repeated_errors_log_one_line_per_second_with_a_count(lines: list[str]) -> None:
    peer_errors = PeerErrors(LOGGER)
    for moment in range(2500):
        peer_errors.count("garbage", f"number {moment}", moment / 1000)

    assert lines == [
        "layerpush: number 0",
        "layerpush: number 1000 (999 more like it since the last line)",
        "layerpush: number 2000 (999 more like it since the last line)",
    ]
    assert peer_errors.counts == {"garbage": 2500}


def test_a_line_after_a_quiet_time_has_no_count(lines: list[str]) -> None:
    peer_errors = PeerErrors(LOGGER)
    for now in (0.0, 0.5, 1.5, 2.5):
        peer_errors.count("garbage", "again", now)
    assert lines == [
        "layerpush: again",
        "layerpush: again (1 more like it since the last line)",
        "layerpush: again",
    ]


def test_kinds_beyond_the_limit_count_as_other(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerpush.telemetry.peer_errors.MAX_KINDS", 3)
    peer_errors = PeerErrors(LOGGER)
    for number in range(100):
        peer_errors.count(f"kind {number}", "text", 0.0)
    peer_errors.count("kind 1", "text", 0.0)

    assert peer_errors.counts == {"kind 0": 1, "kind 1": 2, "kind 2": 1, "other": 97}
    assert len(lines) == 4


def test_control_characters_cannot_forge_a_log_line(lines: list[str]) -> None:
    PeerErrors(LOGGER).count("garbage", "one\ntwo\x1b[2J\u2028three", 0.0)
    assert lines == ["layerpush: one?two?[2J?three"]


def test_a_long_text_is_cut(lines: list[str]) -> None:
    PeerErrors(LOGGER).count("garbage", "x" * 10_000, 0.0)
    assert lines == ["layerpush: " + "x" * MAX_TEXT_CHARS]
