"""The engine core's own check of `kv_transfer_params`, for requests that do not go through `compat.admission`.

vLLM makes such requests itself: it has the connector clean up after a request that its front end has refused.
"""

from __future__ import annotations

import logging
from typing import Any

from layerpush.core.config import LayerPushConfig
from layerpush.core.request_params import KvRole, ParamsError, check_params, check_request_id
from layerpush.telemetry.peer_errors import PeerErrors

SHOWN_ID_CHARS = 100

logger = logging.getLogger(f"vllm.{__name__}")


class RequestFilter:
    """Drops bad params before they reach the connector, whose code trusts them. Scheduler's thread."""

    def __init__(self, role: KvRole, config: LayerPushConfig) -> None:
        self._role = role
        self._config = config
        self.peer_errors = PeerErrors(logger)

    def drop_invalid(self, request: Any, now: float) -> None:
        """Set bad params to None: then D computes the prompt itself, and P pushes nothing. Never raises."""
        try:
            check_params(request.kv_transfer_params, self._role, self._config)
            check_request_id(request.kv_transfer_params, request.request_id)
        except ParamsError as error:
            text = f"request {request.request_id[:SHOWN_ID_CHARS]} runs without a KV transfer: {error}"
            self.peer_errors.count("bad kv_transfer_params", text, now)
            request.kv_transfer_params = None

    def loads_nothing(self, request: Any, error: ParamsError, now: float) -> None:
        """The turn that a request of P brings is named by bad params: P computes the prompt."""
        text = f"request {request.request_id[:SHOWN_ID_CHARS]} loads no turn: {error}"
        self.peer_errors.count("bad kv_transfer_params", text, now)
