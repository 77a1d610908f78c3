"""bench.serve with vLLM's own ``bench serve``: calls and result files. A stub answers in the place of engines."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.demo.cluster import DEMO_SHAPE
from bench.provenance import unplaced
from bench.serve.tokenizer import write_tokenizer
from tests.contract.commands import SECONDS, children, start
from tests.support.http_servers import QuietHandler, serving
from tests.support.waiting import until

ROUNDS = 3


class WordsHandler(QuietHandler):
    """Each token of an answer is the server's ``word`` and its number."""

    def do_GET(self) -> None:
        self.answer(b'{"data": [{"id": "stub", "root": "stub"}]}')

    def do_POST(self) -> None:
        tokens = json.loads(self.read_body())["max_tokens"]
        texts = [f" {self.server.word}{number}" for number in range(tokens)]
        events = [json.dumps({"choices": [{"index": 0, "text": text}]}) for text in texts]
        lines = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        self.answer(lines.encode(), content_type="text/event-stream")


@contextlib.contextmanager
def stub(word: str = "token") -> Iterator[str]:
    """The URL of an engine that answers every prompt with the same words."""
    with serving(WordsHandler) as server:
        server.word = word
        yield f"http://127.0.0.1:{server.server_port}"


def start_bench(tmp_path: Path, urls: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    tokenizer = write_tokenizer(tmp_path / "words", 512, 4096, DEMO_SHAPE.config())
    words = ["--model", str(tokenizer), "--lengths", "64", "--rounds", str(ROUNDS), "--requests", "2", *arguments]
    return start("tests.contract.stubsite", json.dumps(urls), *words)


def bench(tmp_path: Path, urls: dict[str, str], *arguments: str) -> tuple[int, str]:
    process = start_bench(tmp_path, urls, *arguments)
    said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_the_result_has_every_sample_and_its_conditions(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    with stub() as one, stub() as other:
        arguments = ("--modes", "layer", "--concurrency", "1,2", "--out", str(out))
        status, said = bench(tmp_path, {"aggregated": one, "layer": other}, *arguments)
    assert status == 0, said
    written = json.loads(out.read_text())
    assert {"argv", "git_sha", "versions", "machine", "seed", "settings", "answers", "cells"} <= set(written)
    assert written["answers"] == {"compared": 18, "wrong": 0, "unlike_aggregated": 0}
    assert [(cell["prompt_tokens"], cell["concurrency"], cell["requests"]) for cell in written["cells"]] == [
        (64, 1, 2),
        (64, 2, 4),
    ]
    for cell in written["cells"]:
        for mode in ("aggregated", "layer"):
            found = cell["modes"][mode]
            assert found["argv"][found["argv"].index("--tokenizer") + 1] == unplaced(str(tmp_path / "words"))
            assert [len(one) for one in found["ttft_ms"]["raw"]] == [cell["requests"]] * ROUNDS
            assert min(found["ttft_ms"]["raw"][0]) > 0
            assert found["tpot_ms"]["p50"] >= 0
            assert found["exposed_ms"] is None
        assert cell["ratios"]["ttft_ms"]["layer/aggregated"]["ratio"] > 0
    assert "Time to first token" in said
    assert [path.name for path in tmp_path.iterdir() if path.name != "words"] == ["serve.json"]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_a_different_answer_ends_the_benchmark_without_a_result(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    with stub() as one, stub("other") as other:
        arguments = ("--modes", "layer", "--out", str(out))
        status, said = bench(tmp_path, {"aggregated": one, "layer": other}, *arguments)
    assert status == 1, said
    assert "' other0 other1" in said
    assert "Nothing is written" in said
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_an_interrupted_run_ends_its_client_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    with stub() as one, stub() as other:
        process = start_bench(tmp_path, {"aggregated": one, "layer": other}, "--modes", "layer", "--out", str(out))
        client = until(lambda: children(process.pid, 1), seconds=SECONDS)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        until(lambda: not any(Path(f"/proc/{pid}/root").exists() for pid in client))
    assert not out.exists()
