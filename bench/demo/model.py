"""Writes the demo's model with a tokenizer, for a server that takes text: ``python -m bench.demo.model DIR``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.demo.cluster import DEMO_SHAPE
from bench.serve.tokenizer import write_tokenizer
from bench.servers.model import write_model

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the model. An equal model there is kept.")],
) -> None:
    """Make a Llama with random weights, 16 layers and a tokenizer. Its answers are noise."""
    try:
        write_model(out, DEMO_SHAPE)
        write_tokenizer(out, DEMO_SHAPE.vocabulary, DEMO_SHAPE.max_positions, DEMO_SHAPE.config())
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
