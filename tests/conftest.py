"""What all tests share: GPU tests are skipped where there is no GPU, saying so, and the summary counts each folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest_plugins = ["tests.e2e.fixtures"]
TESTS = Path(__file__).parent
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            folder = report.nodeid.split("/")[1] if report.nodeid.count("/") > 1 else "."
            folders.setdefault(folder, Counter())[outcome] += 1
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.nodeid.count("/") > 1:
                seconds[report.nodeid.split("/")[1]] += report.duration
    terminalreporter.section("folders")
    for folder, counts in sorted(folders.items()):
        words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        terminalreporter.write_line(f"{folder:12}{words}  ({seconds[folder]:.0f} s)")
