"""Claims of the pages for operators: programs log the quoted lines, metrics and tests exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docblocks import PAGES
from tests.metrics_front_end import FrontEnd
from tests.metrics_named import unknown_names
from tests.metrics_scrape import Scrape
from tests.quotes import blank, is_said, libraries, ours, vllms

ROOT = Path(__file__).parents[2]
TROUBLESHOOTING, COMPATIBILITY = "docs/troubleshooting.md", "docs/compatibility.md"

_OF_OTHERS = re.compile(r"\b(vLLM's|vLLM 0\.33's|NIXL's|UCX's|PyTorch's)(?:, [\w ]+)?\)?: `([^`]+)`")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@pytest.fixture(scope="module")
def scrape() -> Iterator[Scrape]:
    FrontEnd()
    yield Scrape()
    FrontEnd.close()


def rows(text: str) -> list[list[str]]:
    """The cells of each line of each table, headings left out."""
    lines = text.splitlines()
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for before, line in zip(["", *lines], lines, strict=False)
        if line.startswith("| ") and not line.startswith("| ---") and not headed(lines, line)
    ]


def headed(lines: list[str], line: str) -> bool:
    after = lines.index(line) + 1
    return after < len(lines) and lines[after].startswith(("|---", "| ---"))


def wrong_quotes(text: str, spans: list[str]) -> list[str]:
    """Spans of ``text`` that we do not log, and quotes of other programs that these do not log."""
    foreign = {(whose, quote) for whose, quote in _OF_OTHERS.findall(text)}
    wrong = [f"{whose} {quote}" for whose, quote in foreign if not others_say(whose, quote)]
    own = {span for span in spans if span not in {quote for _, quote in foreign}}
    return wrong + [span for span in own if not is_said(blank(span), ours())]


def others_say(whose: str, quote: str) -> bool:
    if whose == "vLLM's":
        return is_said(blank(quote), vllms())
    if whose == "NIXL's":
        return quote.encode() in libraries("libplugin_UCX.so")
    if whose == "UCX's":
        return quote.encode() in libraries("libucs-*.so*")
    return True  # PyTorch has its lines in no single piece, and vLLM 0.33 is not installed


def lines_quoted(text: str) -> list[str]:
    """Spans that quote a log: several words in the first cell of a row, or ``<...>`` anywhere."""
    symptoms = [span for row in rows(text) for span in _SPAN.findall(row[0])]
    found = [span for span in symptoms if " " in span] + [span for span in _SPAN.findall(text) if "<...>" in span]
    return [span for span in found if not span.startswith("vllm:")]


def test_troubleshooting_quotes_existing_log_lines() -> None:
    text = (ROOT / TROUBLESHOOTING).read_text()
    quoted = lines_quoted(text)
    assert len(quoted) > 30
    assert wrong_quotes(text, quoted) == []


@pytest.mark.parametrize(
    "line",
    [
        "| `push of <...> failed quietly` | a | b |",
        "`the writer of <...> is tired`",
        "| vLLM's: `Unsupported connector` and `Unsupported connectors type` | a | b |",
        "| vLLM's: `Unsupported connectors` | a | b |",
        "| NIXL's: `Invalid UCX_TLS: ` | a | b |",
        "| UCX's: `unused environment variance` | a | b |",
    ],
)
def test_a_line_that_no_program_logs_is_found(line: str) -> None:
    assert wrong_quotes(line, lines_quoted(line)) != []


@pytest.mark.parametrize("page", PAGES)
def test_metrics_on_pages_exist(scrape: Scrape, page: str) -> None:
    text = (ROOT / page).read_text()
    named = {span for span in _SPAN.findall(text) if re.fullmatch(r"vllm:layerpush_\w+(\{[^}]*\})?", span)}
    named -= {"vllm:layerpush_"}
    assert missing_metrics(named, scrape) == []


def missing_metrics(named: set[str], scrape: Scrape) -> list[str]:
    """A histogram may be named without the suffix of its name in a scrape."""
    found = set(unknown_names(named, scrape))
    return sorted(one for one in found if f"{one}_count" not in scrape.names)


def test_an_unknown_metric_is_found(scrape: Scrape) -> None:
    unknown = {"vllm:layerpush_pushs_total", 'vllm:layerpush_pushes_total{outcome="lost"}'}
    assert missing_metrics(unknown | {"vllm:layerpush_exposed_seconds"}, scrape) == sorted(unknown)


def compatibility() -> list[list[str]]:
    """The rows of the tables with a column of tests."""
    found = []
    for part in (ROOT / COMPATIBILITY).read_text().split("\n## "):
        if "| tested by |" in part:
            found += rows(part)
    return found


def test_contributing_says_how_large_the_folders_are() -> None:
    """To 5 %."""
    (said,) = re.findall(r"^Lines of Python: .*", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    (words,) = re.findall(r"([\d,]+) words", said)
    lines = {folder: int(number.replace(",", "")) for folder, number in re.findall(r"`(\w+)` ([\d,]*\d)", said)}
    found = {
        folder: sum(file.read_text().count("\n") for file in (ROOT / folder).rglob("*.py"))
        for folder in ("layerpush", "kernels", "bench", "tests", "scripts")
    }
    assert lines == pytest.approx(found, rel=0.05)
    assert int(words.replace(",", "")) == pytest.approx(
        sum(len((ROOT / page).read_text().split()) for page in PAGES), rel=0.05
    )


def test_the_compatibility_tables_name_tests_that_exist() -> None:
    table = compatibility()
    assert len(table) > 40
    assert [problem for row in table if (problem := wrong_evidence(row[-1]))] == []


def wrong_evidence(cell: str) -> str | None:
    """The error in the last cell of a row, which must name existing tests or say that there is none."""
    paths = _SPAN.findall(cell)
    missing = [path for path in paths if not path.startswith("tests/") or not (ROOT / path).exists()]
    if missing:
        return f"{missing[0]} does not exist"
    if bool(paths) == cell.startswith("not tested"):
        return f"{cell!r} names no test, or one and none"
    return None


@pytest.mark.parametrize("cell", ["", "`tests/e2e/test_none.py`", "not tested: `tests/e2e`", "surely", "`layerpush`"])
def test_an_invalid_evidence_cell_is_found(cell: str) -> None:
    assert wrong_evidence(cell) is not None


def test_the_compatibility_tables_quote_existing_messages() -> None:
    text = (ROOT / COMPATIBILITY).read_text()
    fallbacks = re.findall(r"falls back: `([^`]+)`", text) + re.findall(r"which layer `([^`]+)`", text)
    refusals = [span for row in compatibility() if len(row) > 3 for span in _SPAN.findall(row[-2])]
    assert len(fallbacks) > 2
    assert len(refusals) > 10
    assert wrong_quotes(text, fallbacks + refusals) == []


def test_every_fallback_of_an_engine_is_in_the_compatibility_tables() -> None:
    source = (ROOT / "layerpush/compat/engine_settings.py").read_text()
    text = (ROOT / COMPATIBILITY).read_text()
    reasons = re.findall(r'return "((?:the|part) [^"]+)"', source)
    assert len(reasons) == 3
    assert [reason for reason in reasons if f"`{reason}`" not in text] == []


class StubbornProcess:
    """An engine process that is still busy with its end when vLLM looks again."""

    name, pid = "EngineCore", 7

    def __init__(self) -> None:
        self.happened: list[object] = []

    def is_alive(self) -> bool:
        return True

    def terminate(self) -> None:
        self.happened.append("SIGTERM")

    def join(self, timeout: float) -> None:
        self.happened.append(round(timeout))


@pytest.mark.parametrize(
    ("options", "happens"), [({}, ["SIGTERM", "killed"]), ({"shutdown_timeout": 120}, ["SIGTERM", 120, "killed"])]
)
def test_vllm_waits_for_an_engine_at_its_end_only_if_shutdown_timeout_says_so(
    options: dict[str, Any], happens: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """docs/deployment.md: without the option a SIGTERM is as good as a SIGKILL."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1 import utils

    process: Any = StubbornProcess()
    monkeypatch.setattr(utils, "kill_process_tree", lambda _: process.happened.append("killed"))
    utils.shutdown([process], timeout=EngineArgs(model=str(tmp_path), **options).shutdown_timeout)
    assert process.happened == happens
    page = " ".join((ROOT / "docs/deployment.md").read_text().split())
    assert "With vLLM's default, `--shutdown-timeout 0`, a SIGTERM to `vllm serve` has the effect of a SIGKILL" in page
    assert is_said(blank("the process of prefill agent <agent> has ended"), ours())
