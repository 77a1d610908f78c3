"""The identity of a prefill engine: the part of D's `kv_transfer_params` that all its requests share. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from layerpush.core.config import CONNECTOR_NAME, LayerPushConfig
from layerpush.core.request_params import ParamsError, check_params

TO_PREFILL: Mapping[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
"""P's `kv_transfer_params`: compute the prompt, keep its blocks, push them to the D that registers."""


def remote_request_id(request_id: str, *, is_chat: bool = False) -> str:
    """vLLM's id of the (first) prompt of a request with this X-Request-Id, without the random suffix of each engine."""
    return f"chatcmpl-{request_id}" if is_chat else f"cmpl-{request_id}-0"


class IdentityError(ValueError):
    """The description of a prefill engine cannot be used. The message has the reason and advice."""


@dataclass(frozen=True)
class PrefillIdentity:
    """A prefill engine: its id, its side channel, and the sizes of its parallel groups."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int = 1
    dcp_size: int = 1

    @classmethod
    def from_params(cls, params: object) -> PrefillIdentity:
        """Read the `kv_transfer_params` of P's answer, or those that an operator gave.

        Raises:
            IdentityError: a key is missing or bad, or this P does not push.
        """
        if not isinstance(params, Mapping):
            raise IdentityError(
                "no kv_transfer_params in its answer: start it with --kv-transfer-config and "
                f'"kv_connector": "{CONNECTOR_NAME}", "kv_role": "kv_producer"'
            )
        whole = {"remote_request_id": "any", **params, "do_remote_prefill": True, "do_remote_decode": False}
        try:
            check_params(whole, "kv_consumer", LayerPushConfig())
        except ParamsError as error:
            raise IdentityError(str(error)) from None
        return cls(
            engine_id=whole["remote_engine_id"],
            host=whole["remote_host"],
            port=whole["remote_port"],
            tp_size=whole["tp_size"],
            pp_size=whole.get("pp_size", 1),
            dcp_size=whole.get("dcp_size", 1),
        )

    def to_decode(self, request_id: str) -> dict[str, object]:
        """D's `kv_transfer_params` for the request with this id on P. P need not have answered yet."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "dcp_size": self.dcp_size,
        }

    def __str__(self) -> str:
        return f"{self.engine_id} at {self.host}:{self.port}, tp_size {self.tp_size}, pp_size {self.pp_size}"
