"""Streams that an engine decodes while bench.serve measures it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bench.serve.background import PROMPT_TOKENS, TOKENS, BackgroundError, background
from tests.support.http_servers import QuietHandler, serving


class StreamingHandler(QuietHandler):
    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": "demo", "max_model_len": 4192}]}).encode())

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.read_body()))
        self.send_response(self.server.status)
        self.end_headers()
        sent = 0
        with contextlib.suppress(OSError):
            while sent != self.server.tokens:
                self.wfile.write(b'data: {"choices": []}\n\n')
                sent += 1
        self.server.left.release()


@contextlib.contextmanager
def engine(tokens: int | None = None, status: int = 200) -> Iterator[Any]:
    """Streams ``tokens`` tokens for each request; None: as many as the client reads."""
    with serving(StreamingHandler) as server:
        server.tokens, server.status, server.url = tokens, status, f"http://127.0.0.1:{server.server_port}"
        server.asked, server.left = [], threading.Semaphore(0)
        yield server


def idle() -> None:
    pass


def test_all_streams_decode_inside_the_block_and_are_closed_after_it() -> None:
    with engine() as server:
        with background(server.url, 3, idle):
            assert len(server.asked) == 3
        for _ in range(3):
            assert server.left.acquire(timeout=60)
    assert len({tuple(each["prompt"]) for each in server.asked}) == 3
    for each in server.asked:
        assert (each["model"], each["max_tokens"], each["stream"]) == ("demo", TOKENS - PROMPT_TOKENS, True)
        assert each["ignore_eos"] is True


def test_a_finished_stream_starts_again() -> None:
    with engine(tokens=2) as server, background(server.url, 1, idle):
        for _ in range(3):
            assert server.left.acquire(timeout=60)
    assert len(server.asked) >= 3


def test_an_engine_that_refuses_a_stream_ends_the_run() -> None:
    with engine(status=400) as server, pytest.raises(BackgroundError, match="400"), background(server.url, 1, idle):
        pytest.fail("no stream decodes")


def test_a_dead_engine_is_noticed_before_and_during_the_wait() -> None:
    with pytest.raises(BackgroundError, match="/v1/models"), background("http://127.0.0.1:9", 1, idle):
        pytest.fail("no engine")

    def dead() -> None:
        raise RuntimeError("an engine has ended")

    with engine(tokens=0) as server, pytest.raises(RuntimeError, match="ended"), background(server.url, 1, dead):
        pytest.fail("no stream decodes")


def test_zero_streams_send_no_request() -> None:
    with background("", 0, idle):
        pass
