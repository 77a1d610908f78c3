"""For all unit tests: a command that runs in this process changes its environment for that test only."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before:
        del os.environ[name]
    os.environ.update(before)
