"""The `layerpush` command: exit statuses and stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import layerpush
from bench.servers.ports import PortAllocator
from layerpush.apps import doctor
from layerpush.apps.cli import app
from layerpush.apps.doctor import Finding, Grade
from tests.support.ports import DOCTOR_PORTS

OK = Finding("one", Grade.OK, "fine")
WARN = Finding("two", Grade.WARN, "so so", "consider this")
FAIL = Finding("three", Grade.FAIL, "broken", "do that")

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


def test_help_works_without_loading_vllm_torch_or_nixl() -> None:
    code = "import sys, layerpush.apps.cli; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not loaded & {"torch", "vllm", "nixl", "aiohttp", "matplotlib", "msgspec"}


@pytest.mark.parametrize(("findings", "status"), [([OK], 0), ([OK, WARN], 0), ([OK, WARN, FAIL], 1), ([FAIL, OK], 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_fails_if_a_check_failed(
    findings: list[Finding], status: int, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    assert runner.invoke(app, ["doctor", *(["--json"] if as_json else [])]).exit_code == status


def test_doctor_prints_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter([OK, WARN, FAIL]))
    lines = [line.strip() for line in runner.invoke(app, ["doctor"]).stdout.splitlines() if line.strip()]
    assert [line.split()[0] for line in lines] == ["ok", "warn", "->", "fail", "->", "1"]
    assert lines[4] == "-> do that"
    assert lines[-1] == "1 ok, 1 to consider, 1 failed"


def test_doctor_json_is_the_only_output_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy() -> list[Finding]:
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
