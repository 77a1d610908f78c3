"""The KV of a synthetic forward: other bytes in each layer of each forward, the same on P and D."""

from __future__ import annotations

import torch

from bench.forward.end import fill_with_noise

UNIT_BYTES = 64
UNITS = 1 << 14
SLACK_BYTES = UNITS * UNIT_BYTES
TURN_UNITS = 131
"""Distance of two forwards' slices. It exceeds the layers of any model here, so that consecutive forwards differ."""


class Noise:
    """``size`` bytes and ``SLACK_BYTES`` more, none of them poison. The KV of a layer is a slice of them."""

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        self.bytes = torch.empty(size + SLACK_BYTES, dtype=torch.uint8, device=device)
        fill_with_noise(self.bytes, seed)

    def layer(self, turn: int, layer: int, size: int) -> torch.Tensor:
        """The KV of a layer of forward ``turn``: ``size`` bytes in the order of the prompt."""
        start = (TURN_UNITS * turn + layer) % UNITS * UNIT_BYTES
        return self.bytes[start : start + size]
