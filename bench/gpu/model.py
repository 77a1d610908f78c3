"""Builds a model of Llama-3.1-8B's geometry with random bf16 weights on the machine that serves it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.serve.tokenizer import write_tokenizer
from bench.servers.model import ModelShape, write_once

LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocabulary=128_256,
    max_positions=131_072,
)
ROPE_THETA = 500_000.0
FORMAT = 1
STAMP = "layerpush-gpu-model.json"
INDEX = "model.safetensors.index.json"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def config_of(shape: ModelShape) -> dict[str, object]:
    """The ``config.json``: as Llama 3.1's, but without RoPE scaling, which random weights do not need."""
    return shape.config() | {"torch_dtype": "bfloat16", "rope_theta": ROPE_THETA}


def write_model(target: Path, shape: ModelShape, device: torch.device) -> bool:
    """Write a model and its tokenizer. False if they are there already. Weights depend on shape and kind of device.

    Each layer is a file of its own, so that writing takes the memory of one layer only. Raises as ``write_once``.
    """

    def write(folder: Path) -> None:
        _write_weights(folder, shape, device)
        write_tokenizer(folder, shape.vocabulary, shape.max_positions, config_of(shape))
        (folder / "config.json").write_text(json.dumps(config_of(shape), indent=1) + "\n")

    stamp = json.dumps({"format": FORMAT, "device": device.type, **asdict(shape)}, sort_keys=True)
    return write_once(target, STAMP, stamp, write)


def _write_weights(folder: Path, shape: ModelShape, device: torch.device) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(shape.seed)
    file_of: dict[str, str] = {}
    size = 0
    for number, weights in enumerate(_files(shape)):
        file = f"model-{number:05d}.safetensors"
        tensors = {name: _weight(each, device, generator) for name, each in weights.items()}
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _files(shape: ModelShape) -> Iterator[Mapping[str, tuple[tuple[int, ...], float]]]:
    """Size and deviation of each weight, those of a layer together."""
    for _, group in groupby(shape.tensors(), key=lambda weight: _layer(weight[0])):
        yield {name: (size, deviation) for name, size, deviation in group}


def _layer(name: str) -> str:
    """``model.layers.3`` of a weight of a layer, else its own name."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[1] == "layers" else name


def _weight(each: tuple[tuple[int, ...], float], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    size, deviation = each
    if not deviation:
        return torch.ones(size, dtype=torch.bfloat16, device=device)
    weight = torch.empty(size, dtype=torch.bfloat16, device=device)
    return weight.normal_(0.0, deviation, generator=generator)


@app.command()
def main(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the model. An equal model there is kept.")],
) -> None:
    """Make the model that scripts/gpu-bench serves: 16 GB, on the GPU if there is one."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        made = write_model(out, LLAMA_8B, device)
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    typer.echo(f"{out}: {'made' if made else 'kept'}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    app()
