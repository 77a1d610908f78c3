"""The limit and the queue before it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from layerpush.apps.proxy.errors import ProxyError
from layerpush.apps.proxy.gate import Gate
from tests.unit.proxy.world import asynchronous, until


class Visitor:
    """Enters, and stays until ``go`` is set."""

    def __init__(self, gate: Gate, name: str, entered: list[str]) -> None:
        self.go = asyncio.Event()
        self.task = asyncio.create_task(self._visit(gate, name, entered))

    async def _visit(self, gate: Gate, name: str, entered: list[str]) -> None:
        async with gate.entered():
            entered.append(name)
            await self.go.wait()


@asynchronous
async def test_first_come_first_served() -> None:
    gate, entered = Gate(2, 3, 600.0, 1000), list[str]()
    visitors = [Visitor(gate, name, entered) for name in "abcde"]
    await until(lambda: gate.queued == 3, "three wait")
    assert (entered, gate.under_way) == (["a", "b"], 2)
    with pytest.raises(ProxyError, match=r"2 requests are under way .* and 3 wait"):
        async with gate.entered():
            pass
    for index, name in enumerate("cde"):
        visitors[index].go.set()
        await until(lambda: name in entered, f"{name} enters")  # noqa: B023
        assert (entered[-1], gate.under_way) == (name, 2)
    for visitor in visitors:
        visitor.go.set()
        await visitor.task
    assert (gate.under_way, gate.queued) == (0, 0)


@asynchronous
async def test_the_place_of_a_cancelled_request_goes_to_the_next_one() -> None:
    gate, entered = Gate(1, 3, 600.0, 1000), list[str]()
    a, b, c = (Visitor(gate, name, entered) for name in "abc")
    await until(lambda: gate.queued == 2, "two wait")
    a.go.set()
    while gate.queued == 2:
        await asyncio.sleep(0)
    b.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await b.task
    await until(lambda: "c" in entered, "c enters")
    assert entered == ["a", "c"]
    c.go.set()
    await c.task
    assert gate.under_way == 0


@asynchronous
async def test_an_upload_takes_a_place_of_the_queue() -> None:
    gate = Gate(1, 1, 600.0, 1000)
    with gate.uploading(), gate.uploading():
        assert (gate.uploads, gate.queued, gate.under_way) == (2, 0, 0)
        with pytest.raises(ProxyError, match=r"^0 requests .* and 2 wait or send their bodies") as refused:
            gate.uploading().__enter__()
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    async with gate.entered():
        with gate.uploading(), pytest.raises(ProxyError, match=r"^1 requests .* and 1 wait or send"):
            async with gate.entered():
                pass
    assert (gate.uploads, gate.queued, gate.under_way) == (0, 0, 0)


def test_the_bytes_of_all_bodies_are_bounded() -> None:
    gate = Gate(9, 9, 600.0, 1000)
    with gate.payload() as one, gate.payload() as other:
        one.grow(600)
        with pytest.raises(ProxyError, match="more than 1000 bytes") as refused:
            other.grow(401)
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
        other.grow(400)
        assert gate.payload_bytes == 1000
        one.free()
        other.grow(1)
    assert gate.payload_bytes == 0
