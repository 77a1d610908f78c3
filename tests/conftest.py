"""Shared by all tests. Without a GPU, GPU tests are skipped with a reason.

With workers (pytest-xdist), the tests of one group run in one worker, in their order. The groups with engines start
first, because they take longest. The summary says how many tests, seconds and engine starts each folder had.

Properties are checked with the same examples in every run, so that the same tests judge a change before and after it.
`make test-all` draws new examples: `--hypothesis-profile=new-examples`. No example has a deadline: on a busy machine
one may take a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.e2e.fleet import FLEET
from tests.support.starts import new_starts

pytest_plugins = ["tests.e2e.fixtures"]
TESTS = Path(__file__).parent
SERVERS = tuple(
    f"tests/e2e/test_{name}.py" for name in ("docs_commands", "metrics_served", "proxy", "spans", "vllm_router")
)
"""Files whose engines are API servers in processes of their own. The other tests of tests/e2e step their engines."""
LONGEST_FIRST = ("tests/e2e", "tests/faults", "servers", "tests/connector", "tests/connector/ranks")
SLOW = ("tests/connector/", "tests/unit/test_packaging.py", "tests/unit/test_site.py")
"""A folder and files whose tests are all `slow`. `make test-fast` leaves them out."""
SLOWEST_FILES = 15
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")

settings.register_profile("new-examples", deadline=None)
settings.register_profile("same-examples", deadline=None, derandomize=True)
settings.load_profile("same-examples")


def group(nodeid: str) -> str:
    """Tests of one group share engines, or are in one file."""
    path = nodeid.split("::")[0]
    if path in SERVERS:
        return "servers"
    folder = path.rpartition("/")[0]
    return folder if folder in LONGEST_FIRST else path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(("tests/e2e/", "tests/faults/")):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(300))
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    if hasattr(config, "workerinput"):
        ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: ranks.get(group(item.nodeid), len(ranks)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
        for item in marked:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        """Gives a worker one group at a time, in the order of `pytest_collection_modifyitems`."""

        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End a group's engines with the group: an idle engine's threads wake up some two thousand times a second."""
    fleet = item.session.stash.get(FLEET, None)
    if fleet is not None and nextitem is not None and group(nextitem.nodeid) != group(item.nodeid):
        fleet.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """A worker's reports go to the process that prints the summary."""
    report = yield
    report.engine_starts = new_starts()
    return report


def place(nodeid: str) -> tuple[str, str]:
    """A test's folder below tests/, and its file."""
    path = nodeid.split("::")[0]
    return (path.split("/")[1] if path.count("/") > 1 else ".", path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    starts: Counter[str] = Counter()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if outcome in OUTCOMES:
                folders.setdefault(place(report.nodeid)[0], Counter())[outcome] += 1
            if isinstance(report, pytest.TestReport):
                for name in place(report.nodeid):
                    seconds[name] += report.duration
                    starts[name] += getattr(report, "engine_starts", 0)  # a worker that has crashed reports none
    terminalreporter.section("slowest files")
    for path, spent in [one for one in seconds.most_common() if "/" in one[0]][:SLOWEST_FILES]:
        terminalreporter.write_line(f"{spent:6.0f} s  {starts[path]:3} engine starts  {path}")
    terminalreporter.section("folders")
    for folder, counts in sorted(folders.items()):
        words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        terminalreporter.write_line(f"{folder:12}{words}  ({seconds[folder]:.0f} s, {starts[folder]} engine starts)")
    total = sum(seconds[folder] for folder in folders), sum(starts[folder] for folder in folders)
    terminalreporter.write_line(f"{'all':12}({total[0]:.0f} s, {total[1]} engine starts)")
