"""A stand-in for the parts of Ray Serve LLM 2.60 that `layerpush.ray` uses: the same modules, names, signatures."""

from __future__ import annotations

import abc
import importlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import BaseModel, Field

KV_TRANSFER = "ray.llm._internal.serve.engines.vllm.kv_transfer"
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


class Completion(BaseModel):
    """The fields of vLLM's request that matter here. Ray keeps an id only if pydantic counts it as set."""

    prompt: str = "hello"
    max_tokens: int | None = 50
    min_tokens: int = 3
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    kv_transfer_params: dict[str, Any] | None = None


class Chat(Completion):
    messages: list[dict[str, str]] = Field(default_factory=lambda: [{"role": "user", "content": "hello"}])
    max_completion_tokens: int | None = None


class BaseConnectorBackend(abc.ABC):
    requires_peer_binding = False
    concurrent_handoff = False

    def __init__(self, llm_config: Any) -> None:
        self.llm_config = llm_config

    @property
    def kv_transfer_config(self) -> dict[str, Any]:
        return self.llm_config.engine_kwargs["kv_transfer_config"]

    def replica_metadata(self) -> dict[str, Any]:
        return {}

    @abc.abstractmethod
    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any: ...

    @abc.abstractmethod
    def prepare_decode_request(self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any) -> Any: ...


class NixlConnectorBackend(BaseConnectorBackend):
    """Keeps the environment's side channel. Appends the side channel's host and port to the engine's id."""

    def setup(self) -> None:
        os.environ.setdefault(HOST, "10.0.0.7")
        os.environ.setdefault(PORT, "20000")
        config = self.kv_transfer_config
        config["engine_id"] = f"{config.get('engine_id', 'random')}-{os.environ[HOST]}-{os.environ[PORT]}"

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        raise AssertionError("sequential")

    def prepare_decode_request(self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any) -> Any:
        raise AssertionError("sequential")


def clamp_request_to_single_token(request: Any) -> None:
    request.max_tokens, request.stream, request.stream_options = 1, False, None
    if hasattr(request, "max_completion_tokens"):
        request.max_completion_tokens = 1


class KVConnectorBackendFactory:
    registry: dict[str, str]

    @classmethod
    def is_registered(cls, name: str) -> bool:
        return name in cls.registry

    @classmethod
    def register_backend(cls, name: str, backend_class_or_path: str) -> None:
        if name in cls.registry:
            raise ValueError(f"{name!r} is already registered")
        cls.registry[name] = backend_class_or_path

    @classmethod
    def get_backend_class(cls, name: str) -> type[BaseConnectorBackend]:
        module, _, attribute = cls.registry[name].rpartition(":")
        return getattr(importlib.import_module(module), attribute)


@contextmanager
def ray_in_place(build_app: Callable[[dict[str, Any]], Any] = lambda args: args) -> Iterator[ModuleType]:
    """`layerpush.ray`, imported beside the stand-in. Removes both at the end."""
    names = [".".join(KV_TRANSFER.split(".")[:depth]) for depth in range(1, KV_TRANSFER.count(".") + 2)]
    modules = {name: ModuleType(name) for name in [*names, "ray.serve", "ray.serve.llm"]}
    content = {
        f"{KV_TRANSFER}.base": {"clamp_request_to_single_token": clamp_request_to_single_token},
        f"{KV_TRANSFER}.factory": {"KVConnectorBackendFactory": KVConnectorBackendFactory},
        f"{KV_TRANSFER}.nixl": {"NixlConnectorBackend": NixlConnectorBackend},
    }
    for name, attributes in content.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(attributes)
    vars(modules["ray.serve"]).update(llm=SimpleNamespace(build_pd_openai_app=build_app))
    KVConnectorBackendFactory.registry = {}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield importlib.import_module("layerpush.ray")
    finally:
        sys.modules.pop("layerpush.ray", None)
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
