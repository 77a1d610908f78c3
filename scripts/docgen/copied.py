"""Files of the repository's root as pages of the documentation: the same text, with links relative to docs/."""

from __future__ import annotations

import re


def copied_page(text: str) -> str:
    """The text below the title, without markers of generated parts."""
    _, _, text = text.partition("\n")
    text = re.sub(r"^<!-- /?[\w-]+ -->\n\n?", "", text, flags=re.MULTILINE)
    return text.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)").strip()
