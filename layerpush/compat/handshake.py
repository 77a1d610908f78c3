"""The query and the answer of vLLM's side channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

MAX_ANSWER_BYTES = 256 << 10
"""Of one rank's answer. Its time to read grows with its settings, and other threads stand meanwhile."""
MAX_SETTING = 200
"""Characters of a peer's setting in a message."""
SETTINGS = (
    "vLLM",
    "the model",
    "dtype",
    "the number of KV heads",
    "the head size",
    "the number of layers",
    "the attention backend",
    "the KV cache dtype",
    "disable_hybrid_kv_cache_manager",
)
"""Names of the settings that must be the same on P and D."""


@dataclass
class LayerpushHandshakePayload(NixlHandshakePayload):
    """vLLM's answer, and fields of our own: layerpush runs the engine, and the settings that vLLM compares by
    ``compatibility_hash``. vLLM's decoder skips them.
    """

    layerpush: bool = True
    settings: dict[str, str] = field(default_factory=dict)


class Agent(NamedTuple):
    """``description`` is NIXL's own of an agent. It contains the agent's name. ``settings``: none, from a stock engine.

    All of it comes from a peer, which may have sent anything.
    """

    description: bytes
    layerpush: bool
    engine_id: str
    settings: dict[str, str]


class HandshakeAnswer(msgspec.Struct):
    """Fields of ``LayerpushHandshakePayload``, as a peer has sent them. A restart of the engine changes
    ``agent_metadata_bytes``.
    """

    compatibility_hash: str
    agent_metadata_bytes: bytes
    layerpush: bool = False
    settings: dict[str, str] = {}


class _AgentDescription(msgspec.Struct):
    """Fields of ``NixlAgentMetadata``. The decoder skips the others, which may be long."""

    engine_id: str
    agent_metadata: bytes


def handshake_query(pp_rank: int, tp_rank: int) -> bytes:
    """The msgpack query for the agent of this rank."""
    return msgspec.msgpack.encode((GET_META_MSG, pp_rank, tp_rank))


def settings_of(worker: NixlPushConnectorWorker) -> dict[str, str]:
    """The ``SETTINGS`` of an engine, by their names."""
    model, cache = worker.vllm_config.model_config, worker.vllm_config.cache_config
    found = (
        vllm.__version__,
        model.model,
        model.dtype,
        model.get_total_num_kv_heads(),
        model.get_head_size(),
        model.get_total_num_hidden_layers(),
        worker.backend_name,
        cache.cache_dtype,
        worker.vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
    )
    return {name: str(value) for name, value in zip(SETTINGS, found, strict=True)}


def signed(payload: NixlHandshakePayload, settings: dict[str, str]) -> LayerpushHandshakePayload:
    """``payload`` with our own fields."""
    return LayerpushHandshakePayload(payload.compatibility_hash, payload.agent_metadata_bytes, settings=settings)


def read_answer(payload: bytes) -> HandshakeAnswer | None:
    """A side channel's answer; None if it cannot be read."""
    try:
        return msgspec.msgpack.decode(payload, type=HandshakeAnswer)
    except (ValueError, RecursionError):
        return None


def difference(ours: LayerpushHandshakePayload, theirs: HandshakeAnswer | None) -> str | None:
    """The settings in which the engine that answered differs, in one sentence. None if it has the same, or if it does
    not list them: then vLLM's handshake has an error of its own.
    """
    if theirs is None or theirs.compatibility_hash == ours.compatibility_hash:
        return None
    return difference_of(ours.settings, theirs.settings)


def difference_of(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """The settings that an engine has with other values than ours, in one sentence; None if it has none."""
    different = [
        f"{name} is {theirs[name][:MAX_SETTING]!r} there and {value!r} here"
        for name, value in ours.items()
        if theirs.get(name, value) != value
    ]
    return f"P and D must have the same settings: {', '.join(different)}" if different else None


def agent_of_handshake(payload: bytes) -> Agent:
    """The agent that ``payload``, the answer of a side channel, names.

    Raises ``ValueError`` or ``RecursionError`` for any other bytes.
    """
    handshake = msgspec.msgpack.decode(payload, type=HandshakeAnswer)
    described = msgspec.msgpack.decode(handshake.agent_metadata_bytes, type=_AgentDescription)
    return Agent(described.agent_metadata, handshake.layerpush, described.engine_id, handshake.settings)
