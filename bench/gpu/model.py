"""Makes a model of Llama-3.1-8B's geometry with random bf16 weights on the machine that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.serve.tokenizer import write_tokenizer
from bench.servers.model import ModelShape, write_model

LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128_256,
    max_positions=131_072,
    dtype="bfloat16",
    rope_theta=500_000.0,
)
"""As Llama 3.1, but without RoPE scaling, which random weights do not need."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the model. An equal model there is kept.")],
) -> None:
    """Make the model that scripts/gpu-bench serves: 16 GB, on the GPU if there is one."""
    try:
        write_model(out, LLAMA_8B, "cuda" if torch.cuda.is_available() else "cpu")
        write_tokenizer(out, LLAMA_8B.vocabulary, LLAMA_8B.max_positions, LLAMA_8B.config())
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
