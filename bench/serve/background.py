"""Streams that an engine decodes while another client measures it."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

TOKENS = 1056
"""The most tokens of a stream, its prompt included."""
PROMPT_TOKENS = 32
WORDS = range(100, 1000)
TIMEOUT_S = 60.0
LOOK_S = 0.05


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
            stream.stop()


class _Stream(threading.Thread):
    """One answer after the other. ``stop`` closes the connection, so the engine aborts the current one."""

    def __init__(self, url: str, model: str, tokens: int, seed: int) -> None:
        super().__init__(name=f"background-{seed}")
        self.decodes = threading.Event()
        self._body = {"model": model, "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        self._random = random.Random(seed)
        self._problem: Exception | None = None
        self._stopped = threading.Event()
        self._connection = _connection(url)

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._answer()
        except (OSError, http.client.HTTPException, BackgroundError) as error:
            self._problem = error

    def check(self) -> None:
        """Raises ``BackgroundError`` if the stream has ended."""
        if self._problem is not None:
            raise BackgroundError(f"a background stream ended: {self._problem!r}")

    def stop(self) -> None:
        """Return when the stream has ended, with its next token."""
        self._stopped.set()
        if self.ident is not None:
            self.join()
        self._connection.close()

    def _answer(self) -> None:
        body = self._body | {"prompt": self._random.choices(WORDS, k=PROMPT_TOKENS)}
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with self._connection.getresponse() as response:
            if response.status != 200:
                raise BackgroundError(f"{response.status} {response.read(1000)!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    self.decodes.set()
                if self._stopped.is_set():
                    return


def _model(url: str) -> tuple[str, int]:
    """The name of the engine's model, and its longest request in tokens. Raises ``BackgroundError``."""
    connection = _connection(url)
    try:
        connection.request("GET", "/v1/models")
        (card,) = json.load(connection.getresponse())["data"]
        return str(card["id"]), int(card["max_model_len"])
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        raise BackgroundError(f"{url}/v1/models: {error!r}") from error
    finally:
        connection.close()


def _connection(url: str) -> Any:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc, timeout=TIMEOUT_S)
