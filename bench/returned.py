"""The turns of a conversation: the tokens that P computes, and the time to the first token."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console

from bench import OUTPUT, returnedpage
from bench.command import console, publish, running
from bench.demo.cluster import BLOCK_SIZE, TOKENS_PER_STEP
from bench.provenance import provenance
from bench.returnedpage import ANOTHER, AUTO, ONE, PULL, RETURNS, SAME
from bench.serve.engine_options import LONG_SHAPE, ROOM_TOKENS, folder
from bench.serve.lineup import STOCK
from bench.serve.scrape import Meter
from bench.servers.engines import EngineGroup, EngineServer, EngineSpec, Role
from bench.servers.load import complete_whole, make_prompt, to_decode
from bench.servers.model import write_model
from layerpush.core.config import CONNECTOR_NAME
from layerpush.core.prefill_identity import TO_PREFILL

SHAPE = replace(LONG_SHAPE, layers=2)
SEED = 0
CONVERSATIONS_OF_ROOM = 3
WARM_TOKENS, WARM_ANSWER = 256, 96
FIRST_TOKEN, COMPUTED = "vllm:time_to_first_token_seconds", "vllm:prompt_tokens_by_source"
CACHES = ("--enable-prefix-caching",)
KEEPS_TURNS = {"bidirectional_kv_xfer": True}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
Params = Mapping[str, object]
Pair = tuple[EngineServer | None, EngineServer]
"""P, or None, and the engine that answers."""


@dataclass
class TurnSample:
    """A turn of ``prompt_tokens``. ``computed``: the tokens that P computes, or the one engine. ``p``: see the page."""

    mode: str
    p: str
    round: int
    turn: int
    prompt_tokens: int
    computed: int
    first_token_s: float


@dataclass
class Bench:
    """``first`` tokens in the first prompt, ``new`` tokens of the user in each later one, ``answer`` in each answer."""

    first: int
    new: int
    answer: int
    turns: int
    group: EngineGroup
    out: Console
    model: Path
    samples: list[TurnSample] = field(default_factory=list)
    wrong: int = 0

    def spec(self, name: str, role: Role, mode: str, *, caches: bool = True) -> EngineSpec:
        length = self.first + (self.turns - 1) * self.new + self.turns * self.answer + ROOM_TOKENS
        length = -(-length // BLOCK_SIZE) * BLOCK_SIZE
        return EngineSpec(
            name,
            role,
            self.model,
            STOCK[PULL] if mode == PULL else CONNECTOR_NAME,
            extra_config={} if mode == AUTO else KEEPS_TURNS,
            tokens_per_step=TOKENS_PER_STEP,
            max_model_len=length,
            kv_cache_bytes=CONVERSATIONS_OF_ROOM * length * SHAPE.kv_bytes_per_token,
            block_size=BLOCK_SIZE,
            options=CACHES if caches else (),
        )

    def start(self, mode: str, p: str) -> Pair:
        """Engines without a cached token."""
        number = len(self.samples)
        specs = [self.spec(f"one-{number}", "plain", mode)]
        if mode != ONE:
            prefill = self.spec(f"prefill-{number}", "prefill", mode, caches=p == SAME)
            specs = [prefill, self.spec(f"decode-{number}", "decode", mode)]
        engines = [self.group.start(spec) for spec in specs]
        self.group.wait_ready(engines)
        return (None if mode == ONE else engines[0]), engines[-1]

    async def measure(self, rounds: int) -> None:
        """Each round has a conversation of its own, in all modes in turn. One engine leads it."""
        others = list(product((PULL, AUTO, RETURNS), (SAME, ANOTHER)))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as self.session:
            for number in range(rounds):
                users = [
                    make_prompt(self.new if turn else self.first, SEED + number * self.turns + turn, SHAPE.vocabulary)
                    for turn in range(self.turns)
                ]
                right: list[tuple[int, ...]] = []
                for mode, p in [(ONE, SAME), *others[:: 1 if number % 2 else -1]]:
                    pair = self.start(mode, p)
                    warm = [make_prompt(WARM_TOKENS, -turn, SHAPE.vocabulary) for turn in (1, 2)]
                    await self.talk(pair, mode, warm, WARM_ANSWER, [])
                    for turn, sample in enumerate(await self.talk(pair, mode, users, self.answer, right)):
                        self.samples.append(TurnSample(mode, p, number, turn, *sample))
                    self.group.stop([each for each in pair if each is not None])
                    said = ", ".join(
                        f"{each.computed:,} in {each.first_token_s:.2f} s" for each in self.samples[-self.turns :]
                    )
                    self.out.print(f"{mode}, {p}: {said}")

    async def talk(
        self, pair: Pair, mode: str, users: Sequence[Sequence[int]], length: int, right: list[tuple[int, ...]]
    ) -> list[tuple[int, int, float]]:
        """A conversation whose answers are ``right``; the first one fills them in. Of each turn: the tokens of the
        prompt, those that were computed, and the seconds to the first token.
        """
        found: list[tuple[int, int, float]] = []
        text: list[int] = []
        before: Params = TO_PREFILL
        for turn, user in enumerate(users):
            text += user
            tokens = Meter((pair[0] or pair[1]).url, COMPUTED)
            first = Meter(pair[1].url, FIRST_TOKEN)
            answer, params, waited_s = await self.take_turn(pair, mode, text, length, before)
            if len(right) == turn:
                right.append(answer)
            self.wrong += answer != right[turn]
            computed = tokens.since(len(text))["local_compute"]
            found.append((len(text), round(computed), waited_s + first.since(1)["sum"]))
            before = params if params is not None and mode in (PULL, RETURNS) else TO_PREFILL
            text = [*text, *right[turn]]
        return found

    async def take_turn(
        self, pair: Pair, mode: str, prompt: Sequence[int], length: int, before: Params
    ) -> tuple[tuple[int, ...], Params | None, float]:
        """The answer, its ``kv_transfer_params``, and the seconds until the answering engine got the request."""
        (p, d), request_id = pair, uuid.uuid4().hex
        ask = partial(complete_whole, self.session, request_id=request_id)
        if p is None:
            return *await ask(d, prompt, length), 0.0
        prefilling = ask(p, prompt, 1, kv_transfer_params=before)
        if mode == PULL:
            began = time.perf_counter()
            _, to_d = await prefilling
            waited_s = time.perf_counter() - began
            return *await ask(d, prompt, length, kv_transfer_params=to_d), waited_s
        answer, _ = await asyncio.gather(
            ask(d, prompt, length, kv_transfer_params=to_decode(p, request_id)), prefilling
        )
        return *answer, 0.0


@app.command()
def main(
    first: Annotated[int, typer.Option(min=BLOCK_SIZE, help="Tokens of the first prompt.")] = 4096,
    longest: Annotated[int, typer.Option(help="Tokens of the last prompt.")] = 16384,
    turns: Annotated[int, typer.Option(min=2, help="Turns of a conversation.")] = 5,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Conversations.")] = 3,
    out: Annotated[Path, typer.Option(metavar="FILE", help="All samples as JSON.")] = OUTPUT / "returned.json",
    keep_logs: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep logs in DIR.")] = None,
) -> None:
    """The turns of a conversation: how many tokens does P compute, and how soon is the first token there?

    One engine with a prefix cache; P and D with vLLM's pull connector and `bidirectional_kv_xfer`; layerpush without it
    and with it. P is the same in each turn, with a prefix cache; or it is as another one: it has none. The bench
    compares all answers with those of the one engine. If one differs, it writes nothing.

    - python -m bench.returned --first 512 --longest 1280 --turns 3 --answer 64 --rounds 1
    """
    began, where, about = time.monotonic(), console(), provenance(SEED)
    new = (longest - first) // (turns - 1) - answer
    if new < 1:
        raise typer.BadParameter("the turns have more tokens than the last prompt", param_hint="--longest")
    with running(where, keep_logs) as (work, interrupts), EngineGroup(work, interrupts, forks=True) as group:
        bench = Bench(first, new, answer, turns, group, where, write_model(folder("returned"), SHAPE))
        asyncio.run(bench.measure(rounds))
    result: dict[str, Any] = {
        **about,
        "seconds": round(time.monotonic() - began),
        "settings": {"first": first, "new": new, "answer": answer, "turns": turns, "rounds": rounds,
                     "step_tokens": TOKENS_PER_STEP},
        "model": {**asdict(SHAPE), "kv_bytes_per_token": SHAPE.kv_bytes_per_token},
        "wrong": bench.wrong,
        "samples": [asdict(sample) for sample in bench.samples],
    }  # fmt: skip
    publish(where, out, result, returnedpage.tables)


if __name__ == "__main__":
    app()
