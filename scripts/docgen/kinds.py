"""The table of kinds of KV cache, from their rows."""

from __future__ import annotations

from layerpush.compat.kinds import KINDS
from scripts.docgen.tables import table


def table_of_kinds() -> str:
    return table(
        ["KV cache", "vLLM's class", "a block holds", "first token attended", "blocks transferred", "a layer is ready"],
        [
            [row.name, f"`{spec.__name__}`", row.block, row.attended, row.transferred, row.ready]
            for spec, row in KINDS.items()
        ],
    )
