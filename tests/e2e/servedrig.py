"""A P and a D as operators start them, by `vllm serve`, and their ``/metrics`` over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.servers.engines import EngineGroup, EngineServer, EngineSpec
from bench.servers.interrupts import Interrupts
from bench.servers.load import complete_disaggregated, make_prompt
from bench.servers.model import write_model
from bench.servers.ports import PortAllocator
from tests.e2e.proxyrig import MODEL, SHAPE, ask_and_leave, get, has_a_request, server_spec, until
from tests.metrics_scrape import Scrape
from tests.support import starts
from tests.support.ports import SERVED_PORTS


class ServeSpec(EngineSpec):
    """An engine of `vllm serve`, which imports vLLM itself: only this command knows ``--api-server-count``."""

    def command(self, port: int) -> list[str]:
        starts.count_start()
        own = {"vllm.entrypoints.openai.api_server": "tests.e2e.apiservers"}
        return [own.get(word, word) for word in super().command(port)]


@dataclass(frozen=True)
class Served:
    prefill: EngineServer
    decode: EngineServer

    def push(self, tokens: int, seed: int, max_tokens: int = 4) -> None:
        """Send one prompt to both at once. Returns when D's answer is there."""
        prompt = make_prompt(tokens, seed, SHAPE.vocabulary)

        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                await complete_disaggregated(session, self.prefill, self.decode, prompt, max_tokens)

        asyncio.run(ask())

    def leave_prefill(self, tokens: int, seed: int) -> None:
        """Send a prompt to P alone. The client leaves while P computes the prompt."""
        prompt = make_prompt(tokens, seed, SHAPE.vocabulary)
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
        ask_and_leave(self.prefill.url, body, lambda: has_a_request(self.prefill.url))


@contextlib.contextmanager
def served(scratch: Path, api_servers: int) -> Iterator[Served]:
    """P with so many API servers, and D, ready until the block ends."""
    model = write_model(scratch / "model", SHAPE)
    with Interrupts() as interrupts, EngineGroup(scratch, interrupts, PortAllocator(SERVED_PORTS)) as group:
        if api_servers == 1:
            spec = server_spec("prefill", "prefill", model)
        else:
            spec = server_spec("prefill", "prefill", model, "--api-server-count", str(api_servers), kind=ServeSpec)
        prefill, decode = group.start(spec), group.start(server_spec("decode", "decode", model))
        group.wait_ready([prefill, decode])
        yield Served(prefill, decode)


def scrape(engine: EngineServer) -> Scrape:
    return Scrape(get(f"{engine.url}/metrics")[1])


def wait_for(engine: EngineServer, name: str, wanted: float, **labels: str) -> None:
    until(lambda: scrape(engine).value(name, **labels) == wanted, f"{name} {labels} is {wanted} on {engine.name}")
