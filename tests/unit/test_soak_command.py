"""The soak's command line and its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.provenance import provenance
from tests.e2e.enginespec import STOCK
from tests.faults.soak.command import app
from tests.faults.soak.ending import BROKEN, FAILED, INTERRUPTED, PASSED, Ending
from tests.faults.soak.engine import Memory
from tests.faults.soak.kinds import KINDS
from tests.faults.soak.settings import Settings
from tests.faults.soak.specs import LINE_UPS, LineUp
from tests.faults.soak.tally import Tally, Turn

ROOT = Path(__file__).parents[2]


MEMORIES = {"P1": [Memory(500.0, [400.0, 410.0]), Memory(600.0, [450.0, 480.0])]}


def tally(*, compared: int = 1) -> Tally:
    made = Tally(turns=[Turn("plain", True, tokens=compared, pushes=compared)])
    made.begin_round()
    made.struck("kill-p")
    made.end_round()
    return made


def report(made: Tally, tmp_path: Path, **ends: bool) -> tuple[int, str, dict[str, Any]]:
    console = Console(record=True, width=200, file=(tmp_path / "console").open("w"))
    out = tmp_path / "new" / "soak.json"
    ending = Ending(Settings(2.0, 41), made, MEMORIES, tmp_path / "logs", 130.0, provenance(41), **ends)
    ending.write(out)
    ending.show(console, out)
    return ending.exit_status, console.export_text(), json.loads(out.read_text())


def test_a_clean_run_passes_and_reports_the_survived_faults(tmp_path: Path):
    status, text, figures = report(tally(), tmp_path)
    assert status == PASSED
    assert figures["verdict"] == "passed"
    assert figures["faults"]["kill-p"] == {"injected": 1, "struck": None, "survived": 1}
    assert (figures["seed"], figures["minutes"], figures["seconds"]) == (41, 2.0, 130)
    assert not figures["argv"][0].startswith(str(Path.cwd()))
    assert {"argv", "git_sha", "git_dirty", "versions", "samples", "mismatches", "leaks", "hangs"} <= figures.keys()
    assert (figures["memory"]["P1"]["peak_mib"], figures["memory"]["P1"]["growth_mib"]) == (600.0, 30.0)
    assert "Nothing was wrong" in text


@pytest.mark.parametrize("ill", ["mismatch", "leak", "hang", "death"])
def test_any_problem_fails_the_run_and_prints_how_to_reproduce_it(tmp_path: Path, ill):
    made = tally()
    made.problem(ill, "P1 [did] it")
    status, text, figures = report(made, tmp_path, stopped=ill == "leak")
    assert status == FAILED
    assert "P1 [did] it" in text
    assert "scripts/soak --seed 41 --minutes 2" in text
    assert f"Logs: {tmp_path / 'logs'}" in text
    assert figures["problems"] == [{"ill": ill, "round": 1, "text": "P1 [did] it"}]


def test_a_run_that_compared_nothing_fails(tmp_path: Path):
    assert report(tally(compared=0), tmp_path)[0] == FAILED


def test_interrupted_and_broken_runs_report_too(tmp_path: Path):
    assert report(tally(), tmp_path, stopped=True)[0] == INTERRUPTED
    assert report(tally(compared=0), tmp_path, stopped=True)[0] == INTERRUPTED
    status, _, figures = report(tally(), tmp_path, broken=True)
    assert status == BROKEN
    assert figures["broken"] is True


def test_the_command_line_reproduces_the_settings():
    kinds = (KINDS[0], KINDS[3])
    words = Settings(1.5, 7, kinds, engines=1, in_flight=4, round_s=12.0, corrupt=True).command_line().split()
    assert words[:5] == ["scripts/soak", "--seed", "7", "--minutes", "1.5"]
    assert words[5:7] == ["--faults", f"{KINDS[0].name},{KINDS[3].name}"]
    assert words[7:] == [
        "--line-ups",
        "plain",
        "--engines",
        "1",
        "--in-flight",
        "4",
        "--round-seconds",
        "12",
        "--corrupt",
    ]
    assert "--faults none" in Settings(1.5, 7, ()).command_line()
    assert "--faults" not in Settings(1.5, 7).command_line()


def test_the_list_names_every_kind_and_line_up():
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--list"])
    assert result.exit_code == 0
    assert [one.name for one in (*KINDS, *LINE_UPS) if one.name not in result.output] == []


def test_line_ups_share_the_time_and_have_separate_requests():
    line_ups, turns = zip(*Settings(14.0, 7, line_ups=LINE_UPS).turns(), strict=True)
    assert line_ups == LINE_UPS
    assert [turn.minutes for turn in turns] == [14.0 / len(LINE_UPS)] * len(LINE_UPS)
    assert len({turn.seed for turn in turns}) == len(LINE_UPS)
    assert [{kind.place for kind in turn.kinds} for turn in turns] == [set(line_up.places) for line_up in LINE_UPS]


@pytest.mark.parametrize("line_up", LINE_UPS, ids=lambda line_up: line_up.name)
def test_a_line_up_has_as_many_ps_as_ds_and_a_plain_engine(line_up: LineUp):
    specs = line_up.specs(2, corrupt=False)
    assert [spec.name for spec in specs] == ["P1", "P2", "D1", "D2", "R"]
    assert {spec.model for spec in specs} == {line_up.model}
    assert [STOCK in (spec.transfer or "") for spec in specs] == [False, line_up.stock, line_up.stock, False, False]
    assert [spec.name for spec in line_up.specs(1, corrupt=True) if "Corrupting" in (spec.transfer or "")] == ["P1"]


@pytest.mark.parametrize(
    ("option", "given", "hint"),
    [
        ("--line-ups", "plain,stok", "'stok'; did you mean stock? choose from: plain, "),
        ("--faults", "kill-p,stop-dd", "'stop-dd'; did you mean stop-d? choose from: abort-p, "),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(option: str, given: str, hint: str):
    result = CliRunner(env={"COLUMNS": "400", "NO_COLOR": "1"}).invoke(app, [option, given])
    assert result.exit_code == 2
    assert hint in " ".join(result.output.split())
