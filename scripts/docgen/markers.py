"""Text between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""

from __future__ import annotations

import re


class MarkerError(ValueError):
    """A page lacks a marker, or has it twice."""


def fill(page: str, name: str, content: str) -> str:
    """The page with ``content`` between the markers of ``name``. Raises ``MarkerError``."""
    pattern = rf"^(<!-- {re.escape(name)} -->)$(.*?)^(<!-- /{re.escape(name)} -->)$"
    matches = list(re.finditer(pattern, page, re.MULTILINE | re.DOTALL))
    if len(matches) != 1:
        raise MarkerError(f"found {len(matches)} times, wanted once: <!-- {name} --> ... <!-- /{name} -->")
    (found,) = matches
    return f"{page[: found.end(1)]}\n\n{content.strip()}\n\n{page[found.start(3) :]}"
