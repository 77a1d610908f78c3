"""`layerpush proxy` that changes D's answers. The negative control of tests that compare answers."""

from __future__ import annotations

from typing import Any

from layerpush.apps.cli import app
from layerpush.apps.proxy import legs

read = legs._read


async def read_something_else(*arguments: Any) -> tuple[bytes, bool]:
    body, is_end = await read(*arguments)
    return body.replace(b" w1", b" w2"), is_end


if __name__ == "__main__":
    legs._read = read_something_else
    app()
