"""The `layerpush` command: exit statuses and stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import layerpush
from bench.servers.ports import PortAllocator
from layerpush.apps import doctor
from layerpush.apps.checks.finding import Finding, Grade, Result
from layerpush.apps.cli import app
from tests.support.ports import DOCTOR_PORTS

OK = Finding("one", Grade.OK, "fine")
WARN = Finding("two", Grade.WARN, "so so", "consider this")
FAIL = Finding("three", Grade.FAIL, "broken", "do that\nand this")

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"layerpush {layerpush.__version__}\n"


@pytest.mark.parametrize(
    ("command", "taught"),
    [
        ([], "LayerwisePushConnector"),
        (["doctor"], "side-channel port"),
        (["proxy"], "SIGTERM"),
    ],
)
def test_help_explains_each_command(command: list[str], taught: str) -> None:
    result = runner.invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert taught in result.stdout


def test_help_fits_terminals_of_any_width() -> None:
    """typer keeps a docstring's line breaks: there must be none inside of a paragraph."""

    def helps(command: Any) -> Iterator[str]:
        yield command.help
        for inner in getattr(command, "commands", {}).values():
            yield from helps(inner)

    texts = list(helps(get_command(app)))
    assert len(texts) > 8
    assert [text for text in texts if any("\n" in part for part in text.split("\n\n"))] == []


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:", ":5600", "10.0.0.1:0", "10.0.0.1:70000", "http://a/"])
def test_a_peer_is_host_and_port(text: str) -> None:
    result = runner.invoke(app, ["doctor", "--peer", text], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "is not HOST:PORT, such as 10.0.0.1:5600" in result.stderr


@pytest.mark.parametrize(("text", "host"), [("10.0.0.1:5600", "10.0.0.1"), ("[fd00::1]:5600", "fd00::1")])
def test_doctor_checks_a_configuration_first_and_a_peer_last(
    text: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[object, ...]]()

    def check(*arguments: object) -> Result:
        asked.append(arguments)
        return Result(Grade.OK, "fine")

    monkeypatch.setattr(doctor, "CHECKS", {"machine": check})
    monkeypatch.setattr(doctor, "check_transfer_config", check)
    monkeypatch.setattr(doctor, "check_peer", check)
    result = runner.invoke(app, ["doctor", "--kv-transfer-config", "{}", "--peer", text])
    lines = result.stdout.splitlines()[:3]
    assert [line[6:24].strip() for line in lines] == ["configuration", "machine", "peer"]
    assert [line[24:] for line in lines] == ["fine"] * 3
    assert {line[23] for line in lines} == {" "}, "a gap between a name and its finding"
    assert asked == [("{}",), (), (host, 5600, "{}")]


def test_help_works_without_loading_vllm_torch_or_nixl() -> None:
    code = "import sys, layerpush.apps.cli; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not loaded & {"torch", "vllm", "nixl", "aiohttp", "matplotlib", "msgspec"}


@pytest.mark.parametrize(("findings", "status"), [([OK], 0), ([OK, WARN], 0), ([OK, WARN, FAIL], 1), ([FAIL, OK], 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_fails_if_a_check_failed(
    findings: list[Finding], status: int, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: iter(findings))
    assert runner.invoke(app, ["doctor", *(["--json"] if as_json else [])]).exit_code == status


def test_doctor_prints_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: iter([OK, WARN, FAIL]))
    lines = [line.strip() for line in runner.invoke(app, ["doctor"]).stdout.splitlines() if line.strip()]
    assert [line.split()[0] for line in lines] == ["ok", "warn", "->", "fail", "->", "->", "1"]
    assert lines[4:6] == ["-> do that", "-> and this"]
    assert lines[-1] == "1 ok, 1 to consider, 1 failed"


def test_doctor_prints_nothing_that_a_terminal_would_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = Finding("peer", Grade.FAIL, "\x1b[2Jone\rok\ntwo\u202e", "do \x07that")
    monkeypatch.setattr(doctor, "examine", lambda *_: iter([hostile]))
    text = runner.invoke(app, ["doctor"]).stdout
    assert "?[2Jone?ok\n" in text
    assert "two?\n" in text
    assert "-> do ?that\n" in text


def test_doctor_json_is_the_only_output_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(*_: object) -> list[Finding]:
        print("a library says hello")
        return [WARN]

    monkeypatch.setattr(doctor, "examine", noisy)
    result = runner.invoke(app, ["doctor", "--json"])
    assert json.loads(result.stdout) == [
        {"check": "two", "verdict": "warn", "found": "so so", "advice": "consider this"}
    ]


def test_doctor_passes_on_this_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks this machine for real: no check fails; warnings are allowed."""
    for name in [name for name in os.environ if name.startswith(("UCX_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(PortAllocator(DOCTOR_PORTS).next_free()))
    result = runner.invoke(app, ["doctor", "--json"])
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)}
    assert list(findings) == list(doctor.CHECKS)
    assert [finding for finding in findings.values() if finding["verdict"] == "fail"] == []
    assert "created an agent with UCX" in findings["NIXL"]["found"]
    assert result.exit_code == 0
