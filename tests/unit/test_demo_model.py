"""The model that the demo and the end-to-end tests run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bench.servers.model import ModelShape, write_model

SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocabulary": 128}


def test_the_same_arguments_give_the_same_bits(tmp_path: Path):
    one, two = (write_model(tmp_path / name, ModelShape(**SMALL)) for name in ("one", "two"))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    other = write_model(tmp_path / "three", ModelShape(**SMALL, seed=1))
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_an_identical_model_is_kept_and_a_different_one_replaced(tmp_path: Path):
    path = write_model(tmp_path / "model", ModelShape(**SMALL))
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert write_model(tmp_path / "model", ModelShape(**SMALL)) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    write_model(tmp_path / "model", ModelShape(**(SMALL | {"layers": 3})))
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 3
    assert sorted(tmp_path.iterdir()) == [path], "no half-written file stays"


def test_a_directory_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="another directory"):
        write_model(tmp_path, ModelShape(**SMALL))
    assert (tmp_path / "thesis.tex").exists()


def test_config_and_weights_agree(tmp_path: Path):
    path = write_model(tmp_path / "model", ModelShape(**SMALL))
    config = json.loads((path / "config.json").read_text())
    weights = load_file(path / "model.safetensors")
    layer = "model.layers.1.self_attn"
    assert weights[f"{layer}.q_proj.weight"].shape == (4 * 16, config["hidden_size"])
    assert weights[f"{layer}.k_proj.weight"].shape == (2 * 16, config["hidden_size"])
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert ModelShape(**SMALL).kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("wrong", [{"heads": 4, "kv_heads": 3}, {"hidden": 70}])
def test_impossible_shapes_are_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="must be a multiple"):
        ModelShape(**(SMALL | wrong))
