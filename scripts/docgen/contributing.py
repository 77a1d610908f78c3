"""CONTRIBUTING.md as a page of the documentation: the same text, with links relative to docs/."""

from __future__ import annotations

import re
from pathlib import Path

SOURCE = Path("CONTRIBUTING.md")


def page(root: Path) -> str:
    """The text below the title."""
    _, _, text = (root / SOURCE).read_text().partition("\n")
    return re.sub(r"\]\(docs/", "](", text).strip()
