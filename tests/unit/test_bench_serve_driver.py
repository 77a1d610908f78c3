"""The process that runs ``vllm bench serve``, with a script in the place of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.serve.driver import Driver, DriverError
from bench.servers.processes import is_running

CLIENT = """
import json, os, sys, time
from multiprocessing.connection import Connection
commands = Connection(int(sys.argv[1]))
commands.send(None)
while True:
    words = commands.recv()
    if words[0] == "die":
        print("the reason", flush=True)
        sys.exit(3)
    if words[0] == "hang":
        time.sleep(600)
    if words[0] == "refuse":
        commands.send("ValueError: no such tokenizer")
        continue
    pairs = dict(zip(words, words[1:]))
    with open(os.path.join(pairs["--result-dir"], pairs["--result-filename"]), "w") as file:
        json.dump({"words": words, "pid": os.getpid()}, file)
    commands.send(None)
"""


def driver(logs: Path) -> Driver:
    return Driver(logs, [sys.executable, "-c", CLIENT])


def nothing() -> None:
    pass


def test_one_process_makes_all_calls_and_ends_with_the_block(tmp_path: Path) -> None:
    with driver(tmp_path) as this:
        first = this.run(["--model", "M"], "first", nothing)
        second = this.run(["--model", "M"], "second", nothing)
    assert first["pid"] == second["pid"]
    assert first["words"][:2] == ["--model", "M"]
    assert {"--save-result", "--save-detailed"} <= set(first["words"])
    assert sorted(path.name for path in (tmp_path / "bench-serve").iterdir()) == ["first.json", "second.json"]
    assert not is_running(first["pid"])


def test_a_failed_call_is_reported_and_later_calls_work(tmp_path: Path) -> None:
    with driver(tmp_path) as this:
        with pytest.raises(DriverError, match="no such tokenizer"):
            this.run(["refuse"], "first", nothing)
        assert this.run(["go"], "second", nothing)


def test_a_dead_process_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with driver(tmp_path) as this, pytest.raises(DriverError, match="ended with status 3") as caught:
        this.run(["die"], "first", nothing)
    assert "the reason" in str(caught.value)


def test_a_watch_that_raises_ends_the_call_and_the_process(tmp_path: Path) -> None:
    def watch() -> None:
        raise RuntimeError("an engine has died")

    with driver(tmp_path) as this:
        pid = this.run(["go"], "first", nothing)["pid"]
        with pytest.raises(RuntimeError, match="an engine has died"):
            this.run(["hang"], "second", watch)
    assert not is_running(pid)
