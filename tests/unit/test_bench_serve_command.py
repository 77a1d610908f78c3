"""The options of ``python -m bench.serve``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from bench.serve.__main__ import app
from bench.serve.command import Choices
from bench.serve.plan import Load
from bench.serve.shapes import LONG_SHAPE, described, folder
from bench.servers.workspace import model_cache

RUNNER = CliRunner(env={"COLUMNS": "300"})


def choices(**changes: object) -> Choices:
    usual: dict[str, object] = {
        "modes": ["aggregated", "layer"],
        "lengths": ["1024"],
        "loads": [Load(concurrency=1)],
        "step_tokens": None,
        "links": None,
        "rounds": 2,
        "requests": 1,
        "answer_tokens": 16,
        "seed": 0,
    }
    return Choices(**usual | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "layers"], "none of aggregated, pull, push"),
        (["--lengths", "1k"], "'1k' is no positive whole number"),
        (["--lengths", "40000"], "the model takes 32688 tokens"),
        (["--shape", "long", "--lengths", "70000"], "the model takes 65456 tokens"),
        (["--shape", "wide"], "'wide' is not one of 'demo', 'long'"),
        (["--shape", "long", "--model", "/nothing"], "--model names another model"),
        (["--concurrency", "0"], "positive whole number"),
        (["--background", "0,x"], "--background: 'x' is no whole number of streams"),
        (["--max-num-batched-tokens", "many"], "positive whole number"),
        (["--rounds", "1"], "rounds"),
        (["--engine-env", "UCX_TLS"], "write NAME=VALUE"),
        (["--config", "layer={"], "Expecting"),
        (["--config", 'chunk={"a": 1}', "--modes", "layer"], "none of the measured modes"),
        (["--model", "/nothing"], "config.json"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str) -> None:
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_settings_can_be_compared_and_written() -> None:
    settings = json.loads(json.dumps(choices(extra={"layer": {"packing": "off"}}).settings()))
    assert settings["modes"]["layer"] == {"layerwise": True, "granularity": "layer", "packing": "off"}
    assert settings["modes"]["aggregated"] == {}
    assert settings["setups"] == [{"link": "loopback", "step_tokens": 512}]
    assert settings != json.loads(json.dumps(choices(corrupt=True).settings()))


def test_the_model_for_long_prompts_has_little_computation_per_byte_of_kv() -> None:
    assert choices(shape="long", lengths=["max"]).plan().lengths == [65456]
    assert LONG_SHAPE.heads == LONG_SHAPE.kv_heads, "attention costs the least for each byte of KV"
    assert LONG_SHAPE.kv_bytes_per_token == 8192
    assert "8 layers, hidden size 256, query heads 1 x 128, KV heads 1 x 128, 8 KiB of KV" in described("long")
    assert choices(shape="long").settings() != choices().settings()


def test_each_model_has_its_folder() -> None:
    assert folder("demo") == model_cache()
    assert folder("long").parent == folder("demo").parent
    assert folder("long") != folder("demo")
