"""What bench.serve measures, and in which order."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from bench.serve.driver import arguments
from bench.serve.plan import Call, Load, Setup, seconds_left
from tests.unit.serve_rig import MODES, SETUP, plan


def test_in_each_round_each_mode_has_its_turn_and_another_one_begins() -> None:
    calls = list(plan(rounds=6).calls(SETUP))
    by_round = [calls[number : number + 3] for number in range(0, len(calls), 3)]
    assert [{call.round for call in one} for one in by_round] == [{number} for number in range(6)]
    assert all({call.mode for call in one} == set(MODES) for one in by_round)
    for place in range(3):
        assert Counter(one[place].mode for one in by_round) == dict.fromkeys(MODES, 2)


def test_every_cell_of_a_setup_is_measured_by_every_mode_in_every_round() -> None:
    swept = plan(lengths=[1024, 4096], loads=[Load(1), Load(4), Load(rate=0.5)], setups=[SETUP, Setup("1gbit", 512)])
    calls = [call for setup in swept.setups for call in swept.calls(setup)]
    assert len(calls) == len({call.key for call in calls}) == 2 * 2 * 3 * 3 * len(MODES)
    assert [call.cell.setup for call in calls] == sorted((call.cell.setup for call in calls), key=swept.setups.index)


def test_modes_of_a_round_get_the_same_prompts_and_rounds_get_others() -> None:
    this = plan()
    seeds = {(call.round, this.seed_of(call)) for call in this.calls(SETUP)}
    assert len(seeds) == len({seed for _, seed in seeds}) == this.rounds
    measured = {seed for _, seed in seeds}
    assert this.seed_of(this.warm_up(SETUP, "layer")) not in measured


def test_a_warm_up_is_as_long_and_as_wide_as_anything_measured() -> None:
    this = plan(lengths=[4096, 1024], loads=[Load(4), Load(1)])
    call = this.warm_up(SETUP, "layer")
    assert (call.cell.prompt_tokens, call.cell.load, call.mode) == (4096, Load(4), "layer")
    assert this.streams == 4


def test_a_call_of_vllm_bench_serve() -> None:
    this = plan(loads=[Load(concurrency=4), Load(rate=0.5)])
    closed, opened = (next(c for c in this.calls(SETUP) if c.cell.load == load) for load in this.loads)
    words = arguments(this, closed, "http://proxy", ["--tokenizer", "T"])
    pairs = dict(itertools.pairwise(words))
    assert pairs["--num-prompts"] == "8"  # times the concurrency
    assert (pairs["--max-concurrency"], pairs["--random-input-len"], pairs["--random-output-len"]) == ("4", "1024", "5")
    assert (pairs["--base-url"], pairs["--tokenizer"], pairs["--temperature"]) == ("http://proxy", "T", "0")
    assert (pairs["--dataset-name"], pairs["--seed"]) == ("random", "7")
    assert "--ignore-eos" in words
    assert "--request-rate" not in words
    words = arguments(this, opened, "http://proxy", [])
    assert words[words.index("--request-rate") + 1] == "0.5"
    assert words[words.index("--num-prompts") + 1] == "2"
    assert "--max-concurrency" not in words


def test_time_left_follows_what_the_same_calls_took() -> None:
    this = plan(lengths=[1000, 4000], answer_tokens=2)
    calls = list(this.calls(SETUP))
    assert seconds_left(this, calls, []) is None
    layer, longer = Call(calls[0].cell, 0, "layer"), Call(this.cells(SETUP)[1], 0, "layer")
    slow = Call(calls[0].cell, 0, "request")
    done = [(layer, 10.0), (slow, 30.0)]
    assert seconds_left(this, [layer, layer], done) == pytest.approx(20.0)
    assert seconds_left(this, [slow], done) == pytest.approx(30.0)
    assert seconds_left(this, [longer], done) == pytest.approx(20.0 * 4002 / 1002)  # never seen: by its tokens
    assert seconds_left(this, [], done) == 0
