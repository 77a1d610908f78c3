"""vLLM's front end refuses a request with bad `kv_transfer_params`, and its client gets the reason.

vLLM's NIXL connector is slow to import, so this module does not import the connector.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from layerpush.core.config import CONNECTOR_NAME, LayerPushConfig
from layerpush.core.request_params import (
    MAX_OUTER_ID_CHARS,
    KvRole,
    ParamsError,
    check_params,
    check_request_id,
    is_pushed,
)

BY_PATH = "layerpush.nixl"
"""The `kv_connector_module_path` where layerpush's connector has the names of vLLM's."""


class ConnectorSettings(NamedTuple):
    """The settings by which one layerpush connector of an engine accepts or refuses params."""

    role: KvRole
    config: LayerPushConfig


def connectors_in(transfer: Mapping[str, Any]) -> Iterator[ConnectorSettings]:
    """layerpush's connectors in the fields of a `--kv-transfer-config`, those inside of its MultiConnector, too.

    Raises ``ConfigError`` for a bad `kv_connector_extra_config`.
    """
    extra = transfer.get("kv_connector_extra_config") or {}
    if transfer.get("kv_connector") == CONNECTOR_NAME or transfer.get("kv_connector_module_path") == BY_PATH:
        yield ConnectorSettings(transfer["kv_role"], LayerPushConfig.from_extra_config(extra))
    elif transfer.get("kv_connector") == "MultiConnector":
        for inner in extra.get("connectors") or ():
            yield from connectors_in(inner)


def pushed_params(sampling_params: Any) -> dict[str, Any] | None:
    """The request's ``kv_transfer_params`` if this engine is to push its KV."""
    transfer = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params")
    return transfer if is_pushed(transfer) else None


def checking(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Puts the check in front of `InputProcessor.process_inputs`, which all of vLLM's Python front ends call."""
    known: weakref.WeakKeyDictionary[Any, tuple[ConnectorSettings, ...]] = weakref.WeakKeyDictionary()

    @functools.wraps(plain)
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in known:
            transfer = self.vllm_config.kv_transfer_config
            known[self] = () if transfer is None else tuple(connectors_in(vars(transfer)))
        for settings in known[self]:
            _check(params, request_id, settings)
        return plain(self, request_id, prompt, params, *args, **kwargs)

    return process_inputs


def _check(sampling_or_pooling: Any, request_id: str, settings: ConnectorSettings) -> None:
    """Raises vLLM's `VLLMValidationError` unless the connector accepts this request."""
    extra = getattr(sampling_or_pooling, "extra_args", None)
    if not isinstance(extra, dict):
        return
    try:
        check_params(extra.get("kv_transfer_params"), settings.role, settings.config)
        check_request_id(extra.get("kv_transfer_params"), request_id, MAX_OUTER_ID_CHARS)
    except ParamsError as error:
        from vllm.exceptions import VLLMValidationError  # vLLM answers it with HTTP status 400

        raise VLLMValidationError(str(error), parameter=error.parameter) from None
