"""A `--kv-transfer-config`: the level of each of its keys, and layerpush's connectors in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from layerpush.core.config import (
    CONNECTOR_NAME,
    EXTRA,
    TRANSFER_FIELDS,
    VLLM_KEYS,
    ConfigError,
    LayerPushConfig,
    key_types,
    unknown,
)
from layerpush.core.request_params import KvRole

BY_PATH = "layerpush.nixl"
"""The `kv_connector_module_path` where layerpush's connector has the names of vLLM's."""
MULTI = "MultiConnector"
_OF_THE_ENGINE = frozenset({"engine_id", "kv_load_failure_policy"})
"""Fields of the whole engine: vLLM ends with the first one inside of a MultiConnector, and does not read the second."""


class ConnectorSettings(NamedTuple):
    """The settings by which one layerpush connector of an engine accepts or refuses params."""

    role: KvRole
    config: LayerPushConfig


def connectors_in(transfer: Mapping[str, Any]) -> Iterator[ConnectorSettings]:
    """layerpush's connectors in the fields of a `--kv-transfer-config`, those inside of its MultiConnector, too.

    Raises ``ConfigError`` for a bad `kv_connector_extra_config`.
    """
    extra = transfer.get(EXTRA) or {}
    if transfer.get("kv_connector") == CONNECTOR_NAME or transfer.get("kv_connector_module_path") == BY_PATH:
        yield ConnectorSettings(transfer["kv_role"], LayerPushConfig.from_extra_config(extra))
    elif transfer.get("kv_connector") == MULTI:
        for inner in extra.get("connectors") or ():
            yield from connectors_in(inner)


def check_levels(transfer: object, where: str = "--kv-transfer-config") -> None:
    """Check the names of the fields, also inside of a MultiConnector. vLLM checks their values.

    Raises ``ConfigError`` for an unknown name, for a key of another level, and for a missing `kv_role`.
    """
    if not isinstance(transfer, Mapping):
        raise ConfigError(f"{where} is {transfer!r}; it must be a JSON object")
    keys = {**key_types(), **VLLM_KEYS}
    for field in transfer:
        if field in keys:
            raise ConfigError(f"{where}: {field!r} belongs one level down, into {EXTRA!r}")
        if field not in TRANSFER_FIELDS:
            raise ConfigError(unknown(where, "field", field, TRANSFER_FIELDS, "vLLM's fields"))
    if "kv_role" not in transfer:
        raise ConfigError(f'{where}: \'kv_role\' is missing: "kv_producer" for a P, "kv_consumer" for a D')
    extra = transfer.get(EXTRA, {})
    if not isinstance(extra, Mapping):
        raise ConfigError(f"{where}: {EXTRA!r} is {extra!r}; it must be a JSON object")
    if transfer.get("kv_connector") != MULTI:
        return
    for key in extra.keys() & keys.keys():
        raise ConfigError(f"{where}: {key!r} belongs into {EXTRA!r} of an entry of 'connectors'")
    inner = extra.get("connectors")
    if not isinstance(inner, list):
        raise ConfigError(f"{where}: 'connectors' of {MULTI} is {inner!r}; it must be a list of JSON objects")
    for number, entry in enumerate(inner):
        place = f"{where}: connectors[{number}]"
        check_levels(entry, place)
        for field in _OF_THE_ENGINE & entry.keys():
            raise ConfigError(f'{place}: {field!r} belongs one level up, beside "kv_connector": "{MULTI}"')
