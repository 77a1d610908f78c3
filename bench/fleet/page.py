"""The tables of docs/fleet.md, from the JSON of ``python -m bench.fleet``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.fleet.arrivals import TRACES
from bench.fleet.presets import MODELS
from bench.fleet.studies import chosen
from bench.markdown import Result, number_table

Cell = Mapping[str, Any]


def load_table(result: Result) -> str:
    """Every mode against load and oversubscription."""
    headings = ("oversubscription", "load", "mode", "exposed p50", "p99", "TTFT p50", "p99", "WRITEs a push")
    rows = [
        (
            f"{cell['plan']['oversubscription']:g}",
            f"{cell['plan']['load']:g}",
            f"`{cell['plan']['mode']}`",
            *_times(cell),
            f"{sum(part['writes'] for part in cell['costs']) / cell['requests']:.1f}",
        )
        for cell in result["studies"]["load"]
    ]
    return f"{number_table(headings, rows, 3)}\n\n{_about(result)}"


def incast_table(result: Result) -> str:
    """Several P into one D."""
    cells = result["studies"]["incast"]
    modes = list(dict.fromkeys(cell["plan"]["mode"] for cell in cells))
    headings = ("P", "use of D's card", *(f"`{mode}`: exposed {share}" for mode in modes for share in ("p50", "p99")))
    rows = []
    for prefill in dict.fromkeys(cell["plan"]["prefill"] for cell in cells):
        here = chosen(cells, prefill=prefill)
        rows.append((str(prefill), _card_use(here[0]), *(time for cell in here for time in _times(cell)[:2])))
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
    headings = ("", *(f"{cell['plan']['prefill'] + cell['plan']['decode']:,} engines" for cell in cells))
    rows = [(what, *(show(cell) for cell in cells)) for what, show in COSTS.items()]
    return number_table(headings, rows)


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


def _card_use(cell: Cell) -> str:
    return f"{cell['costs'][0]['most_card_use_of_d']:.0%}"


def _times(cell: Cell) -> tuple[str, ...]:
    exposed, ttft = cell["exposed_s"], cell["ttft_s"]
    return (*(f"{1e3 * exposed[share]:.1f} ms" for share in exposed), *(f"{ttft[share]:.2f} s" for share in ttft))


def _about(result: Result) -> str:
    models = {cell["plan"]["model"] for cells in result["studies"].values() for cell in cells}
    about = ", ".join(MODELS[name].about for name in sorted(models))
    return f"Simulated {result['date'][:10]}: {about}; seed {result['seed']}."
