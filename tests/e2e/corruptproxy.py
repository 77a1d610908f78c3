"""`layerpush proxy` that changes D's answers. The negative control of tests that compare answers."""

from __future__ import annotations

import dataclasses
from typing import Any

from layerpush.apps.cli import app
from layerpush.apps.proxy import legs

begin = legs._begin


async def begin_something_else(*arguments: Any) -> legs.Whole | legs.Stream:
    answer = await begin(*arguments)
    assert isinstance(answer, legs.Whole)
    return dataclasses.replace(answer, body=answer.body.replace(b" w1", b" w2"))


if __name__ == "__main__":
    legs._begin = begin_something_else
    app()
