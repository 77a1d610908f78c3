"""Digests of the prefixes of a conversation, by which two engines find the longest one that they share. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16
LEAST_STRIDE = 8
"""Of digests that a client may ask for: each costs time."""
SHOWN_CHARS = 8
"""Of each digest in a client's hands. They only choose a prefix: the whole digest decides."""


def key_of(salt: str | None) -> bytes:
    """A key of digests: prompts with different ``cache_salt``s have no digest in common, whatever their tokens are."""
    return hashlib.blake2b(salt.encode(errors="surrogatepass")).digest() if salt else b""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """``digests`` has 16 bytes for the first ``stride`` tokens, 16 for the first ``2 * stride``, and so on."""

    stride: int
    digests: bytes

    @classmethod
    def of(cls, tokens: Sequence[int], stride: int, adapter: str = "", salt: str | None = None) -> Prefixes:
        """Equal tokens with equal ``adapter`` and ``salt`` have equal digests on both engines, whatever the stride."""
        digest = hashlib.blake2b(adapter.encode() + b"\0", digest_size=DIGEST_BYTES, key=key_of(salt))
        digests, numbers = bytearray(), memoryview(array("i", tokens))
        for end in range(stride, len(tokens) + 1, stride):
            digest.update(numbers[end - stride : end])
            digests += digest.digest()
        return cls(stride, bytes(digests))

    def digest(self, tokens: int) -> str | None:
        """The digest of the first ``tokens`` tokens, 32 hexadecimal digits; None if there is none."""
        end = tokens // self.stride * DIGEST_BYTES
        if tokens <= 0 or tokens % self.stride or end > len(self.digests):
            return None
        return self.digests[end - DIGEST_BYTES : end].hex()

    def has(self, digest: str | None) -> bool:
        """Whether this is the whole digest of one of the prefixes."""
        try:
            wanted = bytes.fromhex(digest or "")
        except ValueError:
            return False
        at = -1 if len(wanted) != DIGEST_BYTES else self.digests.find(wanted)
        while at % DIGEST_BYTES and at >= 0:
            at = self.digests.find(wanted, at + 1)
        return at >= 0

    @property
    def shown(self) -> str:
        """The first digits of each digest, for a client."""
        return "".join(
            self.digests[at : at + DIGEST_BYTES].hex()[:SHOWN_CHARS] for at in range(0, len(self.digests), DIGEST_BYTES)
        )

    def shared(self, shown: str) -> int:
        """The number of tokens of the longest prefix that another engine's digests with this stride have, too."""
        ours, end = self.shown, 0
        while end < min(len(ours), len(shown)) and ours[end : end + SHOWN_CHARS] == shown[end : end + SHOWN_CHARS]:
            end += SHOWN_CHARS
        return end // SHOWN_CHARS * self.stride
