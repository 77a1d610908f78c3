"""kv_connector_extra_config: accepted keys, refusals, and helpful messages."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from layerpush.core.config import TRANSFER_FIELDS, VLLM_KEYS, ConfigError, LayerPushConfig
from scripts.docgen import options
from tests.quotes import package

OWN_KEYS = {
    "layerwise",
    "granularity",
    "layerwise_min_tokens",
    "packing",
    "staging_bytes",
    "trace_dir",
    "first_token",
    "awaited_share",
    "peer_timeout_s",
    "answer_early",
    "unknown_request_timeout_s",
    "verify",
    "write_timeout_s",
    "bidirectional_kv_xfer",
    "allowed_hosts",
}
HOSTS = "list of host names, IP addresses and networks or null"


def test_every_key_is_accepted() -> None:
    extra: dict[str, object] = {
        "layerwise": False,
        "granularity": "chunk",
        "layerwise_min_tokens": 512,
        "packing": "gather",
        "staging_bytes": 0,
        "trace_dir": "/tmp/trace",
        "first_token": "prefill",
        "awaited_share": 0.25,
        "peer_timeout_s": 1,
        "answer_early": True,
        "unknown_request_timeout_s": 1,
        "verify": 0.5,
        "write_timeout_s": 600,
        "bidirectional_kv_xfer": True,
        "allowed_hosts": ["Prefill-0.cluster.local", "10.0.0.7", "10.0.0.0/8", "fd00::/8", "[::1]"],
    }
    assert set(extra) == OWN_KEYS
    config = LayerPushConfig.from_extra_config(extra)
    taken = {key: getattr(config, key) for key in extra}
    assert taken | {"allowed_hosts": list(taken["allowed_hosts"])} == extra
    assert hash(config) == hash(LayerPushConfig.from_extra_config(extra))


def test_an_empty_list_of_hosts_differs_from_no_list() -> None:
    assert LayerPushConfig.from_extra_config({"allowed_hosts": []}).allowed_hosts == ()
    assert LayerPushConfig.from_extra_config({"allowed_hosts": None}).allowed_hosts is None


def test_vllms_own_keys_pass() -> None:
    extra: dict[str, object] = {
        "backends": ["UCX", "GDS"],
        "decoder_kv_blocks_ttl": 480,
        "enforce_handshake_compat": False,
        "engine_ttl": -1,
        "kv_lease_duration": 0.2,
        "kv_recompute_threshold": 64,
        "num_threads": 0,
        "push_registration_timeout": 1.5,
    }
    assert extra.keys() == VLLM_KEYS.keys()
    assert LayerPushConfig.from_extra_config(extra) == LayerPushConfig()


@pytest.mark.parametrize(
    ("key", "value", "choices"),
    [
        ("layerwise", 1, "true or false"),
        ("layerwise", None, "true or false"),
        ("layerwise", "on", "true or false"),
        ("granularity", "block", '"auto" or "layer" or "chunk"'),
        ("granularity", None, '"auto" or "layer" or "chunk"'),
        ("layerwise_min_tokens", -5, "integer >= 0"),
        ("layerwise_min_tokens", 1.0, "integer >= 0"),
        ("layerwise_min_tokens", True, "integer >= 0"),
        ("layerwise_min_tokens", None, "integer >= 0"),
        ("layerwise_min_tokens", "256k", "integer >= 0"),
        ("packing", "on", '"auto" or "off" or "gather"'),
        ("staging_bytes", -1, "integer from 0 to 1073741824"),
        ("staging_bytes", 1073741825, "integer from 0 to 1073741824"),
        ("trace_dir", 3, "non-empty string or null"),
        ("trace_dir", "", "non-empty string or null"),
        ("peer_timeout_s", 0, "integer >= 1"),
        ("verify", 1.5, "number from 0 to 1"),
        ("verify", "0.5", "number from 0 to 1; write 0.5 without quotes"),
        ("write_timeout_s", -1, "integer >= 1"),
        ("num_threads", -1, "integer >= 0"),
        ("kv_lease_duration", 0, "number > 0"),
        ("backends", "UCX", 'list of names of NIXL backends; write ["UCX"]'),
        ("backends", [], "list of names of NIXL backends"),
        ("push_registration_timeout", "480", "number >= 0; write 480 without quotes"),
        ("engine_ttl", None, "number"),
        ("enforce_handshake_compat", 1, "true or false"),
        ("kv_recompute_threshold", 1.5, "integer"),
        ("allowed_hosts", False, HOSTS),
        ("allowed_hosts", {"10.0.0.7": True}, HOSTS),
        ("allowed_hosts", [10], HOSTS),
        ("allowed_hosts", ["10.0.0.7", None], HOSTS),
        ("allowed_hosts", [""], HOSTS),
        ("allowed_hosts", ["a" * 256], HOSTS),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_choices(key: str, value: object, choices: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        LayerPushConfig.from_extra_config({key: value})
    assert repr(key) in str(refusal.value)
    assert repr(value) in str(refusal.value)
    assert f"choices: {choices}" in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("layerwise_min_tokens", "512", "write 512 without quotes"),
        ("layerwise", "True", "write true without quotes"),
        ("granularity", "Chunk", 'write "chunk"'),
        ("granularity", "layers", 'did you mean "layer"?'),
        ("packing", "gathered", 'did you mean "gather"?'),
        ("peer_timeout_s", "20", "write 20 without quotes"),
        ("allowed_hosts", "10.0.0.0/8", 'write ["10.0.0.0/8"]'),
    ],
)
def test_a_near_miss_is_refused_with_a_hint(key: str, value: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        LayerPushConfig.from_extra_config({key: value})
    assert str(refusal.value).endswith(hint)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("10.1.2.3/8", "'10.1.2.3/8' has host bits set; write '10.0.0.0/8'"),
        ("fd00::1/8", "'fd00::1/8' has host bits set; write 'fd00::/8'"),
        ("10.0.0.0/33", "'10.0.0.0/33' is no network in CIDR notation"),
        ("prefill-0/24", "'prefill-0/24' is no network in CIDR notation"),
        ("/8", "'/8' is no network in CIDR notation"),
        ("prefill-0:5600", "'prefill-0:5600' is no IPv6 address, and a port does not belong here"),
        ("fd00:::1", "'fd00:::1' is no IPv6 address"),
        ("*.cluster.local", "'*.cluster.local' has a wildcard; list each name"),
        ("10.0.0", "'10.0.0' is no host name and no IP address"),
        ("10.0.0.256", "'10.0.0.256' is no host name and no IP address"),
        ("prefill 0", "'prefill 0' is no host name and no IP address"),
        ("-prefill", "'-prefill' is no host name and no IP address"),
        ("prefill\n", r"'prefill\n' is no host name and no IP address"),
    ],
)
def test_a_bad_host_is_refused_with_its_name_and_the_reason(entry: str, why: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        LayerPushConfig.from_extra_config({"allowed_hosts": ["10.0.0.7", entry]})
    assert str(refusal.value).startswith(f"kv_connector_extra_config: 'allowed_hosts': {why}")


@pytest.mark.parametrize(
    ("key", "meant"),
    [("layerwize", "layerwise"), ("layerwise_min_token", "layerwise_min_tokens"), ("num_thread", "num_threads")],
)
def test_an_unknown_key_is_refused_with_the_closest_one(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key {key!r}; did you mean {meant!r}"):
        LayerPushConfig.from_extra_config({key: 1})


def test_a_key_that_is_gone_is_refused_with_its_remedy() -> None:
    with pytest.raises(ConfigError, match="'min_write_bytes' is gone: remove it; with `granularity: \"auto\"`"):
        LayerPushConfig.from_extra_config({"min_write_bytes": 0})


@pytest.mark.parametrize("key", sorted(TRANSFER_FIELDS))
def test_a_field_one_level_too_low_is_refused_with_its_place(key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}' belongs one level up, beside 'kv_connector'"):
        LayerPushConfig.from_extra_config({key: "x"})


def test_an_unknown_key_without_a_close_match_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError) as refusal:
        LayerPushConfig.from_extra_config({"colour": "red"})
    assert "did you mean" not in str(refusal.value)
    assert all(key in str(refusal.value) for key in {*OWN_KEYS, *VLLM_KEYS})


def test_documentation_covers_every_key() -> None:
    rows = [line.strip("| ").split(" | ") for line in options.settings().splitlines()[2:]]
    table = {key.strip("`"): cells for key, *cells in rows}
    assert set(table) == OWN_KEYS
    assert all(meaning.endswith(".") for *_, meaning in table.values())
    assert table["granularity"][:2] == ['"auto" or "layer" or "chunk"', '`"auto"`']
    assert table["trace_dir"][1] == "`null`"


def test_other_keys_match_the_keys_of_vllms_nixl_connectors() -> None:
    """A missing key would make us refuse an option of vLLM's."""
    folder = package("vllm") / "distributed/kv_transfer/kv_connector/v1/nixl"
    read = {key for file in folder.glob("*.py") for key in _keys_read(file)}
    assert read == {*VLLM_KEYS, "bidirectional_kv_xfer"}


def test_the_fields_are_those_of_vllms_class() -> None:
    tree = ast.parse((package("vllm") / "config/kv_transfer.py").read_text())
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVTransferConfig")
    assert {node.target.id for node in config.body if isinstance(node, ast.AnnAssign)} == TRANSFER_FIELDS


def _keys_read(file: Path) -> set[str]:
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get_from_extra_config"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }
