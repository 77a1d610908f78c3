"""docs/estimate.md: the output of its example, and estimates beside measurements."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from typer.testing import CliRunner

from bench.markdown import Result, number_table
from layerpush.apps.cli import app
from layerpush.apps.estimate.estimate import Estimate, Wire, of_gpu, of_speed
from layerpush.apps.estimate.model import Model, model_of
from layerpush.core.push_mode import PushMode

EXAMPLE = "layerpush estimate llama-3.1-8b --gpu H100 --link 100gbit --tokens 2048,8192,32768"
COMPARED = (PushMode.AUTO, PushMode.WHOLE)
LINK, LINKS = "1gbit", "links.json"


class Comparison(NamedTuple):
    """Seconds of one push: exposed, and its time to first token, if that was measured."""

    where: str
    mode: PushMode
    measured_s: float
    estimated_s: float
    measured_ttft_s: float | None = None
    estimated_ttft_s: float | None = None

    @property
    def off(self) -> float:
        """The error of the exposed time, as a part of the measured one."""
        return self.estimated_s / self.measured_s - 1


def example() -> str:
    """The command, and what it prints."""
    result = CliRunner().invoke(app, shlex.split(EXAMPLE)[1:])
    assert result.exit_code == 0, result.output
    return f"```bash\n{EXAMPLE}\n```\n\n```text\n{result.stdout.strip()}\n```"


def draw_example(axes: Any) -> None:
    """The picture that `--plot` makes of the example."""
    from layerpush.apps.estimate.picture import draw

    model = model_of("llama-3.1-8b")
    draw(axes, Estimate(model, (1, 1), of_gpu(model, "H100", 1), Wire(12.5e9)).prompt(32768))


def check(root: Path) -> str:
    """Estimates beside measurements, on emulated links and of a GPU's speed."""
    rows = []
    for each in comparisons(root):
        ttft = each.measured_ttft_s, each.estimated_ttft_s
        times = ["" if at is None else f"{at:.2f} s" for at in ttft]
        shown = (_ms(each.measured_s), _ms(each.estimated_s), f"{each.off:+.0%}", *times)
        rows.append((each.where, f"`{each.mode}`", *shown))
    headings = ("link, prompt", "mode", "exposed", "estimated", "error", "TTFT", "estimated")
    prefill = ", ".join(
        f"{tokens:,} tokens {_ms(measured)} and {_ms(estimated)}" for tokens, measured, estimated in prefills(root)
    )
    return f"{number_table(headings, rows, 2)}\n\nPrefill on an H200, measured and estimated: {prefill}."


def comparisons(root: Path) -> Iterator[Comparison]:
    """Of `bench.forward` and of `bench.serve`, one request at a time, on emulated links."""
    forward = _result(root, LINKS)
    for cell in forward["cells"]:
        if cell["link"].endswith("bit") and cell["ids"] == "contiguous":
            yield from _of_forward(cell)
    rate = next(cell["ceiling"]["gb_s"] for cell in forward["cells"] if cell["link"] == LINK) * 1e9
    for name in ("token-serve.json", "long-serve.json"):
        result = _result(root, name)
        for cell in result["cells"]:
            if cell["link"] == LINK and cell["concurrency"] == 1 and not cell.get("background_streams"):
                yield from _of_serve(result["model"], cell, rate)


def prefills(root: Path) -> Iterator[tuple[int, float, float]]:
    """Tokens, measured and estimated seconds of prefill of Llama-3.2-3B on one H200."""
    model = model_of("llama-3.2-3b")
    for cell in _result(root, "gpu-serve.json")["cells"]:
        tokens, measured = cell["prompt_tokens"], cell["modes"]["aggregated"]["prefill_ms"]["p50"] / 1e3
        yield tokens, measured, of_gpu(model, "H200", 1)(0, tokens)


def _of_forward(cell: Mapping[str, Any]) -> Iterator[Comparison]:
    model = _model(cell["layers"], cell["block_bytes"] // 16)
    wire = Wire(cell["ceiling"]["gb_s"] * 1e9, descriptor_s=0.0)
    for mode in COMPARED:
        speed = of_speed(cell["tokens"] / median(cell["modes"][mode]["raw"]["forward_s"]))
        found = Estimate(model, (1, 1), speed, wire, cell["chunk_tokens"]).push(cell["tokens"], mode)
        where = f"{cell['link']}, {cell['tokens']:,} tokens, `bench.forward`"
        yield Comparison(where, mode, cell["modes"][mode]["exposed_s_median"], found.exposed_s)


def _of_serve(shape: Mapping[str, Any], cell: Mapping[str, Any], rate: float) -> Iterator[Comparison]:
    model, tokens = _model(shape["layers"], shape["kv_bytes_per_token"] // shape["layers"]), cell["prompt_tokens"]
    for mode in COMPARED:
        measured = {name: cell["modes"][mode][f"{name}_ms"]["p50"] / 1e3 for name in ("prefill", "exposed", "ttft")}
        speed, chunk = of_speed(tokens / measured["prefill"]), cell["max_num_batched_tokens"]
        found = Estimate(model, (1, 1), speed, Wire(rate, descriptor_s=0.0), chunk).push(tokens, mode)
        where = f"{cell['link']}, {tokens:,} tokens, `bench.serve`"
        ttft = found.prefill_s + found.exposed_s
        yield Comparison(where, mode, measured["exposed"], found.exposed_s, measured["ttft"], ttft)


def _model(layers: int, token_bytes: int) -> Model:
    config = {"num_hidden_layers": layers, "num_attention_heads": 1, "num_key_value_heads": 1}
    return Model("it", {**config, "head_dim": token_bytes // 4}, 2)


def _result(root: Path, name: str) -> Result:
    result: Result = json.loads((root / "bench/results" / name).read_text())
    return result


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
