"""A P that drains: ``vllm serve --shutdown-timeout`` finishes its requests, and D gets their KV."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import aiohttp
import pytest

from bench.servers.engines import Engine, EngineGroup
from bench.servers.interrupts import Interrupts
from bench.servers.load import Answer, RequestFailedError, complete, complete_disaggregated, make_prompt
from bench.servers.model import write_model
from bench.servers.ports import PortAllocator
from tests.e2e.proxyrig import SHAPE, metric, server_spec, until
from tests.support.ports import DRAIN_PORTS


def said(engine: Engine) -> str:
    return engine.log_path.read_text()


def requests(engine: Engine) -> float:
    return metric(engine.url, "vllm:num_requests_running{") + metric(engine.url, "vllm:num_requests_waiting{")


@pytest.mark.timeout(600)
def test_p_finishes_its_requests_before_it_ends(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", SHAPE)
    prompts = [make_prompt(length, seed, SHAPE.vocabulary) for seed, length in enumerate((1200, 300))]
    with Interrupts() as interrupts, EngineGroup(tmp_path, interrupts, PortAllocator(DRAIN_PORTS)) as group:
        p = group.start(server_spec("prefill", "prefill", model, "--shutdown-timeout", "120"))
        d = group.start(server_spec("decode", "decode", model))
        group.wait_ready([p, d])
        server = int(re.findall(r"APIServer pid=(\d+)", said(p))[0])

        async def run() -> tuple[list[Answer], list[Answer]]:
            async with aiohttp.ClientSession() as session:
                await complete_disaggregated(session, p, d, make_prompt(50, 3, SHAPE.vocabulary), 1)
                right = [await complete(session, d, prompt, 8) for prompt in prompts]
                asked = [asyncio.create_task(complete_disaggregated(session, p, d, prompt, 8)) for prompt in prompts]
                await asyncio.to_thread(until, lambda: requests(p) == len(prompts), "P has them all")
                os.kill(server, signal.SIGTERM)
                await asyncio.to_thread(until, lambda: "draining in-flight requests" in said(p), "it drains")
                with pytest.raises(RequestFailedError):
                    await complete(session, p, prompts[0], 1)
                return right, await asyncio.gather(*asked)

        right, answers = asyncio.run(run())
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in right]
        until(lambda: "Application shutdown complete" in said(p), "P ends")
        assert "KV load of" not in said(d), "no load failed"
