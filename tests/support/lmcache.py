"""LMCache, as `scripts/lmcache` installs it: its server, and its package in a process that calls `load`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import waiting

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build/lmcache"
ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false"}
START_S = 90.0
CHUNK = 64
"""The tokens that LMCache stores and finds as one: two blocks."""


def load() -> None:
    """Make LMCache importable, before vLLM makes its connector."""
    os.environ.update(ENVIRONMENT)
    sys.path.append(str(PACKAGES))
    _hide_dict_of_library()


def _hide_dict_of_library() -> None:
    """LMCache imports numba. vLLM's CPU platform then asks each object of each module for its ``__dict__``, and fails
    over llvmlite's library, which takes any name for one of its functions.
    """
    from llvmlite.binding import ffi

    function_of = ffi._lib_wrapper.__getattr__

    def named(self: object, name: str) -> object:
        if name == "__dict__":
            raise AttributeError(name)
        return function_of(self, name)

    ffi._lib_wrapper.__getattr__ = named


@contextlib.contextmanager
def server(port: int, log: Path) -> Iterator[None]:
    """LMCache's server on loopback, until the block ends. It keeps at most 1 GB."""
    options = {"host": "127.0.0.1", "port": port, "chunk-size": CHUNK, "l1-size-gb": 1, "eviction-policy": "LRU"}
    # On a CPU the engines copy the KV. The default serves only engines whose KV the server copies.
    options["supported-transfer-mode"] = "auto"
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--no-l1-use-lazy", "--disable-observability"]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(PACKAGES)}
    with log.open("w") as out, subprocess.Popen(command, env=environment, stdout=out, stderr=out) as process:
        try:
            waiting.until(lambda: "cache server is running" in log.read_text(), "LMCache's server", START_S)
            yield
        finally:
            process.terminate()
