"""kv_transfer_params: accepted ones, and the text of each refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.config import LayerPushConfig
from layerpush.core.request_params import KvRole, ParamsError, check_params, chosen_mode, is_returned

PLAIN = LayerPushConfig()
TO_P = {"do_remote_decode": True, "do_remote_prefill": False}
TO_D = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "prefill-0",
    "remote_request_id": "cmpl-1-0-abcdef01",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 1500,
    "transfer_mode": "push",
    "remote_prefill_cached_tokens": 0,
}
"""The answer of vLLM 0.32's push connector on P, and its scheduler's additions."""
DROPPED = object()


def refusal(params: object, role: KvRole = "kv_both", config: LayerPushConfig = PLAIN) -> str:
    with pytest.raises(ParamsError) as refused:
        check_params(params, role, config)
    return str(refused.value)


def changed(**changes: object) -> dict[str, object]:
    return {key: value for key, value in (TO_D | changes).items() if value is not DROPPED}


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        TO_P,
        TO_D,
        {"do_remote_decode": True},
        {"do_remote_decode": None, "do_remote_prefill": None},
        # routers send these to P
        TO_P | {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None},
        changed(remote_block_ids=DROPPED, dcp_size=DROPPED, pp_size=DROPPED, remote_num_tokens=DROPPED),
        changed(transfer_mode=DROPPED, remote_prefill_cached_tokens=DROPPED, do_remote_decode=DROPPED),
        changed(remote_prefill_cached_tokens=None, remote_block_ids=None, router="nginx", nested={"a": [1]}),
        changed(remote_host="prefill-0.cluster.local", remote_port=65535, tp_size=1024, pp_size=64),
        changed(remote_host="[fd00::1]", remote_port=1, remote_engine_id="ünï 7", remote_request_id="x" * 1024),
        *(TO_P | {"layerpush_mode": mode} for mode in ("auto", "layer", "chunk", "request", None)),
        {"do_remote_prefill": False, "tp_size": "many", "layerpush_mode": "fast"},  # P and D do not read them
        changed(layerpush_mode="fast"),  # D need not know how P pushes
        TO_P | {"transfer_id": "tx-1"},
        changed(transfer_id="tx-1"),
        changed(transfer_id=None),
        changed(transfer_id="tx-1", remote_request_id=DROPPED),
        changed(transfer_id="tx-1", remote_request_id=None),
    ],
)
def test_good_params_pass(params: object) -> None:
    check_params(params, "kv_both", PLAIN)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        *((key, DROPPED, f"{key!r} is missing; D needs it to reach the prefill engine; the router copies it from P's")
          for key in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")),
        *((key, None, f"{key!r} is null; D needs it")
          for key in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")),
        ("transfer_id", 7, "'transfer_id' is 7 (int), must be text of 1 to 1024 printable characters; a router that"),
        ("transfer_id", "", "'transfer_id' is '' (str)"),
        ("transfer_id", "x" * 1025, "'transfer_id' is 'xxx"),
        ("do_remote_prefill", "true", "'do_remote_prefill' is 'true' (str), must be true or false"),
        ("do_remote_prefill", 1, "'do_remote_prefill' is 1 (int), must be true or false"),
        ("do_remote_decode", [], "'do_remote_decode' is [] (list), must be true or false"),
        ("do_remote_decode", True, "'do_remote_prefill' is true, and so is 'do_remote_decode'"),
        ("remote_engine_id", "", "'remote_engine_id' is '' (str), must be text of 1 to 1024 printable characters"),
        ("remote_engine_id", 7, "'remote_engine_id' is 7 (int)"),
        ("remote_engine_id", b"p", "'remote_engine_id' is b'p' (bytes)"),
        ("remote_engine_id", ["p"], "'remote_engine_id' is ['p'] (list)"),
        ("remote_engine_id", "p\n", r"'remote_engine_id' is 'p\n' (str)"),
        ("remote_engine_id", "\ud800", r"'remote_engine_id' is '\ud800' (str)"),
        ("remote_request_id", "x" * 1025, "'remote_request_id' is 'xxx"),
        ("remote_request_id", "a\x1b[2J", r"'remote_request_id' is 'a\x1b[2J' (str)"),
        ("remote_request_id", {}, "'remote_request_id' is {} (dict)"),
        ("remote_host", 2130706433, "'remote_host' is 2130706433 (int), must be a host name or an IP address"),
        ("remote_host", "", "'remote_host' is '' (str)"),
        ("remote_host", "a b", "'remote_host' is 'a b' (str)"),
        ("remote_host", "127.0.0.1:5600", "'remote_host' is '127.0.0.1:5600' (str)"),
        ("remote_host", "127.0.0.1:0;evil.example", "'remote_host' is '127.0.0.1:0;evil.example' (str)"),
        ("remote_host", "a" * 256, "of at most 255 characters"),
        *(("remote_port", port, f"'remote_port' is {port!r} ({type(port).__name__}), must be an integer from 1 to")
          for port in (0, -1, 65536, 10**30, "5600", 5600.0, True, [5600])),
        *(("tp_size", size, f"'tp_size' is {size!r} ({type(size).__name__}), must be an integer from 1 to 1024")
          for size in (0, -2, 1025, "1", 1.0, True, {})),
        *(("dcp_size", size, f"'dcp_size' is {size!r} ({type(size).__name__}), must be an integer from 1 to 1024")
          for size in (0, 1025, None, "1")),
        *(("pp_size", size, f"'pp_size' is {size!r} ({type(size).__name__}), must be an integer from 1 to 64")
          for size in (0, 65, None, "1", False)),
        *(("remote_prefill_cached_tokens", count, f"'remote_prefill_cached_tokens' is {count!r}")
          for count in (-1, True, "7", 1.5)),
        ("transfer_mode", "pull", "'transfer_mode' is 'pull' (str), must be 'push': P's connector has to be a push"),
        ("transfer_mode", ["push"], "'transfer_mode' is ['push'] (list)"),
        ("_p_side_truncated", True, "'_p_side_truncated' is vLLM's own mark; leave it out"),
    ],
)  # fmt: skip
def test_a_bad_key_is_named_with_its_value_and_the_remedy(key: str, value: object, says: str) -> None:
    text = refusal(changed(**{key: value}))
    assert text.startswith("kv_transfer_params: ")
    assert says in text


@pytest.mark.parametrize("mode", ["", "Layer", "packed", True, 0, 1.0, ["layer"], {}])
def test_an_unknown_mode_is_refused_by_the_prefill_engine(mode: object) -> None:
    says = f"'layerpush_mode' is {mode!r} ({type(mode).__name__}), must be one of 'auto', 'layer', 'chunk', 'request'"
    assert refusal(TO_P | {"layerpush_mode": mode}) == f"kv_transfer_params: {says}"
    assert refusal(TO_P | {"layerpush_mode": mode}, "kv_producer", LayerPushConfig(layerwise=False)).endswith(says)


def test_a_request_without_a_mode_uses_the_configured_mode() -> None:
    assert chosen_mode({}) is chosen_mode({"layerpush_mode": None}) is None
    assert chosen_mode(TO_P | {"layerpush_mode": "chunk"}) == "chunk"
    assert [LayerPushConfig().mode, LayerPushConfig(granularity="chunk").mode] == ["auto", "chunk"]
    assert LayerPushConfig(layerwise=False, granularity="chunk").mode == "request"


def test_the_error_has_the_keys_path() -> None:
    with pytest.raises(ParamsError) as refused:
        check_params(changed(tp_size=0), "kv_both", PLAIN)
    assert refused.value.parameter == "kv_transfer_params.tp_size"
    assert isinstance(refused.value, ValueError)
    with pytest.raises(ParamsError) as refused:
        check_params([], "kv_both", PLAIN)
    assert refused.value.parameter == "kv_transfer_params"


@pytest.mark.parametrize("params", [[], [1], "do_remote_prefill", 7, True, 0.5, b"x"])
def test_params_other_than_an_object_are_refused(params: object) -> None:
    assert refusal(params).startswith(f"kv_transfer_params: must be an object, not {params!r}")


def test_a_request_for_the_other_role_is_refused() -> None:
    text = refusal(TO_D, "kv_producer")
    assert "'do_remote_prefill' is true, but this engine's kv_role is 'kv_producer'" in text
    assert "send the request to a decode engine" in text
    text = refusal(TO_P, "kv_consumer")
    assert "'do_remote_decode' is true, but this engine's kv_role is 'kv_consumer'" in text
    assert "send the request to a prefill engine" in text
    check_params(TO_P, "kv_producer", PLAIN)
    check_params(TO_D, "kv_consumer", PLAIN)


def test_a_host_outside_allowed_hosts_is_refused() -> None:
    config = LayerPushConfig(allowed_hosts=("10.0.0.0/8", "prefill-0"))
    for host in ("10.1.2.3", "Prefill-0", "::ffff:10.0.0.1"):
        check_params(changed(remote_host=host), "kv_both", config)
    for host in ("127.0.0.1", "169.254.169.254", "localhost", "prefill-1"):
        text = refusal(changed(remote_host=host), config=config)
        assert f"'remote_host' is {host!r} (str), which is not in this engine's allowed_hosts" in text
        assert "add it to 'allowed_hosts'" in text
    check_params(TO_P | {"remote_host": "169.254.169.254"}, "kv_both", config)  # P does not connect to it


TURNS = LayerPushConfig(bidirectional_kv_xfer=True, allowed_hosts=("127.0.0.1",))
RETURNED = TO_D | TO_P | {"remote_prefixes": "0123abcd"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"remote_host": "10.0.0.1"}, "'remote_host' is '10.0.0.1' (str), which is not in this engine's allowed_hosts"),
        ({"remote_port": 70000}, "'remote_port' is 70000 (int)"),
        ({"remote_num_tokens": -1}, "'remote_num_tokens' is -1 (int)"),
        ({"remote_prefixes": 7}, "'remote_prefixes' is 7 (int), must be text"),
        ({"transfer_mode": "pull"}, "'transfer_mode' is 'pull'"),
    ],
)
def test_a_turn_with_a_bad_name_or_place_is_not_loaded(changes: dict[str, object], says: str) -> None:
    """The request itself is good: P can compute its prompt."""
    with pytest.raises(ParamsError) as refused:
        is_returned(RETURNED | changes, TURNS)
    assert says in str(refused.value)
    check_params(RETURNED | changes, "kv_producer", TURNS)


def test_a_kept_turn_needs_a_name_and_a_place() -> None:
    assert is_returned(RETURNED, TURNS)
    assert not is_returned(RETURNED, PLAIN)
    assert not is_returned(TO_P, TURNS)
    assert not is_returned(RETURNED | {"do_remote_decode": False}, TURNS)
    assert is_returned(RETURNED | {"remote_num_tokens": None, "remote_prefixes": None}, TURNS)
    check_params(RETURNED, "kv_producer", TURNS)
    for key in ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"):
        assert not is_returned(RETURNED | {key: None}, TURNS)
        check_params(RETURNED | {key: None}, "kv_producer", TURNS)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)
VALUES = JSON | st.sampled_from([Unprintable(), 10**6000, "x" * 100_000, ["y" * 9999] * 9999, DROPPED])
CHANGES = st.dictionaries(st.sampled_from([*TO_D, "_p_side_truncated", "layerpush_mode", "other"]), VALUES, max_size=4)


@given(CHANGES.map(lambda changes: changed(**changes)) | JSON)
def test_any_params_pass_or_are_refused_in_one_short_line(params: Any) -> None:
    try:
        check_params(params, "kv_both", PLAIN)
        is_returned(params, LayerPushConfig(bidirectional_kv_xfer=True))
    except ParamsError as error:
        text = str(error)
        assert len(text) < 500
        assert text.isprintable()
        return
    if not params or not params.get("do_remote_prefill"):
        return
    # Then the fields for vLLM are there, with the right types.
    assert params["do_remote_prefill"] is True
    assert all(type(params[key]) is str for key in ("remote_engine_id", "remote_request_id", "remote_host"))
    assert all(type(params.get(key, 1)) is int for key in ("remote_port", "tp_size", "pp_size", "dcp_size"))
    assert 0 < params["remote_port"] < 65536
    assert params.get("remote_prefill_cached_tokens") is None or params["remote_prefill_cached_tokens"] >= 0
