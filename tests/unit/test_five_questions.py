"""The five questions of `docs/design/index.md` name few files, and what exists in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = (ROOT / "docs/design/index.md").read_text().partition("\n## Five questions\n")[2].split("\n### ")[1:]
MOST = {
    "When is a WRITE posted?": 4,
    "When may a block of D be used again?": 5,
    "Where does a new kind of message go?": 3,
    "Where does a new kind of attention go?": 2,
    "What happens on D when P dies in the middle of a push?": 4,
}
"""The most files that answer a question."""


def files_of(section: str) -> list[tuple[str, list[str]]]:
    """Each listed file, and the names that its line gives."""
    lines = re.findall(r"^\d+\. `([\w/]+\.py)`: (.*)$", section, re.M)
    return [(path, re.findall(r"`([\w.]+)`", text)) for path, text in lines]


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a module, and the names that it imports."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_a_question_is_answered_by_few_files_whose_names_exist(section: str) -> None:
    files = files_of(section)
    assert 0 < len(files) <= MOST[section.partition("\n")[0]]
    for path, names in files:
        assert names, path
        assert set(names) <= names_in(ROOT / "layerpush" / path), path


def test_each_question_is_on_the_page() -> None:
    assert {section.partition("\n")[0] for section in SECTIONS} == set(MOST)
