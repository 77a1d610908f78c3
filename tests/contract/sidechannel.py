"""A process with a NIXL agent and side channels, as of a prefill engine."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np


def agent(name: str) -> Any:
    """An agent with some registered memory."""
    from nixl._api import nixl_agent, nixl_agent_config

    made = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
    memory = np.zeros(1 << 20, np.uint8)
    made.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return made


def handshake(agent_metadata: bytes) -> bytes:
    """A handshake's answer, as vLLM's workers and scheduler make it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload

    described = NixlAgentMetadata(
        engine_id="p", agent_metadata=agent_metadata, kv_caches_base_addr=[1 << 40] * 64, device_id=0, num_blocks=40,
        block_lens=[4096] * 64, block_strides=[4096] * 64, kv_cache_layout="LBHNC", block_size=32, ssm_sizes=(0, 0),
        attn_backend_name="CPU_ATTN", physical_blocks_per_logical_kv_block=1,
    )  # fmt: skip
    return msgspec.msgpack.encode(NixlHandshakePayload("hash", msgspec.msgpack.encode(described)))


def listener(whose: str) -> Callable[..., None]:
    if whose == "layerpush":
        from layerpush.compat.engine_threads import EngineThreads
        from layerpush.engine.scheduler.side_channel import listen
        from layerpush.transport.port import bind

        return lambda answers, ready, stop, host, port: listen(bind(host, port), EngineThreads(), answers, ready, stop)
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

    vllms: Callable[..., None] = NixlBaseConnectorScheduler._nixl_handshake_listener
    return vllms


def serve(pipe: Connection, stock: int, ours: int) -> None:
    """Listen on a port as vLLM and on one as layerpush. Sends the agent's name, and stays."""
    own = agent(str(uuid.uuid4()))
    answers = {(0, 0): handshake(own.get_agent_metadata())}
    for whose, port in (("vllm", stock), ("layerpush", ours)):
        ready, stop = threading.Event(), threading.Event()
        threading.Thread(target=listener(whose), args=(answers, ready, stop, "127.0.0.1", port), daemon=True).start()
        ready.wait()
    pipe.send(own.name)
    pipe.recv()
