"""Streams that an engine decodes while another client measures it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import urllib.request
from collections.abc import Callable, Iterator

from bench.servers.engines import no_proxy

TOKENS = 1056
"""The most tokens of a stream, its prompt included."""
PROMPT_TOKENS = 32
WORDS = range(100, 1000)
TIMEOUT_S = 60.0
LOOK_S = 0.05
ERRORS = (OSError, ValueError, KeyError, http.client.HTTPException)


class BackgroundError(RuntimeError):
    """The engine refused or ended a stream."""


@contextlib.contextmanager
def background(url: str, count: int, watch: Callable[[], None]) -> Iterator[None]:
    """``count`` streams of the engine at ``url`` until the block ends. Each that is complete begins anew.

    The block begins when each stream has a token. ``watch`` is called until then, and may raise. Raises
    ``BackgroundError``, also at the end of the block: then the engine was less busy than planned.
    """
    model, longest = _model(url) if count else ("", 0)
    streams = [_Stream(url, model, min(TOKENS, longest) - PROMPT_TOKENS, seed) for seed in range(count)]
    try:
        for stream in streams:
            stream.start()
        for stream in streams:
            while not stream.decodes.wait(LOOK_S):
                watch()
                stream.check()
        yield
        for stream in streams:
            stream.check()
    finally:
        for stream in streams:
            stream.stopped.set()
        for stream in streams:
            if stream.ident is not None:
                stream.join()  # with its next token


class _Stream(threading.Thread):
    """One answer after the other. After ``stopped`` it closes its connection, so the engine aborts the current one."""

    def __init__(self, url: str, model: str, tokens: int, seed: int) -> None:
        super().__init__(name=f"background-{seed}")
        self.decodes, self.stopped = threading.Event(), threading.Event()
        self._url = f"{url}/v1/completions"
        self._body = {"model": model, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        self._random = random.Random(seed)
        self._problem: Exception | None = None

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                body = self._body | {"prompt": self._random.choices(WORDS, k=PROMPT_TOKENS)}
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
                with no_proxy.open(request, timeout=TIMEOUT_S) as response:
                    for line in response:
                        if line.startswith(b"data: {"):
                            self.decodes.set()
                        if self.stopped.is_set():
                            break
        except ERRORS as error:
            self._problem = error

    def check(self) -> None:
        """Raises ``BackgroundError`` if the stream has ended."""
        if self._problem is not None:
            raise BackgroundError(f"a background stream ended: {self._problem!r}")


def _model(url: str) -> tuple[str, int]:
    """The name of the engine's model, and its longest request in tokens. Raises ``BackgroundError``."""
    try:
        with no_proxy.open(f"{url}/v1/models", timeout=TIMEOUT_S) as response:
            (card,) = json.load(response)["data"]
        return str(card["id"]), int(card["max_model_len"])
    except ERRORS as error:
        raise BackgroundError(f"{url}/v1/models: {error!r}") from error
