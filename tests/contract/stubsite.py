"""``python -m tests.contract.stubsite '{"MODE": "URL"}' ...``: bench.serve with stubs in the place of its servers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.serve import command
from bench.serve.__main__ import app
from bench.serve.plan import Setup
from bench.serve.site import ServedMode, Targets

URLS: dict[str, str] = json.loads(sys.argv.pop(1))


class StubSite:
    """Stubs run already, and have no metrics."""

    def __init__(self, _lineup: Any, model: Sequence[str], *_: Any, **__: Any) -> None:
        self.model = model

    @contextlib.contextmanager
    def up(self, setup: Setup, modes: Sequence[str]) -> Iterator[Targets]:
        yield {mode: ServedMode(mode, URLS[mode]) for mode in modes}

    def only(self, mode: str) -> None:
        pass

    def check(self) -> None:
        pass


if __name__ == "__main__":
    command.Site = StubSite
    app()
