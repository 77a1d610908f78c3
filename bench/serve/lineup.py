"""The servers of each mode and their arguments. Starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.demo.cluster import (
    BLOCK_SIZE,
    FAULTY_CONNECTOR,
    FAULTY_MODULE,
    TOKENS_PER_STEP,
)
from bench.demo.cluster import MODES as GRANULARITIES
from bench.serve.background import TOKENS as BACKGROUND_TOKENS
from bench.serve.plan import AGGREGATED, TOKEN
from bench.servers.engines import LOOPBACK, EngineSpec, Place, Role
from layerpush.core.config import CONNECTOR_NAME

STOCK = {"pull": "NixlConnector", "push": "NixlPushConnector"}
LAYERPUSH = {**GRANULARITIES, TOKEN: GRANULARITIES["auto"]}
"""Settings of P in each of layerpush's modes."""
CORRUPTED = "layer"
LEAST_SEQUENCES = 8
ROOM_TOKENS = 64
ENGINE_BYTES, PROXY_BYTES = 1200 << 20, 120 << 20
"""Memory of a server of the bench's own models without its KV cache, and of a proxy."""


@dataclass(frozen=True)
class Model:
    """The model of the engines. ``kv_bytes_per_token`` is None for a model of the user."""

    path: Path
    tokenizer: Path
    longest: int
    kv_bytes_per_token: int | None

    @classmethod
    def of_directory(cls, path: Path) -> Model:
        """A model on disk with a tokenizer of its own. Raises ``ValueError``."""
        try:
            config = json.loads((path / "config.json").read_text())
            longest = config.get("text_config", config)["max_position_embeddings"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} is no directory of a model: config.json: {error!r}") from error
        return cls(path, path, longest, None)


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
    """The engines of all modes for prompts of up to ``prompt_tokens``, ``streams`` at a time beside ``background``.

    ``extra`` has more connector settings by mode. ``corrupt``: P of layer mode damages its pushes.
    """

    model: Model
    prompt_tokens: int
    answer_tokens: int
    streams: int
    step_tokens: int
    trace_root: Path
    prefill_place: Place = LOOPBACK
    decode_place: Place = LOOPBACK
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    corrupt: bool = False
    background: int = 0

    def prefill(self, mode: str) -> EngineSpec:
        """P of a mode. For ``aggregated``: the one engine."""
        if mode == AGGREGATED:
            return self._spec(mode, "plain")
        connector, module = STOCK.get(mode, CONNECTOR_NAME), None
        if self.corrupt and mode == CORRUPTED:
            connector, module = FAULTY_CONNECTOR, FAULTY_MODULE
        config = connector_config(mode, self.extra)
        if mode in LAYERPUSH:
            config["trace_dir"] = str(self.trace_dir(mode))
        return self._spec(f"{mode}-prefill", "prefill", connector, module, config, self.prefill_place)

    def decode(self, mode: str) -> EngineSpec | None:
        """D of a mode. Layerpush's modes share one, but the mode whose D starts with P's token has its own."""
        if mode == AGGREGATED:
            return None
        if mode in STOCK:
            return self._spec(f"{mode}-decode", "decode", STOCK[mode], None, {}, self.decode_place)
        config = {"trace_dir": str(self.decode_trace_dir(mode)), "first_token": first_token_of(mode)}
        name = "token-decode" if mode == TOKEN else "layerpush-decode"
        return self._spec(name, "decode", CONNECTOR_NAME, None, config, self.decode_place)

    def proxy(self, mode: str, prefill: str, decode: str) -> ProxySpec:
        """The proxy of a mode, in front of the engines at these URLs."""
        return ProxySpec(f"{mode}-proxy", "plain", self.model.path, prefill=prefill, decode=decode)

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

    def memory_bytes(self, modes: Sequence[str]) -> int:
        """Estimated memory of all servers on a CPU."""
        engines = len(self.engines(modes)) * (ENGINE_BYTES + (self.kv_cache_bytes or 0))
        return engines + PROXY_BYTES * sum(self.decode(mode) is not None for mode in modes)

    @property
    def max_model_len(self) -> int:
        """The longest request in whole blocks; never more than the model takes."""
        wanted = self.prompt_tokens + self.answer_tokens + ROOM_TOKENS
        return min(-(-wanted // BLOCK_SIZE) * BLOCK_SIZE, self.model.longest)

    @property
    def kv_cache_bytes(self) -> int | None:
        """Room for ``streams`` requests and one more, so that a prompt need not wait for the blocks of the last one."""
        if self.model.kv_bytes_per_token is None:
            return None
        tokens = (self.streams + 1) * self.max_model_len + 4 * BLOCK_SIZE
        return (tokens + self.background * BACKGROUND_TOKENS) * self.model.kv_bytes_per_token

    def _spec(
        self,
        name: str,
        role: Role,
        connector: str | None = None,
        module: str | None = None,
        config: Mapping[str, object] | None = None,
        place: Place = LOOPBACK,
    ) -> EngineSpec:
        most = self.streams + self.background
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
            options=(*sequences, *self.options),
            variables=self.variables,
            tokenizer=self.model.tokenizer,
        )


def connector_config(mode: str, extra: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """``kv_connector_extra_config`` of a mode's P, without its trace_dir."""
    return {**LAYERPUSH.get(mode, {}), **extra.get(mode, {})}


def first_token_of(mode: str) -> str:
    """``first_token`` of layerpush's D in this mode."""
    return "prefill" if mode == TOKEN else "decode"


def longest_prompt(positions: int, answer_tokens: int) -> int:
    """The longest prompt for a model with so many positions, in tokens."""
    return positions - answer_tokens - ROOM_TOKENS


DEFAULT_STEP_TOKENS = TOKENS_PER_STEP
