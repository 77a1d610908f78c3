"""The architectures that tests/e2e/test_zoo.py runs, for the page on compatibility."""

from __future__ import annotations

from scripts.docgen.tables import table
from tests.e2e.zoo import FAMILIES

TEST = "tests/e2e/test_zoo.py"


def architectures() -> str:
    """One row for each architecture: its layers, P's way of pushing it, and its test."""
    rows = [
        (
            f"`{name}`",
            family.attention,
            "by layer; states at the end" if family.states else "by layer",
            f"`{TEST}`" if family.tokens else f"`{TEST}`: KV, not tokens",
        )
        for name, family in sorted(FAMILIES.items())
    ]
    return table(("architecture", "layers", "behaviour", "tested by"), rows)
