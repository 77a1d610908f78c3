"""Hooks of mkdocs: README.md and CONTRIBUTING.md as pages of the site, with links relative to docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, name in PAGES.items():
        text = (ROOT / name).read_text()
        for target, source in PAGES.items():
            text = text.replace(f"]({source}", f"]({target}")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for target, source in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({target}")
    return markdown
