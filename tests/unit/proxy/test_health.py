"""The engines that get requests, and the proxy's reports on itself."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from layerpush.apps.proxy.engines import Engine
from layerpush.apps.proxy.introduction import Introductions
from tests.unit.proxy.world import asynchronous, until, world

NOBODY: Any = None


@asynchronous
async def test_an_unhealthy_engine_gets_no_requests_until_it_is_healthy_again() -> None:
    async with world(prefills=2, decodes=2) as here:
        sick = here.decode[0]
        sick.healthy = False
        await until(lambda: not all(each.healthy for each in here.proxy.fleet), "the proxy notices")
        for _ in range(4):
            assert (await here.post()).status == 200
        assert not sick.seen
        assert len(here.decode[1].seen) == 4
        sick.healthy = True
        await here.ready()
        while not sick.seen:
            assert (await here.post()).status == 200


@asynchronous
async def test_health_reports_the_missing_engines() -> None:
    async with world(prefills=2) as here:
        reply = await here.get("/health")
        assert reply.status == 200
        told = json.loads(reply.body)
        assert told["status"] == "ok"
        assert [(each["role"], each["url"], each["healthy"]) for each in told["engines"]] == [
            ("prefill", here.prefill[0].url, True),
            ("prefill", here.prefill[1].url, True),
            ("decode", here.d.url, True),
        ]
        assert told["engines"][0]["dispatch"] == "concurrent"
        here.prefill[0].healthy = False
        await until(lambda: not all(each.healthy for each in here.proxy.fleet), "the proxy notices")
        reply = await here.get("/health")
        assert reply.status == 200
        assert json.loads(reply.body)["engines"][0]["problem"].endswith("answered 503 to /health: nothing")
        here.d.healthy = False
        await until(lambda: not here.proxy.fleet.ready, "the proxy notices")
        assert (await here.get("/health")).status == 503


@asynchronous
async def test_engines_may_start_after_the_proxy() -> None:
    async with world(wait=False, d0={"healthy": False}) as here:
        assert (await here.get("/health")).status == 503
        assert (await here.post()).status == 503
        here.d.healthy = True
        await here.ready()
        assert (await here.get("/health")).status == 200
        assert (await here.post()).status == 200


@asynchronous
async def test_the_model_list_is_ds() -> None:
    async with world(decodes=2) as here:
        reply = await here.get("/v1/models")
        assert reply.status == 200
        assert json.loads(reply.body)["data"][0]["by"] == "d0"
        await here.decode[0].stop()
        reply = await here.get("/v1/models")
        assert json.loads(reply.body)["data"][0]["by"] == "d1"
        await here.decode[1].stop()
        assert (await here.get("/v1/models")).status == 503


def test_the_proxy_warns_of_a_remote_p_with_a_loopback_host(caplog: pytest.LogCaptureFixture) -> None:
    local = {"remote_engine_id": "p", "remote_host": "localhost", "remote_port": 5600, "tp_size": 1}
    introductions = Introductions(NOBODY, NOBODY)
    for url, warned in (("http://127.0.0.1:8000", False), ("http://localhost:8000", False), ("http://p:8000", True)):
        caplog.clear()
        introductions.learn(Engine("prefill", url), msgspec.Raw(msgspec.json.encode(local)))
        assert ("VLLM_NIXL_SIDE_CHANNEL_HOST" in caplog.text) == warned
