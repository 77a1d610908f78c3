"""Compares quotes of a page with the strings in a program's sources; ``<...>`` stands for the varying parts."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLANK = "\0"
VLLM_SAYS_IT_IN = ("distributed/kv_transfer/kv_connector", "plugins/__init__.py", "v1/request.py")


@cache
def ours() -> tuple[str, ...]:
    """All strings of layerpush, blanked."""
    return _said_in(ROOT / "layerpush")


@cache
def vllms() -> tuple[str, ...]:
    """vLLM's strings about connectors and plugins, blanked."""
    home = package("vllm")
    return tuple(text for part in VLLM_SAYS_IT_IN for text in _said_in(home / part))


@cache
def libraries(pattern: str) -> bytes:
    """The bytes of NIXL's and UCX's libraries of this name."""
    site = package("nixl").parent
    found = [file for home in ("nixl_cu13.libs", "nixl_cu12.libs") for file in (site / home).rglob(pattern)]
    assert found, pattern
    return b"".join(file.read_bytes() for file in found)


def package(name: str) -> Path:
    """The directory of an installed package, without an import."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def is_said(quote: str, said: tuple[str, ...] | list[str]) -> bool:
    """Whether a blanked quote is one of these texts, a part of one, or one with other texts in its blanks."""
    if quote == BLANK or any(quote in text for text in said):
        return True
    for text in said:
        if BLANK in text and len(text.replace(BLANK, "")) > 8:
            found = re.fullmatch(re.escape(text).replace(re.escape(BLANK), "(.+?)"), quote)
            if found and all(is_said(part, said) for part in found.groups()):
                return True
    return False


def texts(source: str) -> list[str]:
    """Every string of a module; ``{}`` stands for each value of a format."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def blank(text: str) -> str:
    return re.sub(r"<[^<>]*>|\{\}|%(?:d|s|r|\.0f|g)", BLANK, text)


def _said_in(path: Path) -> tuple[str, ...]:
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return tuple(blank(text) for file in files for text in texts(file.read_text()))
