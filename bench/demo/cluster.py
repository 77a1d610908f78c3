"""The servers of the demo: one P, one D, and a P that writes wrong bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.servers.engines import LOOPBACK, EngineSpec, Role, ServerPlace
from bench.servers.model import ModelShape
from layerpush.core.config import CONNECTOR_NAME

FAULTY_CONNECTOR = "FaultyPushConnector"
FAULTY_MODULE = "bench.demo.faulty"
MODES: Mapping[str, Mapping[str, object]] = {
    "auto": {"layerwise": True, "granularity": "auto"},
    "layer": {"layerwise": True, "granularity": "layer"},
    "chunk": {"layerwise": True, "granularity": "chunk"},
    "request": {"layerwise": False},
}
BLOCK_SIZE = 32
TOKENS_PER_STEP = 512
DEMO_SHAPE = ModelShape(hidden=576, heads=12, kv_heads=6, max_positions=32768)


@dataclass(frozen=True)
class Cluster:
    """Specifications of all servers for prompts of up to ``max_prompt_tokens``; nothing runs yet.

    A KV cache holds little more than one such prompt, so that the first one touches nearly all of its pages.
    """

    model: Path
    shape: ModelShape
    max_prompt_tokens: int
    trace_root: Path
    prefill_place: ServerPlace = LOOPBACK
    decode_place: ServerPlace = LOOPBACK

    def decode(self) -> EngineSpec:
        """The D that receives every push."""
        config = {"trace_dir": str(self.trace_dir("decode"))}
        options = {"connector": CONNECTOR_NAME, "extra_config": config, "recomputes": True}
        return self._spec("decode", "decode", self.decode_place, **options)

    def prefill(self) -> EngineSpec:
        """The P that pushes in all modes. Each request chooses one."""
        config = {"trace_dir": str(self.trace_dir("prefill"))}
        return self._spec("prefill", "prefill", self.prefill_place, connector=CONNECTOR_NAME, extra_config=config)

    def faulty_prefill(self) -> EngineSpec:
        """A P that writes wrong bytes for one layer. Its pushes by layer are verified."""
        connector = {"connector": FAULTY_CONNECTOR, "connector_module": FAULTY_MODULE}
        config = {"packing": "off", "verify": 1.0}
        return self._spec("prefill-faulty", "prefill", self.prefill_place, **connector, extra_config=config)

    def trace_dir(self, side: str) -> Path:
        """The folder for the trace of ``side``, "prefill" or "decode"."""
        return self.trace_root / side

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens: the longest prompt, room for an answer, whole blocks."""
        return -(-(self.max_prompt_tokens + 64) // BLOCK_SIZE) * BLOCK_SIZE

    def _spec(self, name: str, role: Role, place: ServerPlace, **connector: Any) -> EngineSpec:
        return EngineSpec(
            name=name,
            role=role,
            model=self.model,
            tokens_per_step=TOKENS_PER_STEP,
            max_model_len=self.max_model_len,
            kv_cache_bytes=(self.max_model_len + 4 * BLOCK_SIZE) * self.shape.kv_bytes_per_token,
            block_size=BLOCK_SIZE,
            place=place,
            **connector,
        )
