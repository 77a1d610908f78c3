"""What every unit test gets: commands that run in this process may change its environment, for that test only.

No example of a property has a deadline: on a machine that is busy with something else each may take a second.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unit", settings.default, deadline=None)
settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before:
        del os.environ[name]
    os.environ.update(before)
