"""Checks a `--kv-transfer-config` by the code of an engine's start, and by the advice of the pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layerpush.apps.checks.finding import Result, fail, ok, warn
from layerpush.compat import patches
from layerpush.core.config import CONNECTOR_NAME, EXTRA, ConfigError, unknown
from layerpush.core.transfer_config import MULTI, ConnectorSettings, check_levels, connectors_in
from layerpush.telemetry.trace_file import trace_folder

RDMA = Path("/sys/class/infiniband")
"""It has an entry for each RDMA device of this machine."""


def read(text: str) -> Mapping[str, Any]:
    """The fields in ``text``: JSON, or ``@`` and the name of a file with JSON. Raises ``ConfigError``."""
    try:
        transfer = json.loads(Path(text[1:]).expanduser().read_text() if text.startswith("@") else text)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"--kv-transfer-config: {text}: {getattr(error, 'strerror', error)}") from None
    except ValueError as error:
        raise ConfigError(f"--kv-transfer-config is no JSON: {error}") from None
    check_levels(transfer)
    return dict(transfer)


def connectors(transfer: Mapping[str, Any]) -> list[ConnectorSettings]:
    """layerpush's connectors. Raises ``ConfigError`` if there is none, and for a bad value of a key of theirs."""
    found = list(connectors_in(transfer))
    name = transfer.get("kv_connector")
    if not found and name == MULTI:
        raise ConfigError(f"--kv-transfer-config: no entry of 'connectors' is \"{CONNECTOR_NAME}\"")
    if not found:
        names = (CONNECTOR_NAME, MULTI)
        raise ConfigError(unknown("--kv-transfer-config", "kv_connector", str(name), names, "those with layerpush"))
    return found


def check_transfer_config(text: str) -> Result:
    """Check what an engine with these fields refuses at its start, and what the pages advise against."""
    try:
        transfer = read(text)
        found = connectors(transfer)
        for settings in found:
            _start(settings, transfer)
        if find_spec("vllm"):  # its import takes seconds: it comes last
            _check_by_vllm(transfer)
    except ConfigError as error:
        return fail(str(error), "correct it before an engine starts; docs/configuration.md has all keys and values")
    shown = "; ".join(_facts(settings, transfer) for settings in found)
    advice = [advice for settings in found for advice in _advice(settings, transfer)]
    return warn(shown, "\n".join(dict.fromkeys(advice))) if advice else ok(shown)


def _check_by_vllm(transfer: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if vLLM's own class refuses the fields, or those of an entry of a MultiConnector."""
    from vllm.config import KVTransferConfig

    for entry in _entries(transfer):
        try:
            KVTransferConfig(**entry)
        except ValueError as error:
            problems: Any = error.errors() if hasattr(error, "errors") else [{"loc": (), "msg": error}]
            said = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ") for each in problems]
            raise ConfigError(f"--kv-transfer-config: vLLM refuses it: {'; '.join(said)}") from None


def _entries(transfer: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield transfer
    if transfer.get("kv_connector") == MULTI:
        for inner in transfer[EXTRA]["connectors"]:
            yield from _entries(inner)


def _start(settings: ConnectorSettings, transfer: Mapping[str, Any]) -> None:
    """The other checks of an engine's start that need no engine. Raises ``ConfigError``."""
    if settings.role != "kv_producer":
        patches.check_failure_policy(transfer.get("kv_load_failure_policy", "fail"))
    if settings.config.trace_dir is not None:
        trace_folder(settings.config.trace_dir)


def _facts(settings: ConnectorSettings, transfer: Mapping[str, Any]) -> str:
    pushes = "" if settings.role == "kv_consumer" else f", pushes by mode {settings.config.mode}"
    loads = (
        "" if settings.role == "kv_producer" else f", failed loads: {transfer.get('kv_load_failure_policy', 'fail')}"
    )
    return f"{settings.role}{pushes}{loads}"


def _advice(settings: ConnectorSettings, transfer: Mapping[str, Any]) -> Iterator[str]:
    """The advice of the pages for settings with which an engine starts."""
    if settings.role != "kv_consumer" and not transfer.get("engine_id"):
        yield 'set "engine_id", another one for each P: without it P has a new name for routers after each restart'
    if settings.config.allowed_hosts is None:
        yield 'set "allowed_hosts" to the addresses of the other side, or clients choose the hosts: docs/security.md'
    threads = [entry.get(EXTRA, {}).get("num_threads") for entry in _entries(transfer)]
    if any(threads) and not any(RDMA.glob("*")):
        yield 'set "num_threads": 0, for UCX over TCP: docs/deployment.md#ucx-and-nics'
    if transfer.get("kv_buffer_device") == "cpu":
        yield 'remove "kv_buffer_device": "cpu": on a GPU it makes the engine push whole requests'
