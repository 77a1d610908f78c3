"""The connector's backend for Ray Serve: Ray asks P and D at the same time, so P pushes by layer.

Ray Serve LLM (2.60) has a backend for each KV connector. It sets up the side channel of a replica, and it shapes the
requests to P and D. Ray is not a dependency of layerpush: an application of Ray imports this module.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

from ray.llm._internal.serve.engines.vllm.kv_transfer.base import clamp_request_to_single_token
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.llm._internal.serve.engines.vllm.kv_transfer.nixl import NixlConnectorBackend

from layerpush.core.config import CONNECTOR_NAME
from layerpush.core.prefill_identity import TO_PREFILL, IdentityError, PrefillIdentity, remote_request_id


def build_pd_openai_app(args: dict[str, Any]) -> Any:
    """Ray's application of the same name, with the connector's backend registered.

    Args:
        args: Ray's arguments: ``prefill_config``, ``decode_config`` and others.
    """
    from ray.serve import llm

    register()
    return llm.build_pd_openai_app(args)


def register() -> None:
    """Give Ray the backend of ``LayerwisePushConnector``, for all processes of the cluster. Call it before Ray builds
    the application; a second call does nothing.
    """
    if not KVConnectorBackendFactory.is_registered(CONNECTOR_NAME):
        KVConnectorBackendFactory.register_backend(CONNECTOR_NAME, f"{__name__}:{LayerwisePushBackend.__name__}")


class LayerwisePushBackend(NixlConnectorBackend):
    """One replica's side of a transfer. Ray's NIXL backend sets up the side channel and a unique ``engine_id``.

    Ray chooses P's replica first and gives its ``replica_metadata`` to D's replica as ``peer``. Then D's replica shapes
    both requests, and both engines get them at the same time. Ray calls all methods in the replica's event loop.
    """

    requires_peer_binding = True
    concurrent_handoff = True

    def setup(self) -> None:
        """Raises ``ValueError`` for data parallelism: then vLLM changes the engine's id and port after this call."""
        if (self.llm_config.engine_kwargs.get("data_parallel_size") or 1) > 1:
            raise ValueError(
                "layerpush's backend for Ray Serve does not support data_parallel_size > 1. For whole requests, take "
                '"kv_connector": "NixlConnector" and "kv_connector_module_path": "layerpush.nixl" instead'
            )
        super().setup()

    def replica_metadata(self) -> dict[str, Any]:
        """The part of D's ``kv_transfer_params`` that is the same for all requests to this P. After ``setup``."""
        engine = self.llm_config.engine_kwargs
        return {
            "remote_engine_id": self.kv_transfer_config["engine_id"],
            "remote_host": os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"],
            "remote_port": int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
            "tp_size": engine.get("tensor_parallel_size") or 1,
            "pp_size": engine.get("pipeline_parallel_size") or 1,
            "dcp_size": engine.get("decode_context_parallel_size") or 1,
        }

    def prepare_prefill_request(self, *, request: Any, peer: Mapping[str, Any] | None) -> Any:
        """P's request: for one token, whose text is unused.

        ``request`` gets a new id, which P's and D's requests share: a client must not choose it.

        Raises:
            ValueError: P's replica has published no identity, or a bad one.
        """
        _identity(peer)
        request.request_id = str(uuid.uuid4())  # the field counts as set now, so Ray keeps it in both copies
        shaped = request.model_copy(deep=True, update={"kv_transfer_params": dict(TO_PREFILL)})
        clamp_request_to_single_token(shaped)
        shaped.min_tokens = 0
        return shaped

    def prepare_decode_request(
        self,
        *,
        request: Any,
        peer: Mapping[str, Any] | None,
        prefill_response: Any,  # noqa: ARG002  # Ray gives it by name
    ) -> Any:
        """D's request: the client's, with the identity of P. Call it after ``prepare_prefill_request``.

        ``prefill_response`` is None: P has not answered yet.

        Raises:
            ValueError: P's replica has published no identity, or a bad one.
        """
        remote = remote_request_id(request.request_id, is_chat=hasattr(request, "messages"))
        return request.model_copy(deep=True, update={"kv_transfer_params": _identity(peer).to_decode(remote)})


def _identity(peer: Mapping[str, Any] | None) -> PrefillIdentity:
    try:
        return PrefillIdentity.from_params(peer or {})
    except IdentityError as error:
        raise ValueError(
            f"the prefill replica has published no usable identity ({error}). It needs "
            f'"kv_connector": "{CONNECTOR_NAME}", not inside of MultiConnector, and an application that '
            "layerpush.ray registered"
        ) from error
