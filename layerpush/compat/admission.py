"""vLLM's front end refuses a request with bad `kv_transfer_params`, and its client gets the reason.

vLLM's NIXL connector is slow to import, so this module does not import the connector.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from layerpush.core.request_params import (
    MAX_OUTER_ID_CHARS,
    ParamsError,
    check_params,
    check_request_id,
    is_pushed,
)
from layerpush.core.transfer_config import ConnectorSettings, connectors_in


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
