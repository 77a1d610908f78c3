"""The list of `scripts/mutants` fits the code, and one of its mutants is killed and another survives."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutation
from scripts.mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
CODE, TEST = "one.py", "test_one.py"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{Path(mutant.file).stem}: {mutant.text.strip()}")
def test_every_mutant_is_in_its_file_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.text) == 1
    assert mutant.instead != mutant.text
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("text", "instead", "test", "expected"),
    [
        ("1", "2", TEST, "killed"),
        ("1", "1.0", TEST, "survived"),
        ("1", "2", "absent.py", "no verdict"),
        ("3", "4", TEST, "not found"),
    ],
)
def test_a_mutant_is_killed_if_a_test_fails(text: str, instead: str, test: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / CODE).write_text("ONE = 1\n")
    (tmp_path / TEST).write_text("def test_one():\n    assert __import__('one').ONE == 1\n")
    assert mutation.verdict(tmp_path, Mutant(CODE, text, instead, (test,))) == expected
    assert (tmp_path / CODE).read_text() == "ONE = 1\n"
