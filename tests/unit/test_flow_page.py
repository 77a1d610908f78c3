"""`docs/design/flow.md` names existing functions, in their modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOPS = [
    (module, function)
    for module, functions in re.findall(
        r"^\| `([\w/]+\.py)` \| (`[A-Z]\w+\.\w+`.*) \|$", (ROOT / "docs/design/flow.md").read_text(), re.M
    )
    for function in re.findall(r"`([A-Z]\w+\.\w+)`", functions)
]


def functions_of(source: str) -> set[str]:
    """`Class.function` of each method that a module itself defines."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {f"{one.name}.{node.name}" for one in classes for node in one.body if isinstance(node, ast.FunctionDef)}


def test_the_page_lists_the_hops() -> None:
    assert ("transport/nixl.py", "NixlTransport.post_write") in HOPS
    assert ("transport/nixl.py", "NixlTransport.notify") in HOPS
    assert ("compat/push_worker.py", "VllmPushWorker.loaded") in HOPS


@pytest.mark.parametrize(("module", "function"), sorted(set(HOPS)))
def test_every_hop_exists_in_the_code(module: str, function: str) -> None:
    assert function in functions_of((ROOT / "layerpush" / module).read_text())
