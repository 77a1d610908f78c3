"""A pair of engines of many ranks: what ``tests.connector.ranks.rig`` builds, and what its run is expected to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["full", "window", "mixed", "mla", "indexer", "states", "gdn", "mla-gdn", "only-states"]
"""The model's attention: ``mixed`` has full and sliding layers, ``states`` full layers and Mamba-2, ``gdn`` full layers
and gated delta nets, ``mla-gdn`` those beside MLA; ``only-states`` Mamba-2 and no attention.
"""

LAYERS, CHUNK, DRAFT_TOKENS = 4, 96, 2
TABLE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class Side:
    """P or D. ``dp`` engines, each of ``pp`` stages of ``pcp`` times ``tp`` ranks; the ``pcp`` ranks have the same KV.
    ``stock``: with vLLM's push connector. Without ``layerwise``, P pushes whole requests.

    ``layout`` names the axes of the KV cache from the outermost: layers, blocks, heads, tokens, content.
    """

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dp: int = 1
    block_size: int = 32
    layout: str = "LBHNC"
    dtype: str = "float32"
    stock: bool = False
    layerwise: bool = True


@dataclass(frozen=True)
class Topology:
    """One prompt of ``tokens`` tokens goes from each engine of P to each engine of D.

    ``heads`` are the model's KV heads; MLA has one latent vector per token instead. D's prefix cache has the prompt's
    first ``cached`` tokens. ``groups`` are those of Mamba-2; ranks have the same one if there is one. A state
    has a block for each of ``drafts`` behind the prompt's. P has aborted an earlier push of the prompt after ``steps``
    steps of ``CHUNK`` tokens, if there are any. A ``drafter`` has a layer of its own, behind the model's: with the
    model's ``heads``, or with ``latents``.
    """

    kind: Kind = "full"
    p: Side = Side()
    d: Side = Side()
    heads: int = 4
    tokens: int = 200
    cached: int = 0
    groups: int = 8
    drafts: int = 0
    steps: int = 0
    drafter: Literal["heads", "latents"] | None = None

    @property
    def caches(self) -> bool:
        """Whether the engines have prefix caches."""
        return bool(self.cached or self.steps)

    @property
    def has_states(self) -> bool:
        return self.kind in ("states", "gdn", "mla-gdn", "only-states")

    @property
    def has_windows(self) -> bool:
        return self.kind in ("window", "mixed")

    @property
    def has_latents(self) -> bool:
        return self.kind in ("mla", "indexer", "mla-gdn")

    @property
    def pushed_tokens(self) -> int:
        """vLLM's P leaves the last token of a prompt to D if there are states, but not the only one."""
        return max(1, self.tokens - self.has_states)

    def heads_of(self, side: Side, rank: int) -> range:
        """The KV heads that a tensor parallel rank holds. With more ranks than heads, several ranks hold one head."""
        if side.tp > self.heads:
            head = rank * self.heads // side.tp
            return range(head, head + 1)
        share = self.heads // side.tp
        return range(rank * share, (rank + 1) * share)


@dataclass(frozen=True)
class Case:
    """A topology and the result that is expected of it. ``copies``: how often P sends each byte that D needs.

    ``exhaustive``: only ``make test-all`` runs it. It is not the first case of its row.
    """

    row: str
    topology: Topology
    mode: str
    reason: str = ""
    copies: int = 0
    exhaustive: bool = False


def cases() -> list[Case]:
    """The cases of ``table.json``, which docs/compatibility.md shows."""
    found = []
    for row in json.loads(TABLE.read_text()):
        for index, case in enumerate(row["cases"]):
            shared = case.pop("both", {})
            sides = {name: Side(**shared | case.pop(name, {})) for name in ("p", "d")}
            topology = Topology(**sides, **case)
            result = row["mode"], row.get("reason", ""), row.get("copies", 0)
            found.append(Case(row["name"], topology, *result, exhaustive=index > 0))
    return found
