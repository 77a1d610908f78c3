"""An engine host's results for a test. Plain data: both sides import it, and it needs no vLLM."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Finished:
    """A finished request: tokens in order, the engine's returned kv_transfer_params, and the finish reason."""

    request_id: str
    token_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class KvDigest:
    """blake2b of one request's prompt KV: `cells[layer][block]`, only the slots that hold prompt tokens.

    None for blocks that the layer no longer looks at (sliding window) and, on D, for blocks from its own prefix cache.
    """

    tokens: int
    cells: tuple[tuple[bytes | None, ...], ...]

    def differing(self, other: "KvDigest") -> list[tuple[int, int]]:
        """(layer, block index) of every cell that both have and in which they differ.

        Raises ValueError if the two do not describe the same prompt, or have no cell in common.
        """
        shapes = [[len(row) for row in digest.cells] for digest in (self, other)]
        if shapes[0] != shapes[1] or self.tokens != other.tokens:
            raise ValueError(f"digests of different prompts: {self.tokens} and {other.tokens} tokens, {shapes}")
        pairs = [
            ((layer, block), ours, theirs)
            for layer, rows in enumerate(zip(self.cells, other.cells, strict=True))
            for block, (ours, theirs) in enumerate(zip(*rows, strict=True))
            if ours is not None and theirs is not None
        ]
        if not pairs:
            raise ValueError("the digests have no cell in common")
        return [place for place, ours, theirs in pairs if ours != theirs]
