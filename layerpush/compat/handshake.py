"""The query and the answer of vLLM's side channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG, NixlHandshakePayload

MAX_ANSWER_BYTES = 8 << 20
"""Of an engine's answers to one handshake or probe, all ranks together."""


@dataclass
class LayerpushHandshakePayload(NixlHandshakePayload):
    """vLLM's answer, and a field that says that layerpush runs the engine. vLLM's decoder skips it."""

    layerpush: bool = True


class Agent(NamedTuple):
    """``description`` is NIXL's own of an agent. It contains the agent's name."""

    description: bytes
    layerpush: bool


class _HandshakeAnswer(msgspec.Struct):
    """Fields of ``LayerpushHandshakePayload``. A restart of the engine changes ``agent_metadata_bytes``."""

    compatibility_hash: str
    agent_metadata_bytes: bytes
    layerpush: bool = False


class _AgentDescription(msgspec.Struct):
    """Fields of ``NixlAgentMetadata``. The decoder skips the others, which may be long."""

    engine_id: str
    agent_metadata: bytes


def handshake_query(pp_rank: int, tp_rank: int) -> bytes:
    """The msgpack query for the agent of this rank."""
    return msgspec.msgpack.encode((GET_META_MSG, pp_rank, tp_rank))


def signed(payload: NixlHandshakePayload) -> NixlHandshakePayload:
    """``payload`` with the field that says that layerpush runs the engine."""
    return LayerpushHandshakePayload(payload.compatibility_hash, payload.agent_metadata_bytes)


def agent_of_handshake(payload: bytes) -> Agent:
    """The agent that ``payload``, the answer of a side channel, names.

    Raises ``ValueError`` or ``RecursionError`` for any other bytes.
    """
    handshake = msgspec.msgpack.decode(payload, type=_HandshakeAnswer)
    described = msgspec.msgpack.decode(handshake.agent_metadata_bytes, type=_AgentDescription)
    return Agent(described.agent_metadata, handshake.layerpush)
