"""``scripts/soak``: the command line."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench import OUTPUT
from bench.provenance import provenance
from bench.servers.ports import PortAllocator
from tests.e2e.enginespec import EngineSpec
from tests.e2e.models import ModelShelf
from tests.faults.soak.display import Display
from tests.faults.soak.ending import Ending
from tests.faults.soak.engine import Engine, Memory
from tests.faults.soak.engine_slots import EngineSlots
from tests.faults.soak.kinds import KINDS, Kind, UnknownNameError, chosen
from tests.faults.soak.settings import Settings
from tests.faults.soak.soak import NotStartedError, ReferenceLostError, Soak
from tests.faults.soak.specs import LINE_UPS
from tests.faults.soak.tally import Tally
from tests.support.ports import SOAK_PORTS

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="Duration of the load, in minutes.")] = 10.0,
    seed: Annotated[
        int | None, typer.Option(help="Decides all requests and faults and their times. Default: another each time.")
    ] = None,
    faults: Annotated[
        str, typer.Option(metavar="KIND,KIND", help="Only these kinds (see --list); `none` for plain load.")
    ] = "",
    line_ups: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="Engines, in turn (see --list); `all` for all, in equal shares."),
    ] = "plain",
    list_choices: Annotated[
        bool, typer.Option("--list", help="Show the kinds of fault and the line-ups, and do nothing else.")
    ] = False,
    corrupt: Annotated[
        bool,
        typer.Option("--corrupt", help="Negative control: every P writes one layer wrong. Must exit with status 1."),
    ] = False,
    engines: Annotated[
        int, typer.Option(min=1, max=2, help="Prefill engines, and as many decode engines; each needs about 1 GiB.")
    ] = 2,
    in_flight: Annotated[
        int, typer.Option(min=1, help="Requests on their way at the same time, beside those that wait for a deadline.")
    ] = 8,
    round_seconds: Annotated[float, typer.Option(min=5.0, help="Load between two audits.")] = 45.0,
    out: Annotated[
        Path,
        typer.Option("--json", metavar="FILE", help="File for the figures.", show_default="build/bench/soak.json"),
    ] = OUTPUT / "soak.json",
    logs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the engines' logs. Default: a new directory under /tmp."),
    ] = None,
) -> None:
    """Real prefill and decode engines under load while everything goes wrong; every answer is checked.

    A router sends prompts of many lengths, with shared prefixes, to one of two prefill engines (P) and one of two
    decode engines (D): to both at once, or to one first. Meanwhile faults strike: clients disconnect, engines are
    killed, stopped and restarted, P preempts, WRITEs fail, messages get lost or come twice, strangers send garbage.

    The time is cut into rounds. After the load of a round everything must end within its deadline, and each idle
    engine is audited: all blocks free, no table entry of an ended request, no open transfer handle, no new threads.

    * Tokens of **every** answered request are compared with those of a plain engine.

    * The KV of **every** push that D accepted is compared with P's, block by block, layer by layer.

    Exit status: 0 when nothing was wrong; 1 for any mismatch, leak, hang or engine that died by itself; 2 when the
    engines did not start; 130 when it was interrupted and nothing was wrong until then. Ctrl-C ends the load, waits for
    calm and reports; a second one reports at once.

    Examples: `make soak MINUTES=10`; `scripts/soak --minutes 2 --faults kill-p,stop-d --seed 7`;
    `scripts/soak --minutes 120 --line-ups all`.
    """
    console = Console(soft_wrap=True)
    if list_choices:
        console.print(_kinds_table(), _line_ups_table())
        return
    try:
        kinds = () if faults == "none" else chosen(_names(faults), KINDS, "fault kind")
    except UnknownNameError as error:
        raise typer.BadParameter(str(error), param_hint="--faults") from error
    try:
        turns = LINE_UPS if line_ups == "all" else chosen(_names(line_ups), LINE_UPS, "line-up")
    except UnknownNameError as error:
        raise typer.BadParameter(str(error), param_hint="--line-ups") from error
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    folder = logs or Path(tempfile.mkdtemp(prefix="layerpush-soak-"))
    settings = Settings(minutes, seed, kinds, engines, in_flight, round_seconds, corrupt, turns)
    ending = _run(console, settings, folder.resolve())
    ending.write(out)
    ending.show(console, out)
    raise typer.Exit(ending.exit_status)


def _names(option: str) -> list[str]:
    return [name.strip() for name in option.split(",") if name.strip()]


def _run(console: Console, settings: Settings, folder: Path) -> Ending:
    began, about = time.monotonic(), provenance(settings.seed)
    tally = Tally()
    models = ModelShelf(folder)
    take_port = PortAllocator(SOAK_PORTS).next_free
    memories: dict[str, list[Memory]] = {}
    console.print(f"Seed {settings.seed}. {settings.minutes:g} min. Logs: {folder}", highlight=False)
    for line_up, turn in settings.turns():
        tally.begin_turn(line_up.name, reads_kv=line_up.reads_kv)
        specs = line_up.specs(turn.engines, corrupt=turn.corrupt)
        console.print(
            f"{line_up.name}: {line_up.meaning}. {turn.minutes:.3g} min, {len(turn.kinds)} kinds of fault, engines "
            f"{', '.join(spec.name for spec in specs)}.",
            highlight=False,
        )
        makers = {spec.name: partial(_make, spec, models.path(spec.model)) for spec in specs}
        slots = EngineSlots(makers, folder / line_up.name, take_port)
        broken = False
        with Display(console, slots, tally, 60 * turn.minutes) as display:
            run = Soak(turn, slots, tally, display.update)
            _stop_on_signals(run, console)
            try:
                run.start()
                run.run()
            except (NotStartedError, ReferenceLostError) as error:
                broken = True
                console.print(str(error), style="red", markup=False, highlight=False)
            finally:
                slots.close()
        memories |= {f"{line_up.name} {slot.name}": slots.memories(slot.name) for slot in slots}
        if broken or run.stopped:
            break
    return Ending(settings, tally, memories, folder, time.monotonic() - began, about, broken, run.stopped)


def _make(spec: EngineSpec, model: Path, engine_id: str, port: int, folder: Path) -> Engine:
    return Engine(spec, engine_id, port, model, folder)


def _stop_on_signals(run: Soak, console: Console) -> None:
    def stop(_signum: int, _frame: FrameType | None) -> None:
        run.stop()
        console.print("[yellow]Ending the load; once more to report at once.[/]")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def _kinds_table() -> Table:
    table = Table("kind", "strikes", "effect", title="Kinds of fault")
    for kind in KINDS:
        table.add_row(kind.name, _target(kind), kind.meaning)
    return table


def _line_ups_table() -> Table:
    table = Table("line-up", "engines", title="Line-ups")
    for line_up in LINE_UPS:
        table.add_row(line_up.name, line_up.meaning)
    return table


def _target(kind: Kind) -> str:
    return kind.place if kind.side is None else f"{kind.place} ({kind.side})"
