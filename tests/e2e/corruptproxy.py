"""`layerpush proxy` that changes D's answers. The negative control of tests that compare answers."""

from __future__ import annotations

from layerpush.apps.cli import app
from layerpush.apps.proxy.client import Client

send = Client.send


async def send_something_else(client: Client, data: bytes) -> None:
    await send(client, data.replace(b" w1", b" w2"))


if __name__ == "__main__":
    Client.send = send_something_else  # type: ignore[method-assign]
    app()
