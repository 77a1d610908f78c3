"""Makes a model of Llama-3.2-3B's geometry with random bf16 weights on the machine that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.serve.tokenizer import write_tokenizer
from bench.servers.model import ModelShape, write_model

LLAMA_3B = ModelShape(
    layers=28,
    hidden=3072,
    heads=24,
    kv_heads=8,
    head_dim=128,
    intermediate=8192,
    vocabulary=128_256,
    max_positions=131_072,
    dtype="bfloat16",
    rope_theta=500_000.0,
)
"""As Llama 3.2, but without RoPE scaling and shared embeddings, which random weights do not need."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the model. An equal model there is kept.")],
) -> None:
    """Make the model that scripts/gpu-bench serves: 7 GB, on the GPU if there is one."""
    try:
        write_model(out, LLAMA_3B, "cuda" if torch.cuda.is_available() else "cpu")
        write_tokenizer(out, LLAMA_3B.vocabulary, LLAMA_3B.max_positions, LLAMA_3B.config())
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
