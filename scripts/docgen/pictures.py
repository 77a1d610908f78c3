"""Pictures of the documentation: results of the demo and of benchmarks, and an estimate."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.figures import completed_times
from bench.fleet.studies import chosen
from bench.forward.growth import COUNTED, Line
from bench.keptpage import KEPT, NOTHING
from bench.markdown import Result
from bench.returnedpage import ANOTHER, AUTO, ONE, PULL, RETURNS, SAME, prompts, series
from bench.serve.plan import AGGREGATED, TOKEN
from layerpush.apps.tracing.picture import COMPUTE_COLOURS, EXPOSED_COLOUR, WRITE_COLOUR, draw_push
from layerpush.telemetry.trace_records import PushRecord
from scripts.docgen import estimates

ROOT = Path(__file__).parents[2]
HASH_SALT = "layerpush"
PANEL_INCHES = (5.2, 3.9)
LOW = (5.2, 2.4)
TIMES = {"exposed_s": "exposed", "ttft_s": "TTFT"}
COLOURS = {"auto": "#b0127b", "layer": "#d9541e", "chunk": "#f2b134", "request": "#4c9fd4", "token": "#b0127b"}
MARKERS = "os^vD"
AS_INSTALLED = "as installed"
BARS = 0.76
"""The width of all bars of one place."""
DIGITS = 6
"""Digits of a slope after the point: a sum of floating-point numbers that should be 0 is shown as 0."""
TIMELINES = {"auto": "layerpush", "request": "the same prompt, written after prefill"}
TIMELINE_LEGEND = {
    "P computes": COMPUTE_COLOURS[1],
    "KV on its way to D": WRITE_COLOUR,
    "left after prefill": EXPOSED_COLOUR,
}
WAYS = {
    "direct": ("auto", "o-"),
    "SGL": ("auto", "o--"),
    "gathered": ("chunk", "s-"),
    "stock": ("request", "^-"),
    "stock with SGL": ("request", "^--"),
}
"""Of a paged table: the colour of which mode, and the line."""
GROWN = ("WRITEs", "writer's processor time", "exposed")


def timeline(path: Path) -> None:
    """The end of a push in the demo, by layer and whole: of each mode the one with the median exposed time."""
    from matplotlib.patches import Patch

    samples = _result("demo.json")["samples"]
    with _figure(len(TIMELINES), 1, path, "The end of a prompt on P: 16 layers, 2,048 tokens", LOW) as grid:
        for mode, what in TIMELINES.items():
            panel = grid[list(TIMELINES).index(mode)][0]
            ordered = sorted(samples[mode], key=lambda each: float(each["figures"]["exposed_ms"]))
            push = msgspec.convert(ordered[(len(ordered) - 1) // 2]["push"], PushRecord)
            _, ready, landed = completed_times(push)
            draw_push(panel, push, zero=ready)
            panel.set_title(f"{what}: {1e3 * (landed - ready):.0f} ms left", loc="left", fontsize="medium")
            panel.set_xlim(-105, 62)
        panel.set_xlabel("milliseconds since P had computed the last layer")
        patches = [Patch(color=colour, label=label) for label, colour in TIMELINE_LEGEND.items()]
        panel.figure.legend(handles=patches, loc="outside lower left", ncols=3, fontsize="small")


def exposed(path: Path) -> None:
    """Exposed time by prompt length: a line for each model, of a whole push and of ``auto``."""
    cells = _result("long.json")["cells"]
    with _figure(1, 1, path, "Left of the transfer after prefill, two models") as ((panel,),):
        for model, marker in zip(dict.fromkeys(cell["model"] for cell in cells), MARKERS, strict=False):
            here = [cell for cell in cells if cell["model"] == model]
            for mode in ("request", "auto"):
                heights = [1e3 * cell["modes"][mode]["exposed_s_median"] for cell in here]
                lengths = [cell["tokens"] for cell in here]
                panel.plot(
                    lengths,
                    heights,
                    f"{marker}-",
                    color=COLOURS[mode],
                    label=None if marker != MARKERS[0] else mode,
                    ms=4,
                    lw=1.2,
                )
        panel.set(xlabel="prompt tokens", ylabel="milliseconds", xscale="log", yscale="log")
        _plain_axis(panel, sorted({cell["tokens"] for cell in cells}))
        _finish(panel)


def first_tokens(path: Path) -> None:
    """Time to first token of each mode over that of one engine, for the longest prompts: a panel for each link."""
    cells = _longest("token-serve.json")
    with _figure(len(cells), 1, path, "First token, in times of one engine's", LOW) as grid:
        for (panel,), cell in zip(grid, cells, strict=True):
            modes = [mode for mode in cell["modes"] if mode != AGGREGATED]
            _ratios(panel, cell, "ttft_ms", modes)
            for place, mode in enumerate(modes):
                seconds = cell["modes"][mode]["ttft_ms"]["p50"] / 1e3
                panel.annotate(
                    f"{seconds:.2f} s", (0.99, place), xycoords=("axes fraction", "data"), ha="right", va="center"
                )
            where = f"{cell['link']}, {cell['prompt_tokens']:,} tokens; one engine: "
            one = cell["modes"][AGGREGATED]["ttft_ms"]["p50"] / 1e3
            panel.set_title(f"{where}{one:.2f} s", loc="left", fontsize="medium")
        ratios = [cell["ratios"]["ttft_ms"][f"{mode}/{AGGREGATED}"] for cell in cells for mode in modes]
        for (panel,) in grid:
            panel.set_xlim(min(each["low"] for each in ratios) - 0.05, max(each["high"] for each in ratios) + 0.2)


def by_link_use(path: Path) -> None:
    """WRITEs of a push and its exposed time, against link use: a line for each mode, blocks in random order."""
    cells = sorted((c for c in _result("links.json")["cells"] if c["ids"] == "random"), key=lambda cell: cell["load"])
    with _figure(2, 1, path, "By link use: transfer over computation", LOW) as ((writes,), (left,)):
        for mode in ("auto", "layer", "chunk", "request"):
            shown = [cell["modes"][mode] for cell in cells]
            loads = [cell["load"] for cell in cells]
            heights = [float(np.median(one["raw"]["writes"])) for one in shown]
            writes.plot(loads, heights, "o-", color=COLOURS[mode], label=mode, ms=4, lw=1.4)
            exposed = [1e3 * one["exposed_s_median"] for one in shown]
            left.plot(loads, exposed, "o-", color=COLOURS[mode], label=mode, ms=4, lw=1.4)
        writes.set(ylabel="WRITEs of a push", xscale="log", yscale="log")
        left.set(xlabel="link use", ylabel="exposed, milliseconds", xscale="log", yscale="log")
        for panel in (writes, left):
            _plain_axis(panel, (0.1, 0.2, 0.5, 1, 2, 3.5))
            panel.axvline(1, color="grey", lw=0.8, ls=":")
            _finish(panel)


def price(path: Path) -> None:
    """Prefill of each mode over that of one engine, and a forward with a push over one without, by link use."""
    engines = _longest("token-serve.json")
    gpu = max(_result("gpu-serve.json")["cells"], key=lambda cell: int(cell["prompt_tokens"]))
    links = sorted((c for c in _result("links.json")["cells"] if c["ids"] == "random"), key=lambda cell: cell["load"])
    with _figure(len(engines) + 2, 1, path, "Prefill in times of one engine's", LOW) as grid:
        (*panels, (forward,)) = grid
        names = [f"two cores, {cell['link']}, {cell['prompt_tokens']:,} tokens" for cell in engines]
        names.append(f"one H200, {gpu['prompt_tokens']:,} tokens")
        for (panel,), cell, name in zip(panels, [*engines, gpu], names, strict=True):
            _ratios(panel, cell, "prefill_ms", [mode for mode in cell["modes"] if mode != AGGREGATED])
            panel.set_title(name, loc="left", fontsize="medium")
            panel.set_xlim(0.8, 1.4)
        for mode in ("auto", "layer", "chunk"):
            shown = [cell["modes"][mode]["slowdown"] for cell in links]
            heights = [one["ratio"] for one in shown]
            bars = [[one["ratio"] - one["low"] for one in shown], [one["high"] - one["ratio"] for one in shown]]
            loads = [cell["load"] for cell in links]
            forward.errorbar(loads, heights, bars, fmt="o-", color=COLOURS[mode], label=mode, ms=4, lw=1.2)
        forward.set(xscale="log", xlabel="link use")
        forward.set_title("no model: a forward with a push, of one without", loc="left", fontsize="medium")
        _plain_axis(forward, (0.1, 0.2, 0.5, 1, 2, 3.5))
        _finish(forward)


def growing(path: Path) -> None:
    """Growth of a forward's costs: a column for each thing that grew, a row for each cost, a line for each mode."""
    lines = [Line(**line) for line in _result("forward.json")["lines"]]
    every = list(dict.fromkeys(line.what for line in lines))
    with _figure(len(GROWN), len(every), path, "Growth of costs") as grid:
        for row, cost in zip(grid, GROWN, strict=True):
            for panel, what in zip(row, every, strict=True):
                for line in lines:
                    if (line.cost, line.what) == (cost, what):
                        _line(panel, line)
                panel.set(xlabel=what, ylabel=cost if cost in COUNTED else f"{cost}, milliseconds", ylim=(0, None))
                panel.set_xticks(sorted({value for line in lines if line.what == what for value in line.values}))
                panel.grid(alpha=0.25)
                panel.spines[["top", "right"]].set_visible(False)
                panel.legend(fontsize="small", title=f"for one {what.removesuffix('s')} more", title_fontsize="small")


def after_death(path: Path) -> None:
    """First tokens after P's death, by the part of the prompt that P had computed. Stock push has no bar: none came."""
    samples = [each for each in _result("kept.json")["samples"] if each["first_token_s"] is not None]
    percents = list(dict.fromkeys(each["percent"] for each in samples))
    with _figure(1, 1, path, "First token after P's death") as ((panel,),):
        found = {
            what: [
                [each["first_token_s"] for each in samples if (each["mode"], each["percent"]) == (mode, percent)]
                for percent in percents
            ]
            for mode, what in {NOTHING: "D keeps nothing", KEPT: "D keeps what has landed"}.items()
        }
        _bars(panel, [f"{percent} %" for percent in percents], found, "%.1f s")
        panel.set(xlabel="computed before P's death", ylabel="seconds")
        panel.margins(y=0.25)


def conversations(path: Path) -> None:
    """Computed tokens and times to the first token by prompt length: a row for each P, a line for each mode."""
    result = _result("returned.json")
    colours = {ONE: "#555555", PULL: COLOURS["request"], AUTO: COLOURS["layer"], RETURNS: COLOURS["auto"]}
    rows, measures = (SAME, ANOTHER), {"computed": "tokens that P computes", "first_token_s": "seconds to first token"}
    with _figure(len(rows), len(measures), path, "The turns of a conversation", LOW) as grid:
        for column, (what, said) in zip(grid.T, measures.items(), strict=True):
            found = series(result, what)
            for panel, p in zip(column, rows, strict=True):
                for mode, colour in colours.items():
                    heights = [float(np.median(each)) for each in found[mode, SAME if mode == ONE else p]]
                    panel.plot(prompts(result), heights, "o-", color=colour, label=mode, ms=4, lw=1.4)
                panel.set_title(f"{p}: {said}", loc="left", fontsize="medium")
                panel.set(xticks=prompts(result), ylim=(0, None))
                _finish(panel)
            column[-1].set_xlabel("prompt tokens")


def verified(path: Path) -> None:
    """The price of checksums: a panel for each time, a bar for each mode."""
    cells = _result("verify.json")["cells"]
    times = {"writer_s": "processor time of P's writer", "handed_over_s": "hand-over"}
    with _figure(1, len(times), path, "Pushes with checksums") as grid:
        for panel, (name, what) in zip(grid[0], times.items(), strict=True):
            modes = {mode: [[1e3 * each for each in cell["modes"][mode]["raw"][name]] for cell in cells]
                     for mode in ("auto", "verify-0.01", "verify-1")}  # fmt: skip
            _bars(panel, [f"{cell['tokens']}" for cell in cells], modes, "%.0f")
            panel.set(xlabel="prompt tokens", ylabel="milliseconds")
            panel.set_title(what, loc="left", fontsize="medium")


def fleet_load(path: Path) -> None:
    """Exposed time and TTFT of each mode against oversubscription: a column for each load."""
    cells = _result("fleet.json")["studies"]["load"]
    loads = sorted({cell["plan"]["load"] for cell in cells})
    with _figure(2, len(loads), path, "Oversubscription, eight P and eight D") as grid:
        for row, time in zip(grid, TIMES, strict=True):
            for panel, load in zip(row, loads, strict=True):
                _lines(panel, chosen(cells, load=load), "mode", "oversubscription", time)
                panel.set_title(f"load {load:g}", loc="left", fontsize="medium")


def fleet_incast(path: Path) -> None:
    """Exposed time of each mode against the number of P that push into one D."""
    cells = _result("fleet.json")["studies"]["incast"]
    with _figure(1, 1, path, "Several P push into one D") as grid:
        _lines(grid[0][0], cells, "mode", "prefill", "exposed_s")


def fleet_ratio(path: Path) -> None:
    """Exposed time and TTFT of each trace against the number of P for one D."""
    cells = _result("fleet.json")["studies"]["ratio"]
    with _figure(1, len(TIMES), path, "Several P for one D") as grid:
        for panel, time in zip(grid[0], TIMES, strict=True):
            _lines(panel, cells, "trace", "prefill", time)


def fleet_restart(path: Path) -> None:
    """Times to the first token by the second of arrival, around a restart of all engines."""
    with _figure(1, 1, path, "All engines die at second 10, and start again 5 s later") as grid:
        panel = grid[0][0]
        for cell, colour in zip(_result("fleet.json")["studies"]["scale"], COLOURS.values(), strict=False):
            seconds, medians, _ = zip(*cell["ttft_by_second"], strict=True)
            engines = cell["plan"]["prefill"] + cell["plan"]["decode"]
            panel.plot(seconds, medians, "o-", color=colour, label=f"{engines:,} engines", ms=3, lw=1.4)
        panel.set(xlabel="second in which the requests come", ylabel="median TTFT, seconds", ylim=(0, None))
        _finish(panel)


def paged(path: Path) -> None:
    """Shares of the wire's ceiling by the size of a descriptor: a panel for each link, a line for each way."""
    rows = _result("paged.json")["rows"]
    links = list(dict.fromkeys(row["link"] for row in rows))
    with _figure(1, len(links), path, "Random paged tables: share of one large descriptor's speed") as grid:
        for panel, link in zip(grid[0], links, strict=True):
            for way, (mode, style) in WAYS.items():
                here = [row for row in rows if (row["link"], row["way"]) == (link, way)]
                sizes = [row["descriptor_bytes"] >> 10 for row in here]
                shares = [100 * row["share"]["ratio"] for row in here]
                bars = [
                    [100 * (row["share"]["ratio"] - row["share"]["low"]) for row in here],
                    [100 * (row["share"]["high"] - row["share"]["ratio"]) for row in here],
                ]
                panel.errorbar(sizes, shares, bars, fmt=style, color=COLOURS[mode], label=way, ms=4, lw=1.2)
            panel.set(xlabel="KiB of a descriptor", ylabel="percent", xscale="log", ylim=(0, None))
            panel.set_title(link, loc="left", fontsize="medium")
            _plain_axis(panel, sizes)
            _finish(panel)


def estimate(path: Path) -> None:
    """The picture of the example of `layerpush estimate`."""
    with _figure(1, 1, path, "Exposed time by the speed of the link") as grid:
        estimates.draw_example(grid[0][0])
        grid[0][0].legend(fontsize="small")


PICTURES: Mapping[Path, Callable[[Path], None]] = {
    ROOT / "docs/demo-timeline.svg": timeline,
    ROOT / "docs/exposed.svg": exposed,
    ROOT / "docs/first-tokens.svg": first_tokens,
    ROOT / "docs/link-use.svg": by_link_use,
    ROOT / "docs/price.svg": price,
    ROOT / "docs/growth.svg": growing,
    ROOT / "docs/kept.svg": after_death,
    ROOT / "docs/returned.svg": conversations,
    ROOT / "docs/verify.svg": verified,
    ROOT / "docs/fleet-load.svg": fleet_load,
    ROOT / "docs/fleet-incast.svg": fleet_incast,
    ROOT / "docs/fleet-ratio.svg": fleet_ratio,
    ROOT / "docs/fleet-restart.svg": fleet_restart,
    ROOT / "docs/paged.svg": paged,
    ROOT / "docs/estimate.svg": estimate,
}


def render(draw: Callable[[Path], None]) -> str:
    """The picture as SVG. Equal results make equal text."""
    import matplotlib as mpl

    with tempfile.TemporaryDirectory(prefix="layerpush-") as folder:
        path = Path(folder) / "picture.svg"
        with mpl.rc_context({"svg.hashsalt": HASH_SALT, "svg.fonttype": "none"}):
            draw(path)
        return path.read_text()


def _line(panel: Any, line: Line) -> None:
    """Measured figures as points, with the straight line through them and its slope."""
    factor, unit, colour = *((1.0, "") if line.cost in COUNTED else (1e3, " ms")), COLOURS[line.mode]
    ends = (min(line.values), max(line.values))
    panel.plot(line.values, [factor * each for each in line.figures], "o", color=colour, ms=4)
    heights = [factor * (line.intercept + line.slope * end) for end in ends]
    slope = round(factor * line.slope, DIGITS) + 0.0  # no -0
    panel.plot(ends, heights, color=colour, lw=1.4, label=f"{line.mode} {slope:+.2g}{unit}")


def _bars(panel: Any, places: Sequence[str], series: Mapping[str, Sequence[Sequence[float]]], fmt: str) -> None:
    """Medians as bars, a group for each place, with the samples as points."""
    width, colours = BARS / len(series), ("request", "auto", "layer")
    for index, (label, found) in enumerate(series.items()):
        where = [place + (index - (len(series) - 1) / 2) * width for place in range(len(places))]
        heights = [float(np.median(each)) for each in found]
        bars = panel.bar(where, heights, width, label=label, color=COLOURS[colours[index]])
        panel.bar_label(bars, fmt=fmt, label_type="center", color="white", fontsize="small")
        for place, each in zip(where, found, strict=True):
            panel.plot([place] * len(each), each, "o", color="black", ms=2)
    panel.set_xticks(range(len(places)), places)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize="small")


def _lines(panel: Any, cells: Sequence[Mapping[str, Any]], by: str, over: str, time: str) -> None:
    """A line for each value ``by``, over another one: medians, and the 99th percentile dashed. Logarithmic axes."""
    values = sorted({cell["plan"][over] for cell in cells})
    names = list(dict.fromkeys(cell["plan"][by] for cell in cells))
    for name, colour in zip(names, map(COLOURS.get, names, COLOURS.values()), strict=True):
        for share, style in (("p50", "o-"), ("p99", "o--")):
            heights = [1e3 * cell[time][share] for cell in chosen(cells, **{by: name})]
            panel.plot(values, heights, style, color=colour, label=f"{name}, {share}", ms=4, lw=1.4)
    label = {"prefill": "prefill engines"}.get(over, over)
    panel.set(xlabel=label, ylabel=f"{TIMES[time]}, milliseconds", xscale="log", yscale="log")
    _plain_axis(panel, values)
    _finish(panel)


def _longest(name: str) -> list[Mapping[str, Any]]:
    """The cells with the longest prompts and an idle D, one for each link."""
    cells = [cell for cell in _result(name)["cells"] if not cell.get("background_streams")]
    longest = max(int(cell["prompt_tokens"]) for cell in cells)
    return [cell for cell in cells if cell["prompt_tokens"] == longest]


def _ratios(panel: Any, cell: Mapping[str, Any], measure: str, modes: Sequence[str]) -> None:
    """Ratios to one engine with their intervals: a row for each mode, the first one on top."""
    for place, mode in enumerate(modes):
        ratio = cell["ratios"][measure][f"{mode}/{AGGREGATED}"]
        ends = [[ratio["ratio"] - ratio["low"]], [ratio["high"] - ratio["ratio"]]]
        panel.errorbar(ratio["ratio"], place, xerr=ends, fmt="o", color=COLOURS.get(mode, "#555555"), ms=6, capsize=3)
    panel.set_yticks(range(len(modes)), [AS_INSTALLED if mode == TOKEN else mode for mode in modes])
    panel.invert_yaxis()
    panel.axvline(1, color="grey", lw=0.8, ls=":")
    panel.grid(alpha=0.25, axis="x")
    panel.spines[["top", "right"]].set_visible(False)


def _plain_axis(panel: Any, values: Sequence[float]) -> None:
    """A logarithmic x axis with these numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_major_locator(FixedLocator(list(values)))
    panel.xaxis.set_minor_formatter(NullFormatter())


def _finish(panel: Any) -> None:
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize="small")


@contextmanager
def _figure(
    rows: int, columns: int, path: Path, title: str, panel: tuple[float, float] = PANEL_INCHES
) -> Iterator[Any]:
    """A grid of panels, ``grid[row][column]``. The file has no date: equal panels make equal files."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    size = (columns * panel[0], rows * panel[1] + 0.4)
    picture, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    try:
        yield grid
        picture.suptitle(title, x=0.01, ha="left", fontsize="large")
        picture.savefig(path, metadata={"Date": None, "Creator": None})
    finally:
        plt.close(picture)


def _result(name: str) -> Result:
    result: Result = json.loads((ROOT / "bench/results" / name).read_text())
    return result
