"""``python -m bench.fleet``: a fleet of simulated engines with the real pushes, loads and messages."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import OUTPUT, write
from bench.command import console, names
from bench.fleet.arrivals import TRACES
from bench.fleet.fleet import Plan
from bench.fleet.presets import MODELS
from bench.fleet.studies import STUDIES, simulate
from bench.provenance import provenance
from layerpush.core.push_mode import PushMode

ROUTERS = ("least_loaded", "round_robin", "sticky")
MODES = [mode.value for mode in PushMode]
GBIT = 1e9 / 8

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def main(
    studies: Annotated[
        str | None,
        typer.Option(help="; ".join(f"{name}: {study.__doc__}" for name, study in STUDIES.items()) + " Default: none."),
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill engines.")] = Plan.prefill,
    decode: Annotated[int, typer.Option(min=1, help="Decode engines.")] = Plan.decode,
    model: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {each.about}" for name, each in MODELS.items()) + ".")
    ] = Plan.model,
    trace: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {each.about}" for name, each in TRACES.items()) + ".")
    ] = Plan.trace,
    mode: Annotated[str, typer.Option(help="The granularity: " + ", ".join(MODES) + ".")] = Plan.mode.value,
    load: Annotated[float, typer.Option(min=0.01, help="Share of P's time for prefill.")] = Plan.load,
    seconds: Annotated[float, typer.Option(min=1, help="Simulated seconds in which requests come.")] = Plan.seconds,
    warm_up: Annotated[float, typer.Option(help="Requests of the first seconds that do not count.")] = Plan.warm_up,
    gbit: Annotated[float, typer.Option(min=0.1, help="Gbit/s of each engine's card.")] = Plan.card / GBIT,
    oversubscription: Annotated[
        float, typer.Option(min=1, help="Bandwidth of a rack's cards over that of its uplink.")
    ] = Plan.oversubscription,
    router: Annotated[
        str, typer.Option(help=", ".join(ROUTERS) + ": the last sends a conversation to the same engines.")
    ] = Plan.router,
    answer: Annotated[int | None, typer.Option(min=1, help="Tokens of each answer. Default: the trace's.")] = None,
    deaths: Annotated[int, typer.Option(min=0, help="Engines that die and are restarted.")] = Plan.deaths,
    restart_at: Annotated[float | None, typer.Option(help="Second at which all engines are restarted.")] = None,
    seed: Annotated[int, typer.Option(help="Draws arrivals, lengths, deaths and the router's ties.")] = Plan.seed,
    out: Annotated[Path, typer.Option(metavar="FILE", help="All figures as JSON.")] = OUTPUT / "fleet.json",
) -> None:
    """Simulate a fleet of prefill and decode engines on one clock.

    Sessions, claims, loads, the schedule, the estimates of links, liveness, handshakes and messages are the product's.
    Simulated are vLLM's schedulers, the computation, the network and the clients. Every run checks rules, such as: no
    block is used before its bytes have landed, and every wait ends. If one is broken, the exit status is 1.

    Without `--studies`, the options describe one fleet. With it, they are the studies' own, but for `--seed`.

    - python -m bench.fleet --prefill 8 --decode 1 --mode layer

    - python -m bench.fleet --prefill 50 --decode 50 --seconds 30 --deaths 20

    - python -m bench.fleet --studies load,incast,ratio,scale,deaths
    """
    try:
        wanted = [] if studies is None else names(studies, list(STUDIES))
        for value, known in ((model, MODELS), (trace, TRACES), (mode, MODES), (router, ROUTERS)):
            names(value, list(known))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    given: dict[str, Any] = {**locals(), "card": gbit * GBIT, "mode": PushMode(mode)}
    plan = Plan(**{field.name: given[field.name] for field in fields(Plan) if field.name in given})
    plans = [(name, each) for name in wanted for each in STUDIES[name](seed)] or [("fleet", plan)]
    about = provenance(seed, ("layerpush", "numpy"))
    logging.getLogger("vllm.layerpush").propagate = False  # deaths are meant
    cells: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (name, _), cell in zip(plans, pool.map(simulate, [each for _, each in plans]), strict=True):
            cells.setdefault(name, []).append(cell)
            console().print(_line(name, cell))
    write(out, {**about, "studies": cells})


def _line(name: str, cell: dict[str, Any]) -> str:
    plan = cell["plan"]
    shown = " ".join(f"{key} {plan[key]:g}" for key in ("prefill", "decode", "load", "oversubscription"))
    times = " ".join(
        f"{share} {1e3 * cell[what][share]:.1f}"
        for what in ("ttft_s", "exposed_s")
        for share in ("p50", "p99")
        if cell[what][share] is not None
    )
    return f"{name}: {shown} {plan['trace']} {plan['mode']}: {cell['requests']} requests, TTFT, exposed ms {times}"


if __name__ == "__main__":
    app()
