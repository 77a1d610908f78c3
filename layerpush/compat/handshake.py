"""The query and the answer of vLLM's side channel."""

from __future__ import annotations

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG


class _HandshakeAnswer(msgspec.Struct):
    """Fields of ``NixlHandshakePayload``. A restart of the engine changes ``agent_metadata_bytes``."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


class _AgentDescription(msgspec.Struct):
    """Fields of ``NixlAgentMetadata``. The decoder skips the others, which may be long."""

    engine_id: str
    agent_metadata: bytes


def handshake_query(pp_rank: int, tp_rank: int) -> bytes:
    """The msgpack query for the agent of this rank."""
    return msgspec.msgpack.encode((GET_META_MSG, pp_rank, tp_rank))


def agent_of_handshake(payload: bytes) -> bytes:
    """NIXL's own description of an agent from ``payload``, the answer of a side channel. It contains the agent's name.

    Raises ``ValueError`` or ``RecursionError`` for any other bytes.
    """
    handshake = msgspec.msgpack.decode(payload, type=_HandshakeAnswer)
    return msgspec.msgpack.decode(handshake.agent_metadata_bytes, type=_AgentDescription).agent_metadata
