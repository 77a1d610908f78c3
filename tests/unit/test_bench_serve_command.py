"""The options of ``python -m bench.serve``."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from bench.serve.__main__ import app
from bench.serve.command import settings_of
from bench.serve.engine_options import LONG_SHAPE, EngineOptions, folder
from bench.servers.workspace import model_cache
from tests.unit.serve_stubs import plan

RUNNER = CliRunner(env={"COLUMNS": "300"})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "layers"], "none of aggregated, pull, push"),
        (["--lengths", "1k"], "'1k' is no whole number of 1 or more"),
        (["--lengths", "max,40000"], "the model takes 32688 tokens"),
        (["--shape", "long", "--lengths", "70000"], "the model takes 65456 tokens"),
        (["--shape", "wide"], "'wide' is not one of 'demo', 'long'"),
        (["--shape", "long", "--model", "/nothing"], "--model names another model"),
        (["--concurrency", "0"], "whole number of 1 or more"),
        (["--background", "0,x"], "'x' is no whole number of 0 or more"),
        (["--max-num-batched-tokens", "many"], "whole number of 1 or more"),
        (["--rounds", "1"], "rounds"),
        (["--engine-env", "UCX_TLS"], "write NAME=VALUE"),
        (["--model", "/nothing"], "config.json"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str) -> None:
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_settings_can_be_compared_and_written() -> None:
    options = EngineOptions()
    settings = json.loads(json.dumps(settings_of(plan(), options)))
    assert settings["modes"]["layer"] == {"layerwise": True, "granularity": "layer"}
    assert settings["modes"]["aggregated"] == {}
    assert settings["setups"] == [{"link": "loopback", "step_tokens": 512}]
    assert settings != json.loads(json.dumps(settings_of(plan(), replace(options, corrupt=True))))


def test_the_model_for_long_prompts_has_little_computation_per_byte_of_kv() -> None:
    assert EngineOptions(shape="long").longest_prompt(16) == 65456
    assert LONG_SHAPE.heads == LONG_SHAPE.kv_heads, "attention costs the least for each byte of KV"
    assert LONG_SHAPE.kv_bytes_per_token == 8192
    assert settings_of(plan(), EngineOptions(shape="long")) != settings_of(plan(), EngineOptions())


def test_each_model_has_its_folder() -> None:
    assert folder("demo") == model_cache()
    assert folder("long").parent == folder("demo").parent
    assert folder("long") != folder("demo")
