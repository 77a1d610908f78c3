"""The commands of docs/kv-transfer-params.md, for engines and a prompt of a test."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/kv-transfer-params.md"


def keys_that_p_answers() -> set[str]:
    """The keys of P's answer in the page's table."""
    keys = PAGE.read_text().split("## Keys\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in keys.splitlines() if line.startswith("| `")]
    return {key for row in rows if row[3].strip() for key in re.findall(r"`(\w+)`", row[1])}
