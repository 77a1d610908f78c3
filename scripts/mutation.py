"""Break one line at a time in a copy of the tree, and run the tests that are to notice it.

  python -m scripts.mutation [WORD ...]   only mutants that have one of the words in their file's name or their text

The list is in scripts/mutant_list.py. Exit status 1 if a mutant survives, has no verdict, or is not in its file, or if
the tests fail without one. One run takes about ten seconds for each mutant.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
"""Of one run of tests. A test that hangs has a limit of its own, and counts as failed."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest. Any other means that it ran no test."""


def run_tests(tree: Path, tests: Iterable[str]) -> int | None:
    """The exit status of pytest in a tree; None: it took too long."""
    paths = os.pathsep.join(map(str, (tree, tree / "kernels", tree / "bench/calm")))
    # Python would take the bytecode of an earlier mutant of the same second and size
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-n0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def copy_of(root: Path, to: Path) -> Path:
    """A copy of the files that git knows, as they are, and a link to the virtual environment."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    if not (to / ".venv").exists():
        (to / ".venv").symlink_to(root / ".venv")
    return to


def verdict(tree: Path, mutant: Mutant) -> str:
    """Run the mutant's tests in a tree, and leave the tree as it was."""
    file = tree / mutant.file
    whole = file.read_text()
    if whole.count(mutant.text) != 1:
        return "not found"
    file.write_text(whole.replace(mutant.text, mutant.instead))
    try:
        return {PASSED: "survived", FAILED: "killed"}.get(run_tests(tree, mutant.tests), "no verdict")
    finally:
        file.write_text(whole)


def main(words: Sequence[str]) -> int:
    chosen = [each for each in MUTANTS if not words or any(word in each.file + each.text for word in words)]
    tests = sorted({test for each in chosen for test in each.tests})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_of(ROOT, Path(folder))
        if run_tests(tree, tests) != PASSED:
            print("the tests fail, or are not there, without a mutant:", *tests)
            return 1
        left = 0
        for mutant in chosen:
            found = verdict(tree, mutant)
            left += found != "killed"
            print(f"{found:10} {mutant.file}: {mutant.text.strip()!r} -> {mutant.instead.strip()!r}", flush=True)
    print(f"{len(chosen) - left} of {len(chosen)} killed")
    return int(left > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    sys.exit(main(parser.parse_args().words))
