"""`layerpush estimate`: bytes by model and ranks, the simulated push, the command."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from layerpush.apps.cli import app
from layerpush.apps.estimate.estimate import ENDS, PAYS, Estimate, Wire, of_gpu, of_speed
from layerpush.apps.estimate.model import CHUNKED, FULL, MODELS, SLIDING, Model, ModelError, model_of
from layerpush.apps.estimate.picture import COLOURS
from layerpush.core.push_mode import PushMode
from scripts.docgen import estimates

ROOT = Path(__file__).parents[2]
LLAMA = dict(MODELS["llama-3.1-8b"])
FREE = Wire(rate=10e9, write_s=0.0, descriptor_s=0.0)
runner = CliRunner()


def estimated(
    config: dict[str, Any], ranks: tuple[int, int] = (1, 1), element_bytes: int = 2, **others: Any
) -> Estimate:
    """P computes 20,000 tokens a second."""
    return Estimate(Model("it", config, element_bytes), ranks, of_speed(20_000), others.pop("wire", FREE), **others)


@pytest.mark.parametrize("ranks", [(1, 1), (8, 8), (4, 1), (1, 4)])
def test_each_rank_of_d_gets_its_heads_once(ranks: tuple[int, int]) -> None:
    assert estimated(LLAMA, ranks).prompt(1000).bytes == 1008 * 2 * 32 * 8 * 128 * 2, "in whole blocks of 16"


@pytest.mark.parametrize(("ranks", "copies"), [((16, 16), 2), ((1, 16), 2), ((16, 8), 1), ((8, 16), 2)])
def test_ranks_beyond_the_kv_heads_have_copies(ranks: tuple[int, int], copies: int) -> None:
    assert estimated(LLAMA, ranks).prompt(1024).bytes == copies * 1024 * 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize(("ranks", "copies"), [((1, 1), 1), ((8, 1), 1), ((8, 8), 8), ((1, 8), 8)])
def test_each_rank_of_d_gets_the_whole_latent_vector(ranks: tuple[int, int], copies: int) -> None:
    assert estimated(dict(MODELS["deepseek-v3"]), ranks).prompt(1024).bytes == copies * 1024 * 61 * (512 + 64) * 2


def test_fp8_halves_the_bytes() -> None:
    assert estimated(LLAMA, element_bytes=1).prompt(1024).bytes * 2 == estimated(LLAMA).prompt(1024).bytes


@pytest.mark.parametrize(
    ("others", "tokens", "first"),
    [
        ({"sliding_window": 1024, "layer_types": [SLIDING] * 32}, 4096, 3072),
        ({"sliding_window": 1024, "layer_types": [SLIDING] * 32}, 512, 0),
        ({"sliding_window": 1000, "model_type": "mistral"}, 4096, 3088),
        ({"attention_chunk_size": 1024, "layer_types": [CHUNKED] * 32}, 4100, 4096),
    ],
)
def test_d_gets_the_blocks_of_a_window_or_a_chunk(others: dict[str, Any], tokens: int, first: int) -> None:
    blocks = -(-tokens // 16) - first // 16
    assert estimated({**LLAMA, **others}).prompt(tokens).bytes == blocks * 16 * 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("others", "full"),
    [
        ({"sliding_window_pattern": 6}, 5),
        ({"model_type": "gemma2"}, 16),
        ({"layer_types": [SLIDING, FULL] * 16}, 16),
        ({"use_sliding_window": False}, 32),
    ],
)
def test_layers_with_a_window_are_known_from_the_config(others: dict[str, Any], full: int) -> None:
    kinds = Model("it", {**LLAMA, "sliding_window": 512, **others}, 2).kinds
    assert [name for name, _ in kinds].count(FULL) == full


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"num_key_value_heads": None}, "`num_key_value_heads` None, no number of at least 1: add it"),
        ({"num_hidden_layers": "32"}, "`num_hidden_layers` '32'"),
        ({"kv_lora_rank": 512, "model_type": "deepseek_v3"}, "no `qk_rope_head_dim`"),
        ({"kv_lora_rank": 512, "model_type": "minicpm3"}, "its `model_type` minicpm3 is none of deepseek_v2"),
        ({"sliding_window": 512}, "`sliding_window` and no `layer_types`: add it"),
        ({"attention_chunk_size": 512}, "`attention_chunk_size` and no `layer_types`: add it"),
        ({"layer_types": ["linear_attention", FULL] * 16}, "layers of linear_attention in `layer_types`"),
        ({"layer_types": [FULL]}, "1 `layer_types` for 32 layers"),
        ({"layer_types": [SLIDING] * 32}, "no `sliding_window`"),
        ({"mamba_d_state": 16}, "`mamba_d_state`: layers with a state"),
        ({"index_topk": 2048}, "`index_topk`: sparse attention"),
        ({"num_kv_shared_layers": 10}, "`num_kv_shared_layers`: layers that share"),
    ],
)
def test_a_model_whose_bytes_are_not_known_is_refused_by_its_key(others: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as refused:
        estimated({**LLAMA, **others}).prompt(1024)
    assert says in str(refused.value)


@pytest.mark.parametrize(("ranks", "says"), [((3, 3), "3 ranks"), ((4, 6), "one must be a multiple of the other")])
def test_ranks_that_vllm_cannot_have_are_refused(ranks: tuple[int, int], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        estimated(LLAMA, ranks).prompt(1024)


def test_several_kinds_of_layers_need_at_most_as_many_ranks_on_d() -> None:
    with pytest.raises(ModelError, match="several kinds of layers"):
        estimated(dict(MODELS["gemma-3-27b"]), (1, 2))


def test_the_parameters_of_known_models_are_those_in_their_names() -> None:
    """Of a mixture of experts those that a token uses. Embeddings do not count."""
    active = {"deepseek-v3": 37, "gpt-oss-120b": 5.1, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22}
    for name in MODELS:
        billions = active.get(name) or float(name.rsplit("-", 1)[1].removesuffix("b"))
        assert 0.8 < model_of(name).parameters / (1e9 * billions) <= 1, name


def test_attention_makes_long_prompts_slower_on_a_gpu() -> None:
    model = model_of("llama-3.1-8b")
    seconds = of_gpu(model, "H100", 1)
    assert seconds(0, 8192) / (2 * model.parameters * 8192 / (0.6 * 989e12)) == pytest.approx(1.15, abs=0.01)
    assert seconds(0, 8192) + seconds(8192, 16384) == pytest.approx(seconds(0, 16384))
    assert of_gpu(model, "H100", 4)(0, 8192) == pytest.approx(seconds(0, 8192) / 4)


def test_a_whole_push_exposes_its_transfer_and_a_push_by_layer_one_layer() -> None:
    prompt = estimated(LLAMA).prompt(16384)
    transfer_s = prompt.bytes / FREE.rate
    exposed = {mode: push.exposed_s for mode, push in prompt.pushes.items()}
    assert exposed[PushMode.WHOLE] == pytest.approx(transfer_s)
    assert exposed[PushMode.LAYER] == pytest.approx(transfer_s / 2 / 32), "two chunks of 32 layers"
    assert exposed[PushMode.AUTO] == pytest.approx(exposed[PushMode.LAYER])
    writes = {mode: len(push.writes) for mode, push in prompt.pushes.items()}
    assert writes[PushMode.LAYER] == 64
    assert writes[PushMode.WHOLE] == 1
    assert 2 < writes[PushMode.AUTO] < 16
    assert prompt.ttft_s(PushMode.WHOLE) == pytest.approx(16384 / 20_000 + transfer_s)


def test_a_slow_link_exposes_what_it_cannot_take_during_prefill() -> None:
    slow = replace(FREE, rate=1e9)
    prompt = estimated(LLAMA, wire=slow).prompt(16384)
    late_s = prompt.bytes / slow.rate - prompt.prefill_s * (1 - 1 / 64)
    assert prompt.pushes[PushMode.AUTO].exposed_s == pytest.approx(late_s, rel=1e-3)
    assert prompt.keeps_up_from == pytest.approx(131_072 * 20_000)
    assert prompt.card_use == pytest.approx(131_072 * 20_000 / 1e9)


def test_ranks_of_p_share_a_card_of_d() -> None:
    exposed = [
        estimated(LLAMA, ranks).prompt(4096).pushes[PushMode.WHOLE].exposed_s for ranks in ((1, 1), (4, 1), (4, 4))
    ]
    assert exposed == pytest.approx([exposed[0], exposed[0], exposed[0] / 4])


@pytest.mark.parametrize(("ranks", "descriptors"), [((1, 1), 1), ((2, 1), 1), ((1, 2), 2), ((2, 2), 1)])
def test_a_block_has_a_descriptor_for_each_rank_of_d_that_gets_a_part(ranks: tuple[int, int], descriptors: int) -> None:
    wire = Wire(rate=math.inf, write_s=1.0, descriptor_s=1e-3)
    exposed_s = estimated(LLAMA, ranks, wire=wire).prompt(160).pushes[PushMode.WHOLE].exposed_s
    assert exposed_s == pytest.approx(1.0 + descriptors * 10 * 32 * 1e-3)


def test_where_by_layer_ceases_to_pay_it_gains_one_percent() -> None:
    found = estimated(LLAMA)
    rate = found.prompt(16384).pays_up_to()
    assert 100e9 < rate < 1000e9
    prompt = replace(found, wire=replace(FREE, rate=rate)).prompt(16384)
    auto, whole = (prompt.ttft_s(mode) for mode in ENDS)
    assert (whole - auto) / whole == pytest.approx(PAYS, rel=1e-3)


def test_by_layer_pays_on_any_link_if_descriptors_alone_take_long_enough() -> None:
    assert estimated(LLAMA, wire=replace(FREE, descriptor_s=7e-6)).prompt(16384).pays_up_to() == math.inf


def test_estimates_agree_with_measurements_on_emulated_links() -> None:
    """Small exposed times are those of a link that lets 1 MB through at once, and of threads on two cores."""
    found = list(estimates.comparisons(ROOT))
    assert len(found) > 10
    for each in found:
        if each.measured_s > 0.02:
            assert abs(each.off) < 0.2, each
        else:
            assert abs(each.estimated_s - each.measured_s) < 0.01, each
        if each.measured_ttft_s is not None and each.estimated_ttft_s is not None:
            assert 0.8 < each.estimated_ttft_s / each.measured_ttft_s < 1.2, each


def test_a_gpus_prefill_agrees_with_its_measurement() -> None:
    for tokens, measured, estimated in estimates.prefills(ROOT):
        assert estimated == pytest.approx(measured, rel=0.2), tokens


# The command.


def run(*words: object) -> Any:
    return runner.invoke(app, ["estimate", *map(str, words)], env={"COLUMNS": "200"})


def test_the_table_fits_a_terminal_and_says_what_it_does_not_know() -> None:
    result = run("llama-3.1-405b", "--tp", 16, "--gpu", "H100", "--link", "0.05", "--tokens", "64,8192")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for known in (
        "405b, TP 16 on P and 16 on D",
        "7.9 GiB",
        "request",
        "P for one D",
        "60% of what H100",
        "Pull and stock",
    ):
        assert known in result.stdout


def test_json_has_the_figures_of_the_table() -> None:
    result = run("llama-3.1-8b", "--tokens-per-s", 20000, "--link", "80gbit", "--tokens", "16384", "--json")
    found = json.loads(result.stdout)
    (prompt,) = found["prompts"]
    assert found["link"] == {"rate": 1e10, "write_s": pytest.approx(20e-6), "descriptor_s": pytest.approx(0.3e-6)}
    assert prompt["bytes"] == 16384 * 131_072
    assert prompt["modes"]["request"]["ttft_s"] == pytest.approx(
        prompt["prefill_s"] + prompt["modes"]["request"]["exposed_s"]
    )
    assert prompt["modes"].keys() == {"auto", "layer", "request"}
    assert any("P's speed is the same" in sentence for sentence in found["not_known"])


def test_a_config_file_is_read_with_its_language_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vision_config": {}, "text_config": LLAMA}))
    options = ("--tokens-per-s", 20000, "--link", 10, "--tokens", 1024, "--json")
    (of_file,), (of_name,) = (json.loads(run(name, *options).stdout)["prompts"] for name in (path, "llama-3.1-8b"))
    assert of_file == of_name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpt-5", "--gpu", "H100", "--link", "10"], "there is no file gpt-5; known names: llama-3.2-3b"),
        (["{}", "--gpu", "H100", "--link", "10"], "is a folder: name its config.json"),
        (["{}/broken.json", "--gpu", "H100", "--link", "10"], "broken.json is no JSON"),
        (["{}/list.json", "--gpu", "H100", "--link", "10"], "list.json is no JSON object"),
        (["{}/fp8.json", "--gpu", "H100", "--link", "10"], "say --kv-cache-dtype fp8"),
        (["{}/slim.json", "--gpu", "H100", "--link", "10"], "no `intermediate_size`: add it, or give P's speed"),
        (["llama-3.1-8b", "--link", "10"], "either --gpu or --tokens-per-s"),
        (["llama-3.1-8b", "--link", "10", "--gpu", "H100", "--tokens-per-s", "1"], "either --gpu or --tokens-per-s"),
        (["llama-3.1-8b", "--link", "10", "--tokens-per-s", "0"], "must be more than 0"),
        (["llama-3.1-8b", "--link", "10", "--gpu", "TPU"], "--gpu TPU is none of A100"),
        (["llama-3.1-8b", "--link", "fast", "--gpu", "H100"], "--link fast is no rate"),
        (["llama-3.1-8b", "--link", "10", "--gpu", "H100", "--tokens", "8k"], "--tokens 8k are no prompt lengths"),
        (["llama-3.1-8b", "--link", "10", "--gpu", "H100", "--kv-cache-dtype", "int4"], "int4 is none of auto"),
        (
            ["llama-3.1-8b", "--link", "10", "--gpu", "H100", "--tokens", "64", "--plot", "{}/one.txt"],
            "one.txt cannot be written",
        ),
    ],
)
def test_a_wrong_word_is_named_with_the_fix(words: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "fp8.json").write_text(
        json.dumps({**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}})
    )
    (tmp_path / "slim.json").write_text(
        json.dumps({**LLAMA, "intermediate_size": None}).replace('"intermediate_size"', '"x"')
    )
    result = run(*(word.format(tmp_path) for word in words))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in " ".join(result.stderr.replace("│", " ").split())


def test_the_picture_has_a_line_for_each_mode(tmp_path: Path) -> None:
    path = tmp_path / "one.svg"
    result = run("llama-3.1-8b", "--gpu", "H100", "--link", "100gbit", "--tokens", "512,2048", "--plot", path)
    assert result.exit_code == 0
    picture = path.read_text()
    assert "<!-- llama-3.1-8b, 2,048 tokens" in picture
    for mode, colour in COLOURS.items():
        assert f"<!-- {mode} -->" in picture
        assert re.search(rf'"fill: none;[^"]* stroke: {colour}', picture), mode


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("llama-3.1-8b", "--gpu", "H100", "--link", "10", "--tokens", "512", "--plot", tmp_path / "one.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
