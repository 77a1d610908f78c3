"""``python -m tests.connector.ranks``: what ranks of P with equal KV send, and how long, with stock push and ours."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unittest.mock import patch

import typer

from bench import write
from bench.provenance import provenance
from bench.servers.link import LinkError, check_emulation
from tests.connector.conftest import process_groups
from tests.connector.ranks.topology import Kind, Side, Topology

if TYPE_CHECKING:
    import torch

STOCK = "stock"
WAYS = {STOCK: Side(stock=True), "layer": Side(), "request": Side(layerwise=False)}
"""P and D of stock vLLM, layerpush by layer, layerpush with ``layerwise: false``."""
KINDS: tuple[tuple[Kind, int], ...] = (("mla", 1), ("full", 2))
"""Each kind of attention, with its number of KV heads."""
PAIRS = ((8, 1), (8, 2), (4, 2), (2, 1))
TOKENS, ROUNDS = 500, 3
BURST, LATENCY = "128kb", "400ms"
INSIDE = "LAYERPUSH_RANKS_LINK"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    link: Annotated[str, typer.Option(metavar="RATE", help="Rate of the link, as tc takes it.")] = "40mbit",
    rounds: Annotated[int, typer.Option(min=2, help="Prompts of each pair in each way; the ways take turns.")] = ROUNDS,
    out: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False, help="All samples as JSON.")] = None,
) -> None:
    """Push prompts from more ranks of P than of D over one link that all ranks share.

    Several ranks of P then hold the KV of one rank of D. The engines are those of the connector's tests: vLLM's
    schedulers and connectors, and NIXL, without a model. Stock vLLM refuses some pairs. If a byte of D's KV cache is
    wrong, the bench writes nothing and the exit status is 1. It needs root, for a network namespace with a slow
    loopback; it takes some minutes.

    - python -m tests.connector.ranks --link 40mbit --out build/bench/copies.json
    """
    if os.environ.get(INSIDE) != link:
        with namespace(link) as name:
            inside = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.connector.ranks", *sys.argv[1:]]
            raise typer.Exit(subprocess.run(inside, env=os.environ | {INSIDE: link}, check=False).returncode)
    record = provenance(seed=0)
    with process_groups(), tempfile.TemporaryDirectory() as folder:
        cells = [measure(kind, heads, *pair, rounds, Path(folder)) for kind, heads in KINDS for pair in PAIRS]
    if out is not None:
        write(out, record | {"link": link, "tokens": TOKENS, "rounds": rounds, "cells": cells})


def measure(kind: Kind, heads: int, p: int, d: int, rounds: int, folder: Path) -> dict[str, Any]:
    """One pair in every way. Exits with status 1 if a byte is wrong."""
    from tests.connector.ranks import rig

    computed, landed = [0.0], [0.0]

    class TimedAgent(rig.Agent):
        def _counted(self, handle: Any, state: str) -> str:
            was = self.sent
            state = super()._counted(handle, state)
            if self.sent != was:
                landed[0] = time.perf_counter()
            return state

    class TimedRank(rig.Rank):
        def write(self, name: str, table: list[int], tokens: range, memory: torch.Tensor | None = None) -> None:
            super().write(name, table, tokens, memory)
            if memory is None:  # else for a comparison
                computed[0] = time.perf_counter()

    ways: dict[str, dict[str, list[Any]]] = {way: {"sent": [], "exposed_s": []} for way in WAYS}
    needed = 0
    for turn in range(rounds):
        order = [*WAYS][turn % len(WAYS) :] + [*WAYS][: turn % len(WAYS)]
        for way in order:
            pair = Topology(kind, replace(WAYS[way], tp=p), replace(WAYS[way], tp=d), heads, TOKENS)
            with patch.object(rig, "Agent", TimedAgent), patch.object(rig, "Rank", TimedRank):
                result = rig.run(pair, folder)
            refused = way == STOCK and result.mode == "refused"
            if result.differing or not (refused or result.mode == ("by layer" if way == "layer" else "whole")):
                typer.echo(f"{kind} TP {p} to {d}, {way}: {result.mode} {result.reason} {result.differing}", err=True)
                raise typer.Exit(1)
            if not refused:
                needed = result.needed
                ways[way]["sent"].append(result.sent)
                ways[way]["exposed_s"].append(max(0.0, landed[0] - computed[0]))
    typer.echo(f"{kind} TP {p} to {d}: {', '.join(f'{way} {shown(each)}' for way, each in ways.items())}")
    return {"kind": kind, "heads": heads, "p": p, "d": d, "needed": needed, "ways": ways}


def shown(samples: dict[str, list[Any]]) -> str:
    """The last prompt of a way."""
    if not samples["sent"]:
        return "refused"
    return f"{sum(samples['sent'][-1]) >> 10} KiB exposed {samples['exposed_s'][-1]:.3f} s"


@contextmanager
def namespace(rate: str) -> Iterator[str]:
    """A network namespace whose loopback has this rate, in both directions together. Raises ``LinkError``."""
    check_emulation()
    name = f"layerpush-ranks-{os.getpid()}"
    commands = (
        ("ip", "netns", "add", name),
        ("ip", "-n", name, "link", "set", "lo", "up"),
        (
            "tc",
            "-n",
            name,
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "tbf",
            "rate",
            rate,
            "burst",
            BURST,
            "latency",
            LATENCY,
        ),
    )
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        yield name
    finally:
        subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


if __name__ == "__main__":
    app()
