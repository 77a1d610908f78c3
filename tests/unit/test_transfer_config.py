"""`layerpush doctor --kv-transfer-config`: what an engine refuses at its start, and the pages' advice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerpush.apps.checks import transfer_config
from layerpush.apps.checks.finding import Grade, Result
from layerpush.apps.checks.transfer_config import check_transfer_config
from layerpush.compat import patches

OURS = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer"}
SAFE = {"allowed_hosts": ["10.0.0.0/8"], "num_threads": 0}


def multi(*inner: object, **fields: object) -> dict[str, Any]:
    extra = {"connectors": list(inner)} | fields
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def ours(role: str = "kv_consumer", **extra: object) -> dict[str, Any]:
    return OURS | {"kv_role": role, "engine_id": "one", "kv_connector_extra_config": SAFE | extra}


def checked(config: object) -> Result:
    return check_transfer_config(config if isinstance(config, str) else json.dumps(config))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{'kv_role': 1}", "--kv-transfer-config is no JSON: Expecting property name"),
        ("@/no/such/file", "--kv-transfer-config: @/no/such/file: No such file or directory"),
        ([OURS], "it must be a JSON object"),
        (OURS | {"granularity": "layer"}, "'granularity' belongs one level down, into 'kv_connector_extra_config'"),
        (OURS | {"num_threads": 0}, "'num_threads' belongs one level down"),
        (OURS | {"kv_rool": 1}, "unknown field 'kv_rool'; did you mean 'kv_role'?"),
        ({"kv_connector": "LayerwisePushConnector"}, "'kv_role' is missing: \"kv_producer\" for a P"),
        (OURS | {"kv_connector": "LayerwisePush"}, "'LayerwisePush'; did you mean 'LayerwisePushConnector'?"),
        (OURS | {"kv_connector": "NixlConnector"}, "unknown kv_connector 'NixlConnector'"),
        (OURS | {"kv_connector_extra_config": []}, "'kv_connector_extra_config' is []; it must be a JSON object"),
        (ours(granularity="block"), 'choices: "auto" or "layer" or "chunk"'),
        (ours(engine_id="a"), "'engine_id' belongs one level up"),
        (ours(trace_dir="/proc/traces"), "'trace_dir': no directory /proc/traces"),
        (multi(OURS, granularity="layer"), "'granularity' belongs into 'kv_connector_extra_config' of an entry of"),
        (
            multi(OURS | {"kv_load_failure_policy": "fail"}),
            "connectors[0]: 'kv_load_failure_policy' belongs one level up",
        ),
        (multi(OURS | {"engine_id": "a"}), "connectors[0]: 'engine_id' belongs one level up"),
        (multi(OURS | {"verify": 1}), "connectors[0]: 'verify' belongs one level down"),
        (multi(multi(ours() | {"kv_rool": 1})), "connectors[0]: connectors[0]: unknown field 'kv_rool'"),
        (multi("x"), "connectors[0] is 'x'; it must be a JSON object"),
        (multi({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}), "no entry of 'connectors' is"),
        (multi() | {"kv_connector_extra_config": {}}, "'connectors' of MultiConnector is None"),
    ],
)
def test_a_configuration_that_no_engine_takes_fails(config: object, said: str) -> None:
    result = checked(config)
    assert result.verdict is Grade.FAIL
    assert said in result.found
    assert result.advice


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ours() | {"kv_role": "producer"}, "kv_role: "),
        (ours() | {"kv_load_failure_policy": "retry"}, "kv_load_failure_policy: "),
        (ours() | {"engine_id": 7}, "engine_id: "),
        (ours() | {"kv_role": None}, "Please specify kv_role"),
        (multi(OURS | {"kv_role": "consumer"}), "kv_role: "),
    ],
)
def test_vllms_own_class_checks_the_values_of_its_fields(config: dict[str, object], said: str) -> None:
    result = checked(config)
    assert result.verdict is Grade.FAIL
    assert result.found.startswith("--kv-transfer-config: vLLM refuses it: ")
    assert said in result.found


def test_a_patch_that_the_failure_policy_needs_must_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recompute = {"kv_load_failure_policy": "recompute"}
    assert checked(ours() | recompute).verdict is Grade.OK
    monkeypatch.setenv(patches.VARIABLE, "failed-loads")
    result = checked(ours() | recompute)
    assert result.verdict is Grade.FAIL
    assert "LAYERPUSH_WITHOUT_PATCHES leaves out failed-loads" in result.found
    assert checked(ours()).verdict is Grade.OK
    assert checked(ours("kv_producer") | recompute).verdict is Grade.OK


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ours("kv_producer") | {"engine_id": None}, 'set "engine_id"'),
        (ours(allowed_hosts=None), 'set "allowed_hosts"'),
        (ours(num_threads=4), 'set "num_threads": 0'),
        (ours() | {"kv_buffer_device": "cpu"}, 'remove "kv_buffer_device"'),
    ],
)
def test_advice_of_the_pages_is_a_warning(
    config: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_config, "RDMA", tmp_path / "none")
    result = checked(config)
    assert result.verdict is Grade.WARN
    assert result.advice.startswith(said)
    assert "\n" not in result.advice, "one piece of advice for one mistake"


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (ours("kv_producer"), "kv_producer, pushes by mode auto"),
        (ours(), "kv_consumer, failed loads: fail"),
        (ours("kv_both", layerwise=False), "kv_both, pushes by mode request, failed loads: fail"),
        (ours() | {"kv_connector": "NixlConnector", "kv_connector_module_path": "layerpush.nixl"}, "kv_consumer, "),
        (
            multi({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, OURS) | {"engine_id": "a"},
            "kv_consumer, ",
        ),
    ],
)
def test_a_good_configuration_passes(
    config: dict[str, object], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_config, "RDMA", tmp_path)
    (tmp_path / "mlx5_0").touch()
    result = checked(config)
    assert result.found.startswith(shown)
    assert result.verdict is not Grade.FAIL
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert checked(f"@{file}") == result


def test_keys_are_checked_without_torch_or_vllm() -> None:
    code = (
        "import sys, layerpush.apps.checks.transfer_config as c; c.find_spec = lambda name: None; "
        f"print(c.check_transfer_config({json.dumps(ours(granularity='block'))!r}).verdict, "
        f"c.check_transfer_config({json.dumps(ours())!r}).verdict, *{{'torch', 'vllm', 'nixl'}} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["fail", "ok"]
