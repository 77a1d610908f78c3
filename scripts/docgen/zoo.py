"""The architectures that tests/e2e/test_zoo.py runs, for the page on compatibility."""

from __future__ import annotations

from scripts.docgen.tables import table
from tests.e2e.zoo import FAMILIES


def architectures() -> str:
    """One row each: its layers, how P pushes it, and what the test compares."""
    rows = [
        (
            f"`{name}`",
            family.attention,
            "by layer; states at the end" if family.states else "by layer",
            "KV, tokens" if family.tokens else "KV",
        )
        for name, family in sorted(FAMILIES.items())
    ]
    return table(("architecture", "layers", "P pushes", "compared"), rows)
