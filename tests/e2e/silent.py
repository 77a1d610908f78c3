"""A connector whose engine computes attention without vLLM's operation: no layer calls the connector by itself."""

import inspect
from typing import Any
from unittest.mock import patch

import torch
from vllm.model_executor.layers.attention import Attention, attention

from layerpush.compat import module_hooks
from layerpush.connector import LayerwisePushConnector
from tests.e2e.engines import SWEPT_LAYER


class Silent(Attention):
    """As the attention of DeepSeek-V3.2: its ``forward`` writes the KV without vLLM's decorator."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        operation = "unified_attention_with_output"
        with patch.object(attention, operation, inspect.unwrap(getattr(attention, operation))):
            return super().forward(*args, **kwargs)


class Unknown(Silent):
    """layerpush's table of attention classes lacks it."""


class SilentAttention(LayerwisePushConnector):
    """Layer ``SWEPT_LAYER`` has an attention that layerpush does not know."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for name, layer in self._vllm_config.compilation_config.static_forward_context.items():
            layer.__class__ = Unknown if f".layers.{SWEPT_LAYER}." in name else Silent
            layer.use_direct_call = True
        known = f"{__name__}.{Silent.__qualname__}"
        with patch.dict(module_hooks.WRITTEN, {known: (known,)}):
            super().register_kv_caches(kv_caches)
