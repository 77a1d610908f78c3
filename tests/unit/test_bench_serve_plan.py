"""The measurements of bench.serve, and their order."""

from __future__ import annotations

import itertools
from collections import Counter

from bench.serve.driver import arguments
from bench.serve.plan import Pace
from tests.unit.serve_stubs import MODES, SETUP, plan


def test_each_round_runs_every_mode_and_starts_with_a_different_one() -> None:
    calls = list(plan(rounds=6).calls(SETUP))
    by_round = [calls[number : number + 3] for number in range(0, len(calls), 3)]
    assert [{call.round for call in one} for one in by_round] == [{number} for number in range(6)]
    assert all({call.mode for call in one} == set(MODES) for one in by_round)
    for place in range(3):
        assert Counter(one[place].mode for one in by_round) == dict.fromkeys(MODES, 2)


def test_modes_of_a_round_get_equal_prompts_and_rounds_get_different_ones() -> None:
    this = plan()
    seeds = {(call.round, this.seed_of(call)) for call in this.calls(SETUP)}
    assert len(seeds) == len({seed for _, seed in seeds}) == this.rounds
    measured = {seed for _, seed in seeds}
    assert this.seed_of(this.warm_up(SETUP, "layer")) not in measured


def test_a_call_has_the_arguments_of_vllm_bench_serve() -> None:
    this = plan(loads=[Pace(concurrency=4)])
    words = arguments(this, next(this.calls(SETUP)), "http://proxy", ["--tokenizer", "T"])
    pairs = dict(itertools.pairwise(words))
    assert pairs["--num-prompts"] == "8"  # times the concurrency
    assert (pairs["--max-concurrency"], pairs["--random-input-len"], pairs["--random-output-len"]) == ("4", "1024", "5")
    assert (pairs["--base-url"], pairs["--tokenizer"], pairs["--temperature"]) == ("http://proxy", "T", "0")
    assert (pairs["--dataset-name"], pairs["--seed"]) == ("random", "7")
    assert "--ignore-eos" in words
    assert "--request-rate" not in words
