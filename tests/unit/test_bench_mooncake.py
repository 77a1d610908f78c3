"""The proxy of the bench's mode `mooncake`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from bench.serve.mooncake_proxy import MooncakeAttempt
from layerpush.apps.proxy.body import COMPLETIONS, RequestBody
from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.legs import LegFailedError, Whole
from layerpush.core.prefill_identity import TO_PREFILL

P, D = Engine("prefill", "http://p"), Engine("decode", "http://d")


class Legs:
    """P answers when D has the request. D answers if P computes."""

    def __init__(self, status: int = 200, failure: Exception | None = None) -> None:
        self.status, self.failure = status, failure
        self.bodies: dict[str, Mapping[str, Any]] = {}
        self.d_asked, self.d_ended = asyncio.Event(), False

    async def ask(self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes) -> Whole:
        self.bodies[engine.role] = json.loads(body)
        await self.d_asked.wait()
        if self.failure is not None:
            raise self.failure
        return Whole(self.status, {}, b"of P")

    async def decode(
        self, engine: Engine, path: str, headers: Mapping[str, str], body: bytes, *, streams: bool
    ) -> Whole:
        self.bodies[engine.role] = json.loads(body)
        self.d_asked.set()
        try:
            if self.status != 200 or self.failure is not None:
                await asyncio.Event().wait()
        finally:
            self.d_ended = True
        return Whole(200, {}, b"of D")


def sent(legs: Legs) -> Whole:
    async def send() -> Any:
        body = RequestBody(COMPLETIONS, b'{"prompt": "x", "max_tokens": 4}')
        attempt = MooncakeAttempt(legs, {}, body, {}, P, D, TO_PREFILL)
        try:
            async with asyncio.timeout(60):
                return (await attempt.send()).content
        finally:
            assert legs.d_ended, "the end of the loop would end D's leg, too"

    return asyncio.run(send())


def test_both_engines_get_one_transfer_id_at_the_same_time() -> None:
    legs = Legs()
    assert sent(legs).body == b"of D"
    at_p, at_d = (legs.bodies[role]["kv_transfer_params"] for role in ("prefill", "decode"))
    assert at_p["transfer_id"] == at_d["transfer_id"]
    assert (at_p["do_remote_decode"], at_d["do_remote_prefill"]) == (True, True)
    assert {"remote_engine_id", "remote_bootstrap_addr"} <= set(at_d)
    assert (legs.bodies["prefill"]["max_tokens"], legs.bodies["decode"]["max_tokens"]) == (1, 4)


def test_d_does_not_wait_for_a_p_that_refuses_or_fails() -> None:
    legs = Legs(status=400)
    assert sent(legs).body == b"of P"
    legs = Legs(failure=LegFailedError(P, "broke"))
    with pytest.raises(LegFailedError, match="broke"):
        sent(legs)
