"""Which servers a comparison needs: one plain engine, one D, and one P per mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from layerpush.apps.demo.engines import LOOPBACK, EngineSpec, Place, Role
from layerpush.apps.demo.model import ModelShape

CONNECTOR = "LayerwisePushConnector"
FAULTY_CONNECTOR = "FaultyPushConnector"
FAULTY_MODULE = "layerpush.apps.demo.faulty"
MODES: Mapping[str, Mapping[str, object]] = {
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

    The KV cache holds little more than one such prompt, so that a warm-up request touches nearly all of its pages.
    """

    model: Path
    shape: ModelShape
    max_prompt_tokens: int
    trace_root: Path
    prefill_place: Place = LOOPBACK
    decode_place: Place = LOOPBACK
    modes: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: MODES)

    def plain(self) -> EngineSpec:
        """The engine that says which tokens are right."""
        return self._spec("plain", "plain")

    def decode(self) -> EngineSpec:
        """The one D that all P's push to."""
        config = {"trace_dir": str(self.trace_dir("decode"))}
        return self._spec("decode", "decode", connector=CONNECTOR, extra_config=config, place=self.decode_place)

    def prefill(self, mode: str) -> EngineSpec:
        """P in one of ``modes``."""
        config = {**self.modes[mode], "trace_dir": str(self.trace_dir(mode))}
        name = f"prefill-{mode}"
        return self._spec(name, "prefill", connector=CONNECTOR, extra_config=config, place=self.prefill_place)

    def faulty_prefill(self) -> EngineSpec:
        """A layer-wise P that damages one layer before it is pushed."""
        return self._spec(
            "prefill-faulty",
            "prefill",
            connector=FAULTY_CONNECTOR,
            connector_module=FAULTY_MODULE,
            extra_config=dict(MODES["layer"]),
            place=self.prefill_place,
        )

    def trace_dir(self, whose: str) -> Path:
        """Where the P of a mode, or D, "decode", writes its trace."""
        return self.trace_root / whose

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens: the longest prompt, room for an answer, whole blocks."""
        return -(-(self.max_prompt_tokens + 64) // BLOCK_SIZE) * BLOCK_SIZE

    def _spec(
        self,
        name: str,
        role: Role,
        *,
        connector: str | None = None,
        connector_module: str | None = None,
        extra_config: Mapping[str, object] | None = None,
        place: Place = LOOPBACK,
    ) -> EngineSpec:
        return EngineSpec(
            name=name,
            role=role,
            model=self.model,
            connector=connector,
            connector_module=connector_module,
            extra_config=extra_config or {},
            tokens_per_step=TOKENS_PER_STEP,
            max_model_len=self.max_model_len,
            kv_cache_bytes=(self.max_model_len + 4 * BLOCK_SIZE) * self.shape.kv_bytes_per_token,
            block_size=BLOCK_SIZE,
            place=place,
        )
