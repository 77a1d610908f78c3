"""The tables of docs/fleet.md, from the JSON of ``python -m bench.fleet``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.fleet.arrivals import RECORDED, TRACES, generated
from bench.fleet.presets import MODELS
from bench.fleet.studies import chosen
from bench.markdown import Result, conditions, number_table

Cell = Mapping[str, Any]
SIDES = ("engines", "simulated")


def load_table(result: Result) -> str:
    """Every mode against load and oversubscription."""
    headings = ("oversubscription", "load", "mode", "exposed p50", "p99", "TTFT p50", "p99", "WRITEs a push")
    rows = [
        (
            f"{cell['plan']['oversubscription']:g}",
            f"{cell['plan']['load']:g}",
            f"`{cell['plan']['mode']}`",
            *_times(cell),
            _writes(cell),
        )
        for cell in result["studies"]["load"]
    ]
    return f"{number_table(headings, rows, 3)}\n\n{_about(result)}"


def arrivals_table() -> str:
    """The traces beside an hour of the generator's requests."""
    rows = []
    for name, trace in TRACES.items():
        pairs = zip(RECORDED[name], generated(name), strict=True)
        _, prompt, longest, answer, shared, bursts = pairs
        lengths = (f"{count:,.0f}" for pair in (prompt, longest, answer) for count in pair)
        rows.append((trace.about, *lengths, *(f"{part:.0%}" for part in shared), *(f"{each:.1f}" for each in bursts)))
    whats = ("prompt, mean", "p95", "answer, mean", "of an earlier prompt", "bursts")
    headings = ("tokens", *(each for what in whats for each in (f"{what}: recorded", "generated")))
    return number_table(headings, rows)


def incast_table(result: Result) -> str:
    """Several P into one D."""
    cells = result["studies"]["incast"]
    modes = list(dict.fromkeys(cell["plan"]["mode"] for cell in cells))
    whats = ("exposed p50", "p99", "WRITEs a push")
    headings = ("P", "use of D's card", *(f"`{mode}`: {what}" for mode in modes for what in whats))
    rows = []
    for prefill in dict.fromkeys(cell["plan"]["prefill"] for cell in cells):
        here = chosen(cells, prefill=prefill)
        figures = (each for cell in here for each in (*_times(cell)[:2], _writes(cell)))
        rows.append((str(prefill), _card_use(here[0]), *figures))
    return number_table(headings, rows, 0)


def ratio_table(result: Result) -> str:
    """Several P and one D, for each trace."""
    headings = ("trace", "P for one D", "requests a second", "use of D's card", "exposed p50", "p99", "TTFT p50", "p99")
    rows = [
        (
            TRACES[cell["plan"]["trace"]].about,
            str(cell["plan"]["prefill"]),
            f"{cell['requests'] / cell['plan']['seconds']:.1f}",
            _card_use(cell),
            *_times(cell),
        )
        for cell in result["studies"]["ratio"]
    ]
    return number_table(headings, rows)


def scale_table(result: Result) -> str:
    """The costs of 10, 100 and 1,000 engines, and of the restart of all."""
    cells = result["studies"]["scale"]
    return number_table(_engines(cells), [(what, *map(show, cells)) for what, show in COSTS.items()])


def deaths_table(result: Result) -> str:
    """The costs of 10, 100 and 1,000 engines of which a tenth die one by one."""
    cells = result["studies"]["deaths"]
    return number_table(_engines(cells), [(what, *map(show, cells)) for what, show in OF_DEATHS.items()])


def validation_table(result: Result) -> str:
    """Real engines beside the simulation, with the ratio of simulated to real."""
    headings: tuple[str, ...] = ("requests", "mode")
    for what in ("exposed", "TTFT"):
        headings += (f"{what} p50: engines", "simulated", "p90: engines", "simulated")
    rows = []
    for cell in sorted(result["cells"], key=lambda each: each["requests"], reverse=True):
        times = []
        for what in ("exposed_s", "ttft_s"):
            for share in (50, 90):
                real, simulated = (1e3 * float(np.percentile(cell[side][what], share)) for side in SIDES)
                times += [f"{real:.1f} ms", f"{simulated:.1f} ms ({simulated / real:.2f})"]
        rows.append((cell["requests"], f"`{cell['mode']}`", *times))
    said = f"{result['settings']['requests']} requests in each mode, at a load of {result['settings']['load']:g}."
    busy = f"Of the two cores {result['busy_cores'] / 2:.0%} were busy."
    speeds = {"single requests": result["measured"]}
    speeds |= {f"`{cell['mode']}` under load": cell for cell in result["cells"] if "token_s" in cell}
    shown = [
        f"{', '.join(show(at[name]) for name, show in SPEEDS.items() if name in at)} ({who})"
        for who, at in speeds.items()
    ]
    busy += f" A token of P's steps, a gap between two steps, the link: {'; '.join(shown)}."
    return f"{number_table(headings, rows, 2)}\n\n{said} {busy} {conditions(result, result['settings']['rate'])}"


SPEEDS: Mapping[str, Callable[[Any], str]] = {
    "token_s": lambda times: f"{1e3 * float(np.mean(times)):.2f} ms",
    "step_gap_s": lambda time: f"{1e3 * time:.0f} ms",
    "link": lambda speed: f"{speed / 1e6:.1f} MB/s",
}


def _engines(cells: Sequence[Cell]) -> tuple[str, ...]:
    return ("", *(f"{cell['plan']['prefill'] + cell['plan']['decode']:,} engines" for cell in cells))


def _steady(name: str, digits: int = 0) -> Callable[[Cell], str]:
    return lambda cell: f"{cell['costs'][0][name]:,.{digits}f}"


def _kinds(*kinds: str) -> Callable[[Cell], str]:
    return lambda cell: f"{sum(cell['costs'][0]['messages_per_s'].get(kind, 0.0) for kind in kinds):,.1f}"


def _restarted(name: str) -> Callable[[Cell], str]:
    return lambda cell: f"{cell['costs'][1][name]:,}"


def _each(cell: Cell) -> str:
    sent = sum(cell["costs"][0]["messages_per_s"].values())
    return f"{sent / (cell['plan']['prefill'] + cell['plan']['decode']):.2f}"


COSTS: Mapping[str, Callable[[Cell], str]] = {
    "requests": lambda cell: f"{cell['requests']:,}",
    "messages a second": lambda cell: f"{sum(cell['costs'][0]['messages_per_s'].values()):,.0f}",
    "of an engine": _each,
    "of these registrations": _kinds("Registration"),
    "of these pings and pongs": _kinds("Ping", "Pong"),
    "bytes of messages a second": _steady("message_bytes_per_s"),
    "handshakes in 10 s": _steady("handshakes"),
    "connections of an engine, at most": _steady("most_peers"),
    "bytes of an engine's table of peers, at most": _steady("most_peer_bytes"),
    "WRITEs in 10 s": _steady("writes"),
    "after the restart: handshakes in 14 s": _restarted("handshakes"),
    "of an engine at once, at most": _restarted("most_handshakes_of_an_engine"),
    "seconds of a handshake, p99": lambda cell: f"{cell['costs'][1]['handshake_s']['p99']:.3f}",
    "probes": _restarted("probes"),
    "requests that failed for good": lambda cell: str(cell["failed"]),
}


OF_DEATHS: Mapping[str, Callable[[Cell], str]] = {
    "requests": COSTS["requests"],
    "engines that die": lambda cell: f"{cell['plan']['deaths']:,}",
    "pushes that fail": lambda cell: f"{cell['pushes'].get('failed', 0):,}",
    "requests that failed for good": COSTS["requests that failed for good"],
    "TTFT p50": lambda cell: f"{cell['ttft_s']['p50']:.2f} s",
    "p99": lambda cell: f"{cell['ttft_s']['p99']:.2f} s",
    "probes in 24 s": _steady("probes"),
    "handshakes in 24 s": _steady("handshakes"),
    "of an engine at once, at most": _steady("most_handshakes_of_an_engine"),
    "pings and pongs a second": COSTS["of these pings and pongs"],
}


def _card_use(cell: Cell) -> str:
    return f"{cell['costs'][0]['most_card_use_of_d']:.0%}"


def _writes(cell: Cell) -> str:
    return f"{sum(part['writes'] for part in cell['costs']) / cell['requests']:.1f}"


def _times(cell: Cell) -> tuple[str, ...]:
    exposed, ttft = cell["exposed_s"], cell["ttft_s"]
    return (*(f"{1e3 * exposed[share]:.1f} ms" for share in exposed), *(f"{ttft[share]:.2f} s" for share in ttft))


def _about(result: Result) -> str:
    models = {cell["plan"]["model"] for cells in result["studies"].values() for cell in cells}
    about = ", ".join(MODELS[name].about for name in sorted(models))
    return f"Simulated {result['date'][:10]}: {about}; seed {result['seed']}."
