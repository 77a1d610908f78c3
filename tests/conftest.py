"""What all tests share: GPU tests are skipped where there is no GPU, saying so.

The summary says how many tests, seconds and engine starts each folder had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.starts import engine_starts

pytest_plugins = ["tests.e2e.fixtures"]
TESTS = Path(__file__).parent
STARTS: Counter[str] = Counter()
"""Engines that each folder and each file has started."""
SLOWEST_FILES = 15
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
        for item in marked:
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = engine_starts()
    result = yield
    STARTS[place(item.nodeid)[0]] += engine_starts() - before
    STARTS[place(item.nodeid)[1]] += engine_starts() - before
    return result


def place(nodeid: str) -> tuple[str, str]:
    """The folder below tests/ and the file that a test is in."""
    path = nodeid.split("::")[0]
    return (path.split("/")[1] if path.count("/") > 1 else ".", path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            folders.setdefault(place(report.nodeid)[0], Counter())[outcome] += 1
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                for name in place(report.nodeid):
                    seconds[name] += report.duration
    terminalreporter.section("slowest files")
    for path, spent in [one for one in seconds.most_common() if "/" in one[0]][:SLOWEST_FILES]:
        terminalreporter.write_line(f"{spent:6.0f} s  {STARTS[path]:3} engine starts  {path}")
    terminalreporter.section("folders")
    for folder, counts in sorted(folders.items()):
        words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        terminalreporter.write_line(f"{folder:12}{words}  ({seconds[folder]:.0f} s, {STARTS[folder]} engine starts)")
    total = sum(seconds[folder] for folder in folders)
    terminalreporter.write_line(f"{'all':12}({total:.0f} s, {engine_starts()} engine starts)")
