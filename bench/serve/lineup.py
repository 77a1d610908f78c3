"""The servers of each mode and their arguments. Starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench import ROOT
from bench.demo.cluster import (
    BLOCK_SIZE,
    FAULTY_CONNECTOR,
    FAULTY_MODULE,
    TOKENS_PER_STEP,
)
from bench.demo.cluster import MODES as GRANULARITIES
from bench.serve.background import TOKENS as BACKGROUND_TOKENS
from bench.serve.engine_options import ROOM_TOKENS, EngineOptions, ServedModel
from bench.serve.plan import AGGREGATED, MOONCAKE, TOKEN, SweepPlan
from bench.servers.engines import LOOPBACK, EngineSpec, Role, ServerPlace
from layerpush.core.config import CONNECTOR_NAME

STOCK = {"pull": "NixlConnector", "push": "NixlPushConnector", MOONCAKE: "MooncakeConnector"}
MODULES = {MOONCAKE: "bench.serve.mooncake"}
STOCK_SETTINGS: Mapping[str, Mapping[str, object]] = {MOONCAKE: {"mooncake_protocol": "tcp"}}
LAYERPUSH = {**GRANULARITIES, TOKEN: GRANULARITIES["auto"]}
"""Settings of P in each of layerpush's modes."""
CORRUPTED = "layer"
LEAST_SEQUENCES = 8
MOONCAKE_PACKAGES = ROOT / "build/mooncake"
"""The folder that ``scripts/mooncake`` makes."""
MOONCAKE_PROXY = (sys.executable, "-m", "bench.serve.mooncake_proxy")


@dataclass(frozen=True)
class ProxySpec(EngineSpec):
    """``layerpush proxy`` in front of one P and one D. It is no server of vLLM's, so nothing forks it."""

    server: Sequence[str] = (sys.executable, "-m", "layerpush", "proxy")
    prefill: str = ""
    decode: str = ""

    def command(self, port: int) -> list[str]:
        engines = ["--prefill", self.prefill, "--decode", self.decode]
        return [*self.server, "--port", str(port), *engines]


@dataclass(frozen=True)
class Lineup:
    """The engines of all modes of a plan. With ``options.corrupt``, P of layer mode damages its pushes."""

    model: ServedModel
    plan: SweepPlan
    options: EngineOptions
    step_tokens: int
    trace_root: Path
    prefill_place: ServerPlace = LOOPBACK
    decode_place: ServerPlace = LOOPBACK

    def prefill(self, mode: str) -> EngineSpec:
        """P of a mode. For ``aggregated``: the one engine."""
        if mode == AGGREGATED:
            return self._spec(mode, "plain")
        connector, module = STOCK.get(mode, CONNECTOR_NAME), MODULES.get(mode)
        if self.options.corrupt and mode == CORRUPTED:
            connector, module = FAULTY_CONNECTOR, FAULTY_MODULE
        config = dict(LAYERPUSH.get(mode) or STOCK_SETTINGS.get(mode, {}))
        if mode in LAYERPUSH:
            config["trace_dir"] = str(self.trace_dir(mode))
        return self._spec(f"{mode}-prefill", "prefill", connector, module, config, self.prefill_place)

    def decode(self, mode: str) -> EngineSpec | None:
        """D of a mode. Layerpush's modes share one, but the mode whose D starts with P's token has its own."""
        if mode == AGGREGATED:
            return None
        if mode in STOCK:
            config = STOCK_SETTINGS.get(mode, {})
            return self._spec(f"{mode}-decode", "decode", STOCK[mode], MODULES.get(mode), config, self.decode_place)
        config = {"trace_dir": str(self.decode_trace_dir(mode)), "first_token": first_token_of(mode)}
        name = "token-decode" if mode == TOKEN else "layerpush-decode"
        return self._spec(name, "decode", CONNECTOR_NAME, None, config, self.decode_place)

    def proxy(self, mode: str, prefill: str, decode: str, side_channel_port: int) -> ProxySpec:
        """The proxy of a mode, in front of the engines at these URLs. ``side_channel_port`` is P's."""
        spec = ProxySpec(f"{mode}-proxy", "plain", self.model.path, prefill=prefill, decode=decode)
        if mode != MOONCAKE:
            return spec
        bootstrap = f"http://{self.prefill_place.host}:{side_channel_port}"
        return replace(spec, server=(*MOONCAKE_PROXY, self.prefill(mode).name, bootstrap))

    def trace_dir(self, mode: str) -> Path:
        """The ``trace_dir`` of P in a mode."""
        return self.trace_root / mode

    def decode_trace_dir(self, mode: str) -> Path:
        """The ``trace_dir`` of layerpush's D in a mode."""
        return self.trace_root / ("token-decode" if mode == TOKEN else "decode")

    def engines(self, modes: Sequence[str]) -> list[EngineSpec]:
        """Every engine of these modes, each once."""
        specs = [spec for mode in modes for spec in (self.prefill(mode), self.decode(mode)) if spec is not None]
        return list({spec.name: spec for spec in specs}.values())

    @property
    def max_model_len(self) -> int:
        """The longest request in whole blocks; never more than the model takes."""
        wanted = max(self.plan.lengths) + self.plan.answer_tokens + ROOM_TOKENS
        return min(-(-wanted // BLOCK_SIZE) * BLOCK_SIZE, self.model.longest)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Room for ``streams`` requests and one more, so that a prompt need not wait for the blocks of the last one."""
        if self.model.kv_bytes_per_token is None:
            return None
        tokens = (self.plan.streams + 1) * self.max_model_len + 4 * BLOCK_SIZE
        return (tokens + self.plan.background * BACKGROUND_TOKENS) * self.model.kv_bytes_per_token

    def _spec(
        self,
        name: str,
        role: Role,
        connector: str | None = None,
        module: str | None = None,
        config: Mapping[str, object] | None = None,
        place: ServerPlace = LOOPBACK,
    ) -> EngineSpec:
        most = self.plan.streams + self.plan.background
        sequences = () if most <= LEAST_SEQUENCES else ("--max-num-seqs", str(most))
        return EngineSpec(
            name=name,
            role=role,
            model=self.model.path,
            connector=connector,
            connector_module=module,
            extra_config=config or {},
            tokens_per_step=self.step_tokens,
            max_model_len=self.max_model_len,
            kv_cache_bytes=self.kv_cache_bytes,
            block_size=BLOCK_SIZE,
            place=place,
            options=(*sequences, *self.options.options),
            variables=self.options.variables,
            tokenizer=self.model.tokenizer,
        )


def first_token_of(mode: str) -> str:
    """``first_token`` of layerpush's D in this mode."""
    return "prefill" if mode == TOKEN else "decode"


DEFAULT_STEP_TOKENS = TOKENS_PER_STEP
