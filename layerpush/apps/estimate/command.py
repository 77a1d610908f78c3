"""`layerpush estimate`. It imports heavy modules itself, so that `--help` answers at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from layerpush.apps.terminal import echo


def estimate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name, such as llama-3.1-8b, or a config.json.")],
    link: Annotated[
        str, typer.Option(metavar="RATE", help="The network card of each rank: GB/s, or Gbit/s as in 100gbit.")
    ],
    gpu: Annotated[str | None, typer.Option(help="P's GPUs: A100, H100, H200, B200, L40S, L4 or MI300X.")] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", help="Instead of --gpu: prompt tokens that P computes a second.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Prompt lengths, with commas.")] = "2048,8192,32768",
    tp: Annotated[int, typer.Option("--tp", min=1, help="P's tensor parallel size.")] = 1,
    decode_tp: Annotated[int | None, typer.Option(min=1, help="D's tensor parallel size. Default: P's.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step: P's --max-num-batched-tokens.")] = 8192,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block: --block-size.")] = 16,
    kv_cache_dtype: Annotated[str, typer.Option(help="As vLLM's: auto, bfloat16, float16 or fp8.")] = "auto",
    write_us: Annotated[float, typer.Option(min=0, help="Latency of the link: microseconds of each WRITE.")] = 20.0,
    descriptor_us: Annotated[
        float, typer.Option(min=0, help="Microseconds of each block of a layer in a WRITE. Over TCP about 7.")
    ] = 0.3,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object: seconds, bytes a second.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Draw the longest prompt for all links: .png or .svg."),
    ] = None,
) -> None:
    """Estimate bytes, exposed time and time to first token (TTFT), before anything is installed.

    The product's own schedule of WRITEs runs on a simulated link, without vLLM
    and without a GPU. Exposed is the time from the last layer of prefill until D
    has all KV: [bold]auto[/bold] and [bold]layer[/bold] push during prefill, [bold]request[/bold] after it, as stock
    connectors do.

    Example:  layerpush estimate llama-3.1-70b --gpu H100 --tp 8 --link 100gbit

    Exit status: 0, or 2 if the model or an option is wrong; a line says what to change.
    """
    from layerpush.apps.estimate import report
    from layerpush.apps.estimate.estimate import EFFICIENCY, GPUS, Estimate, Wire, of_gpu, of_speed
    from layerpush.apps.estimate.model import KV_DTYPES, ModelError, model_of
    from layerpush.apps.estimate.picture import draw_prompt
    from layerpush.apps.tracing.picture import PictureError

    if (gpu is None) == (tokens_per_s is None):
        raise typer.BadParameter("P's speed: either --gpu or --tokens-per-s")
    if gpu is not None and gpu not in GPUS:
        raise typer.BadParameter(f"--gpu {gpu} is none of {', '.join(GPUS)}: give P's speed with --tokens-per-s")
    if tokens_per_s is not None and tokens_per_s <= 0:
        raise typer.BadParameter("--tokens-per-s must be more than 0")
    if kv_cache_dtype not in KV_DTYPES:
        raise typer.BadParameter(f"--kv-cache-dtype {kv_cache_dtype} is none of {', '.join(KV_DTYPES)}")
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)(gbit)?", link)
    if rate is None or not float(rate[1]):
        raise typer.BadParameter(f"--link {link} is no rate: 12.5 means GB/s, 100gbit means Gbit/s")
    lengths = tokens.split(",")
    if not all(length.isdecimal() and int(length) for length in lengths):
        raise typer.BadParameter(f"--tokens {tokens} are no prompt lengths: 2048,8192")
    wire = Wire(float(rate[1]) * (1e9 / 8 if rate[2] else 1e9), 1e-6 * write_us, 1e-6 * descriptor_us)
    try:
        known = model_of(model, kv_cache_dtype)
        if gpu is not None:
            seconds = of_gpu(known, gpu, tp)
            speed = (
                f"P's speed is an assumption: {EFFICIENCY:.0%} of what {gpu} can do; measure it, for --tokens-per-s."
            )
        else:
            assert tokens_per_s is not None
            seconds = of_speed(tokens_per_s)
            speed = "P's speed is the same for prompts of all lengths; attention makes long ones slower."
        found = Estimate(known, (tp, decode_tp or tp), seconds, wire, chunk, block_size)
        prompts = [found.prompt(int(length)) for length in lengths]
        if plot is not None:
            draw_prompt(max(prompts, key=lambda prompt: prompt.tokens), plot)
    except (ModelError, PictureError, OSError) as error:
        echo(f"layerpush estimate: {error}", err=True)
        raise typer.Exit(2) from error
    echo(json.dumps(report.data(prompts, speed), indent=2) if as_json else report.text(prompts, speed))
    if plot is not None:
        echo(f"{plot}: exposed time by the speed of the link", err=True)
