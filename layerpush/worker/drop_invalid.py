"""The engine core's own look at `kv_transfer_params`, for requests that came past the check of `admission`.

vLLM sends such requests itself: to tell the connector of a request that its front end has refused.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from layerpush.core.config import LayerPushConfig
from layerpush.core.request_params import KvRole, ParamsError, check_params
from layerpush.telemetry.peer_errors import PeerErrors

logger = init_logger("vllm.layerpush.doorkeeper")


class RequestFilter:
    """Keeps bad params from the connector, whose code trusts them. Runs in the scheduler's thread."""

    def __init__(self, role: KvRole, config: LayerPushConfig) -> None:
        self._role = role
        self._config = config
        self.peer_errors = PeerErrors(logger)

    def admit(self, request: Any, now: float) -> None:
        """Take bad params away: D computes the prompt itself, P keeps it to itself. Never raises."""
        try:
            check_params(request.kv_transfer_params, self._role, self._config)
        except ParamsError as error:
            text = f"request {request.request_id} runs without a KV transfer: {error}"
            self.peer_errors.add("bad kv_transfer_params", text, now)
            request.kv_transfer_params = None
