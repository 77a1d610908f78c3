"""Prompts that wait for P get blocks only beside running requests, within their share, and in their order."""

from __future__ import annotations

import pytest

from layerpush.engine.scheduler.places import ASK_EVERY_S, LONGEST_S, Places


@pytest.fixture
def places() -> Places:
    return Places(100, 0.5)


def test_a_prompt_leaves_room_for_running_requests(places: Places) -> None:
    places.step_ended(growth=5, failed=False)
    assert places.takes(42, free=50, awaited=0, now=0.0)
    assert not places.takes(43, free=50, awaited=0, now=0.0)
    assert places.step_ended(growth=5, failed=False), "a prompt does not fit"


def test_awaited_prompts_hold_at_most_their_share(places: Places) -> None:
    assert places.takes(80, free=100, awaited=0, now=0.0), "one alone may hold more"
    assert places.takes(30, free=80, awaited=20, now=0.0)
    assert not places.takes(31, free=80, awaited=20, now=0.0)
    assert not places.step_ended(growth=0, failed=False), "it fits"


def test_prompts_keep_their_order(places: Places) -> None:
    assert places.has_place()
    assert not places.takes(60, free=100, awaited=20, now=0.0)
    assert not places.has_place(), "a later one, smaller or not"
    places.step_ended(growth=0, failed=False)
    assert places.waiting == 2
    assert places.has_place()
    assert places.takes(60, free=100, awaited=0, now=0.0)
    places.step_ended(growth=0, failed=False)
    assert places.waiting == 0


def test_a_prompt_that_vllm_cannot_place_holds_up_others_in_every_second_step(places: Places) -> None:
    for _ in range(3):
        assert places.takes(10, free=100, awaited=0, now=0.0)
        assert places.step_ended(growth=0, failed=True)
        assert not places.takes(10, free=100, awaited=0, now=0.0)
        places.step_ended(growth=0, failed=False)


def test_a_prompt_waits_only_so_long_for_requests_that_come_later(places: Places) -> None:
    def takes(now: float, awaited: int = 0) -> bool:
        taken = places.takes(60, free=30, awaited=awaited, now=now)
        places.step_ended(growth=1, failed=taken)  # vLLM has no blocks for it
        return taken

    assert not takes(0.0)
    assert not takes(LONGEST_S - 0.1)
    assert not takes(LONGEST_S, awaited=1), "P works for another one"
    assert takes(LONGEST_S), "it stands in front now"
    assert takes(LONGEST_S + 1), "until it has its blocks"
    places.placed()
    places.step_ended(growth=1, failed=False)
    assert not takes(LONGEST_S + 2)


def test_a_prompt_exceeds_the_share_in_the_end(places: Places) -> None:
    """P may be full of it, and have no room for the one that is awaited."""
    for now, taken in ((0.0, False), (LONGEST_S - 0.1, False), (LONGEST_S, True)):
        assert places.takes(30, free=60, awaited=40, now=now) == taken
        places.step_ended(growth=0, failed=False)


def test_blocks_come_back_before_running_requests_need_them(places: Places) -> None:
    places.step_ended(growth=8, failed=False)
    assert places.missing(free=8, now=0.0) == 0
    assert places.missing(free=6, now=0.0) == 2
    assert places.missing(free=6, now=ASK_EVERY_S / 2) == 0, "a load needs time to give its blocks back"
    assert places.missing(free=5, now=ASK_EVERY_S) == 3
