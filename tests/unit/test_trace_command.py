"""`layerpush trace`: exit statuses, stdout and stderr, and the files that it writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from layerpush.apps.cli import app
from layerpush.apps.tracing.picture import DPI, PictureError, draw_request
from layerpush.apps.tracing.requests import RequestTrace
from layerpush.telemetry.trace_records import WriteRecord
from tests.unit.trace_hosts import TwoHosts, first_token, load, process, push, write

runner = CliRunner()
WIDE = {"COLUMNS": "200"}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two requests over two hosts, the second one failed."""
    hosts = TwoHosts()
    hosts.play("p-1", measured=hosts.offset)
    hosts.play("p-2", measured=hosts.offset, fails="a WRITE was lost")
    return hosts.write(tmp_path / "trace")


def run(*arguments: object) -> Any:
    return runner.invoke(app, ["trace", *map(str, arguments)], env=WIDE)


@pytest.mark.parametrize(
    ("arguments", "taught"),
    [
        (["--help"], ["trace_dir", "kv_connector_extra_config", "perfetto"]),
        (["merge", "--help"], ["one process for each engine rank", "exit status"]),
        (["plot", "--help"], ["X-Request-Id", ".svg"]),
        (["summary", "--help"], ["queue", "exposed", "notification", "D wait"]),
    ],
    ids=["trace", "merge", "plot", "summary"],
)
def test_help_explains_the_command(arguments: list[str], taught: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    missing = [word for word in taught if word.lower() not in " ".join(result.stdout.split()).lower()]
    assert missing == []


def test_merge_writes_one_file(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.json"
    result = run("merge", recorded, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}: 2 requests; open it in https://ui.perfetto.dev\n"
    assert "clock of P less that of D" in result.stderr
    trace = json.loads(out.read_text())
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} == {
        "P: P rank 0",
        "D: D rank 0",
        "D: D scheduler",
    }
    assert trace["otherData"]["notes"][0].startswith("clock of P less that of D")


def test_summary_is_for_people_or_programs(recorded: Path) -> None:
    text = run("summary", recorded, "--top", 1)
    assert text.exit_code == 0
    assert text.stdout.startswith("2 requests: ")
    assert "the slowest 1, in milliseconds:" in text.stdout
    data = json.loads(run("summary", recorded, "--json").stdout)
    assert {one["request"] for one in data["slowest"]} == {"d-p-1", "d-p-2"}


def test_no_text_of_a_trace_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    hostile = "\x1b[2J\u202e"
    write(tmp_path / "p.jsonl", process("P" + hostile, "x"), push(outcome="failed", reason=hostile, request_id=hostile))
    write(tmp_path / "d.jsonl", process("D" + hostile, "x"), load(t_awaited=1.0, t_settled=2.0, request_id=hostile))
    for arguments in (["summary"], ["summary", "--json"], ["merge", "--out", tmp_path / "o"], ["plot", "-r", hostile]):
        result = run(arguments[0], tmp_path, *arguments[1:])
        assert "\x1b" not in result.output
        assert "\u202e" not in result.output


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_draws_the_requested_request(recorded: Path, tmp_path: Path, ending: str, begins: bytes) -> None:
    out = tmp_path / f"deep/down/one.{ending}"
    result = run("plot", recorded, "--request", "d-p-1", "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}: d-p-1\n"
    assert out.read_bytes().startswith(begins)


def test_plot_draws_the_slowest_request_by_default(tmp_path: Path) -> None:
    slow = push("slow", t_first_planned=1.0, t_last_ready=9.0)
    write(tmp_path / "p.jsonl", process("P", "x"), push("fast", t_first_planned=1.0, t_last_ready=2.0), slow)
    assert run("plot", tmp_path, "--out", tmp_path / "one.svg").stdout.endswith("one.svg: cmpl-slow-0\n")


def test_plot_draws_failed_requests_and_whole_pushes(tmp_path: Path) -> None:
    lost = push(outcome="failed", mode="request", fallback="asked for", t_first_planned=1.0, t_last_ready=2.0)
    lost.writes = [WriteRecord(0, (0, 39), (0, 0), 8, 1024, 2.0, 2.5)]
    parked = load(outcome="failed", t_registered=1.5, t_settled=3.0, t_parked=3.0, t_reported=3.1, t_cleared=9.0)
    out = tmp_path / "one.svg"
    draw_request(RequestTrace("r", [lost], [parked]), out)
    text = out.read_text()
    assert text.startswith("<?xml")
    assert "whole because asked for" in _titles(text)
    assert "D: parked blocks" in _titles(text)


@pytest.mark.parametrize("length", [99, 1008])
def test_a_title_with_a_long_id_fits_the_picture(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    plain, edges = Figure.savefig, list[tuple[float, float]]()

    def savefig(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        edges.append((self._suptitle.get_window_extent().x1, DPI * self.get_figwidth()))

    monkeypatch.setattr(Figure, "savefig", savefig)
    slow = {"t_first_planned": 20.0, "t_last_ready": 50.0, "t_last_landed": 55.0}
    loaded = load(t_settled=65.0, t_reported=85.0)
    token = first_token(t_all_reported=87.5, t_scheduled=90.0, t_first_token=110.0)
    request = RequestTrace("m" * length, [push(tokens=131072, **slow)], [loaded], [token])
    draw_request(request, tmp_path / "one.png")
    ((title, figure),) = edges
    assert title < figure


def test_plot_draws_the_scheduler_below_the_ranks(tmp_path: Path) -> None:
    out = tmp_path / "one.svg"
    draw_request(RequestTrace("r", [], [load(t_reported=2.0)], [first_token(t_first_token=3.0)]), out)
    titles = _titles(out.read_text())
    assert "<!-- scheduler -->" in titles
    assert "D's scheduler: first step" in titles


def _titles(svg: str) -> str:
    """matplotlib writes each text as a comment before its outlines."""
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip().startswith("<!--"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plot", "{}", "--request", "nobody"], "'nobody' is not the id of one request: no request has it"),
        (["plot", "{}", "--request", "p-"], "2 requests have it"),
        (["plot", "{}", "--request", "p-1", "--out", "{}/one.txt"], "one.txt cannot be written"),
        (["summary", "{}/empty"], "set trace_dir in kv_connector_extra_config"),
        (["merge", "{}/empty"], "set trace_dir in kv_connector_extra_config"),
        (["merge", "{}", "--out", "{}/none/one.json"], "No such file or directory"),
    ],
    ids=["no such request", "several requests", "unknown format", "empty summary", "empty merge", "no folder"],
)
def test_an_error_is_reported_in_one_line(recorded: Path, arguments: list[str], says: str) -> None:
    (recorded / "empty").mkdir()
    result = run(*(argument.format(recorded) for argument in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_plot_without_matplotlib_names_the_extra_to_install(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("plot", recorded, "--out", tmp_path / "one.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    for arguments in (["summary", recorded], ["merge", recorded, "--out", tmp_path / "one.json"]):
        assert run(*arguments).exit_code == 0


def test_a_request_without_times_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="no time of r is recorded"):
        draw_request(RequestTrace("r", [push()], []), tmp_path / "one.png")
