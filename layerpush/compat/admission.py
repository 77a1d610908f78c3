"""vLLM's front end refuses a request with bad `kv_transfer_params`, and its client gets the reason.

vLLM's NIXL connector is slow to import, and most vLLM processes have no front end. So this module imports neither the
connector nor the front end: it patches the front end when vLLM imports it.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from layerpush.compat.import_hook import ImportHook
from layerpush.core.config import CONNECTOR_NAME, LayerPushConfig
from layerpush.core.request_params import MAX_OUTER_ID_CHARS, KvRole, ParamsError, check_params, check_request_id

FRONT_END = "vllm.v1.engine.input_processor"
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


class AdmissionHook(ImportHook):
    """Puts the check in front of `InputProcessor.process_inputs`, which all of vLLM's Python front ends call."""

    names = frozenset({FRONT_END})

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, tuple[ConnectorSettings, ...]] = weakref.WeakKeyDictionary()

    def patch(self, module: ModuleType) -> None:
        processor: Any = getattr(module, "InputProcessor", None)
        plain: Any = getattr(processor, "process_inputs", None)
        if plain is None:
            _warn(f"{FRONT_END}.InputProcessor.process_inputs does not exist in this vLLM")
            return
        if hasattr(plain, "checked_by_layerpush"):
            return
        check = self.check

        @functools.wraps(plain)
        def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
            check(self, params, request_id)
            return plain(self, request_id, prompt, params, *args, **kwargs)

        checked: Any = process_inputs
        checked.checked_by_layerpush = True
        processor.process_inputs = checked

    def check(self, processor: Any, params: Any, request_id: str) -> None:
        """Raises vLLM's `VLLMValidationError` unless all of the engine's layerpush connectors accept this request."""
        if processor not in self._known:
            transfer = processor.vllm_config.kv_transfer_config
            self._known[processor] = () if transfer is None else tuple(connectors_in(vars(transfer)))
        for settings in self._known[processor]:
            _check(params, request_id, settings)


def _check(sampling_or_pooling: Any, request_id: str, settings: ConnectorSettings) -> None:
    extra = getattr(sampling_or_pooling, "extra_args", None)
    if not isinstance(extra, dict):
        return
    try:
        check_params(extra.get("kv_transfer_params"), settings.role, settings.config)
        check_request_id(extra.get("kv_transfer_params"), request_id, MAX_OUTER_ID_CHARS)
    except ParamsError as error:
        from vllm.exceptions import VLLMValidationError  # vLLM answers it with HTTP status 400

        raise VLLMValidationError(str(error), parameter=error.parameter) from None


def _warn(problem: str) -> None:
    logging.getLogger(f"vllm.{__name__}").warning(
        "%s: requests with bad kv_transfer_params are not refused with a reason, but run without a KV transfer", problem
    )
