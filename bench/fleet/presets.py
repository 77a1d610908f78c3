"""The assumptions of a fleet: models, network cards, the fabric, the host's own times. All times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from layerpush.apps.estimate.estimate import Wire


@dataclass(frozen=True)
class RankModel:
    """One rank of an engine; all ranks of an engine do the same at the same time, each with a network card of its own.

    ``token_bytes`` is the KV of a token in one of the ``layers``. A step takes ``token_s`` for each token, and
    ``attention_s`` for each token and each token before it. ``decode_s`` is a decode engine's step, ``kv_tokens`` the
    size of a KV cache. A prefill step has up to ``chunk_tokens`` tokens: ``max_num_batched_tokens``. The next one
    begins ``step_gap_s`` later.
    """

    about: str
    layers: int
    token_bytes: int
    token_s: float
    attention_s: float
    decode_s: float
    kv_tokens: int
    chunk_tokens: int = 8192
    block_tokens: int = 64
    step_gap_s: float = 1e-3

    def seconds(self, start: int, end: int) -> float:
        """Of a step that computes tokens ``[start, end)`` of a prompt."""
        return (end - start) * (self.token_s + self.attention_s * (start + end) / 2)


MODELS = {
    "llama-8b": RankModel("Llama-3.1-8B on one GPU", 32, 4096, 40e-6, 1.3e-9, 20e-3, 400_000),
    "llama-70b": RankModel("Llama-3.1-70B, TP 8", 80, 512, 44e-6, 0.8e-9, 25e-3, 1_000_000),
}
"""Computation at 400 TFLOP/s a GPU: 2 FLOP for each parameter and token, 4 x layers x hidden size for each token and
token before it. ``kv_tokens``: 52 and 41 GB of a GPU.
"""

WRITE_S, DESCRIPTOR_S = Wire.write_s, Wire.descriptor_s
"""A WRITE of any size, and each of its descriptors: a block of a layer."""
MESSAGE_S = 10e-6
"""A notification from one engine to another."""
WAKE_S = 50e-6
"""From a wake-up of the writer to its turn."""
LOST_S = 50e-3
"""From the death of a process until calls to it fail. Measured over UCX and TCP."""
ANSWER_S = 2e-3
"""A side channel's answer; it gives one at a time."""
CONNECT_S = 10e-3
"""vLLM's own part of a handshake, of which a worker does one at a time."""
CONTACT_BYTES = 512
"""The contact in a registration."""
LEASE_S = 30.0
"""For which P keeps a computed prompt that D does not ask for any more."""
PATIENCE_S = 120.0
"""After which D gives a load up."""
LAYER_TOKEN_S = 62.5e-6
"""A token in a layer of the real P of ``bench.fleet.validation``."""
RACK = 8
"""Engines of a rack. P and D are in different racks."""
