"""Random paged tables: the share of the wire's ceiling that a WRITE of small descriptors reaches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import OUTPUT, write
from bench.bootstrap import ratio_of_medians
from bench.command import console, names, numbers
from bench.forward.cases import POOL_FACTOR, Case
from bench.forward.cells import CaseSamples
from bench.forward.cores import of_this_machine, this_thread_on
from bench.forward.models import BLOCK_TOKENS
from bench.forward.orders import Measure, WrongBytesError
from bench.forward.settings import ForwardSettings, Packing
from bench.forward.sweep import sweep
from bench.markdown import Result, conditions, number_table
from bench.provenance import provenance

LAYERS, MIB = 16, 64
"""Of every table: layers, and MiB of KV."""
LINKS = ("shm", "loopback")
STOCK = "request"
"""The mode in which vLLM's push connector writes: the whole request at once."""
RUNS: Sequence[tuple[str, Packing, Mapping[str, str]]] = (
    ("", "off", {"direct": "chunk", "stock": STOCK}),
    ("", "gather", {"gathered": "chunk"}),
    ("+sgl", "off", {"SGL": "chunk", "stock with SGL": STOCK}),
)
"""Suffix of a link, the setting ``packing``, and the ways with the mode that goes each way."""
PACKAGES = ("layerpush", "nixl", "torch", "numpy")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


def case_of(descriptor_bytes: int) -> Case:
    """A prompt that P computes in one step, with blocks in any order on both sides."""
    tokens = (MIB << 20) // (LAYERS * descriptor_bytes) * BLOCK_TOKENS
    return Case("table", LAYERS, descriptor_bytes, tokens, "random", chunk_tokens=tokens)


def row(cell: CaseSamples, way: str, mode: str) -> dict[str, Any]:
    """Seconds from the last layer being ready until the WRITE has landed, beside one descriptor of as many bytes in the
    same rounds. ``share``: of the ceiling, a ratio of medians.
    """
    series, scale = cell.series[mode], cell.case.bytes / cell.ceiling_bytes
    ceiling = [scale * each for each in cell.ceiling_s]
    return {
        "link": cell.link.removesuffix("+sgl"),
        "descriptor_bytes": cell.case.block_bytes,
        "way": way,
        "descriptors": series.descriptors[0],
        "writes": series.writes[0],
        "share": ratio_of_medians(ceiling, series.exposed_s).as_json("ratio"),
        "ceiling_gb_s": cell.ceiling / 1e9,
        "seconds": series.exposed_s,
        "ceiling_s": ceiling,
    }


@app.command()
def main(
    links: Annotated[str, typer.Option(help="shm: shared memory and CMA; loopback: TCP over lo.")] = ",".join(LINKS),
    kib: Annotated[str, typer.Option(help="KiB of a descriptor: a block of a layer.")] = "1,4,16,64,256,1024",
    rounds: Annotated[int, typer.Option(min=2, help="Samples of each way, and of the ceiling.")] = 6,
    out: Annotated[Path, typer.Option(metavar="FILE", help="All samples as JSON.")] = OUTPUT / "paged.json",
) -> None:
    """Write random paged tables over NIXL: which share of the wire's ceiling is left for descriptors of each size?

    Two processes as in `bench.forward`. The prompt's blocks lie in any order on both sides, so NIXL merges hardly any.
    The ceiling is one WRITE of one descriptor with as many bytes, in the same rounds. Every byte is compared after each
    sample. If one is wrong, the bench writes nothing and the exit status is 1.

    - python -m bench.paged --links loopback --kib 4,64 --rounds 3
    """
    screen, began = console(), time.monotonic()
    try:
        wanted, sizes = names(links, list(LINKS)), [each << 10 for each in numbers(kib, most=1024)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    cases, cores, rows = [case_of(size) for size in sizes], of_this_machine(), list[dict[str, Any]]()
    settings = ForwardSettings(
        cache_bytes=max(case.cache_bytes for case in cases),
        staging_bytes=int(POOL_FACTOR * MIB) << 20,
        layer_s=0.5e-3,
        cores=cores,
    )
    head = provenance(settings.seed, PACKAGES) | {"settings": asdict(settings), "rounds": rounds, "mib": MIB}
    try:
        with this_thread_on(cores.others if cores else ()):
            for suffix, packing, ways in RUNS:
                modes = tuple(ways.values())
                orders = [(link + suffix, Measure(case, modes, rounds)) for link in wanted for case in cases]
                here = ForwardSettings(**{**vars(settings), "packing": packing})
                cells, _ = sweep(screen, orders, here, lambda *_: None)
                rows += [row(cell, way, mode) for cell in cells for way, mode in ways.items()]
    except WrongBytesError as error:
        screen.print(f"{error}: nothing is written", style="red", markup=False)
        raise typer.Exit(1) from error
    result = {**head, "seconds": round(time.monotonic() - began), "rows": rows}
    screen.print(table(result), markup=False)
    write(out, result)


def table(result: Result) -> str:
    """Shares of the ceiling, by link and descriptor; below it the conditions."""
    rows = result["rows"]
    ways = list(dict.fromkeys(each["way"] for each in rows))
    lines = []
    for link, size in dict.fromkeys((each["link"], each["descriptor_bytes"]) for each in rows):
        here = {each["way"]: each for each in rows if (each["link"], each["descriptor_bytes"]) == (link, size)}
        first = here[ways[0]]
        shares = (f"{here[way]['share']['ratio']:.0%}" for way in ways)
        lines.append((link, f"{size >> 10} KiB", f"{first['descriptors']:,}", f"{first['ceiling_gb_s']:.2f}", *shares))
    said = f"Medians of {result['rounds']} tables of {result['mib']} MiB in {LAYERS} layers."
    headings = ("link", "descriptor", "descriptors", "ceiling, GB/s", *ways)
    return f"{number_table(headings, lines)}\n\n{said} {conditions(result)}"


if __name__ == "__main__":
    app()
