"""What an engine host sends back to a test. Plain data: imported on both sides, needs no vLLM."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished request: tokens in order, the kv_transfer_params that the engine returned, and its finish reason."""

    request_id: str
    token_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class KvDigest:
    """blake2b of one request's prompt KV: `cells[layer][block]`, only the slots that hold prompt tokens.

    None for blocks that the layer no longer looks at (sliding window).
    """

    tokens: int
    cells: tuple[tuple[bytes | None, ...], ...]

    def differing(self, other: "KvDigest") -> list[tuple[int, int]]:
        """(layer, block index) of every cell that differs. ValueError when the two do not describe the same shape."""
        ours, theirs = [len(row) for row in self.cells], [len(row) for row in other.cells]
        if ours != theirs or self.tokens != other.tokens:
            raise ValueError(
                f"digests of different shape: {self.tokens} tokens {ours} and {other.tokens} tokens {theirs}"
            )
        return [
            (layer, block)
            for layer, (row, other_row) in enumerate(zip(self.cells, other.cells, strict=True))
            for block, (cell, other_cell) in enumerate(zip(row, other_row, strict=True))
            if cell != other_cell
        ]
