"""The emulated link: its commands, and that it removes its own devices and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.forward.__main__ import app
from bench.servers import link as linking
from bench.servers.link import EmulatedLink, LinkError


class Commands:
    """Plays ``ip`` and ``tc``: keeps the commands, and fails at each that contains ``fails``."""

    def __init__(self) -> None:
        self.run: list[tuple[str, ...]] = []
        self.fails: str | None = None
        self.error: type[BaseException] = LinkError

    def __call__(self, *command: str, check: bool = True) -> None:
        self.run.append(command)
        if check and self.fails is not None and self.fails in command:
            raise self.error(" ".join(command))

    def objects(self, verb: str) -> set[tuple[str, str]]:
        """Namespaces and devices of the host that were made ("add") or removed ("del")."""
        return {
            (command[1], command[3])
            for command in self.run
            if command[0] == "ip" and command[1] in ("netns", "link") and command[2] == verb
        }


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    played = Commands()
    monkeypatch.setattr(linking, "_run", played)
    monkeypatch.setattr(linking, "NAMESPACES", tmp_path)
    monkeypatch.setattr(linking, "check_emulation", lambda: None)
    return played


def made(commands: Commands) -> set[tuple[str, str]]:
    """The objects to remove: a pair of devices between two namespaces goes with these."""
    return {each for each in commands.objects("add") if not each[1].startswith("lpd")}


def test_the_link_removes_every_object_it_made(commands: Commands) -> None:
    with EmulatedLink("1gbit"):
        assert not commands.objects("del")
    assert made(commands) == commands.objects("del")
    assert len(made(commands)) == 4


@pytest.mark.parametrize("step", ["netns", "addr", "qdisc"])
@pytest.mark.parametrize("error", [LinkError, KeyboardInterrupt])
def test_a_failed_setup_leaves_no_object(commands: Commands, step: str, error: type[BaseException]) -> None:
    commands.fails, commands.error = step, error
    with pytest.raises(error), EmulatedLink("1gbit"):
        pass
    removed = commands.objects("del")
    if error is LinkError and step == "netns":  # the first command failed: nothing was made
        assert not removed
    else:
        assert removed == made(commands)


def test_a_foreign_namespace_is_not_touched(commands: Commands, tmp_path: Path) -> None:
    foreign = f"layerpush-d-{os.getpid() % 100_000}"
    (tmp_path / foreign).touch()
    with pytest.raises(LinkError, match=f"{foreign} already, and it is not ours"), EmulatedLink("1gbit"):
        pass
    assert not commands.run


def test_a_foreign_namespace_that_appears_during_setup_is_not_touched(commands: Commands) -> None:
    foreign = f"layerpush-d-{os.getpid() % 100_000}"
    commands.fails = foreign
    with pytest.raises(LinkError, match=foreign), EmulatedLink("1gbit"):
        pass
    assert commands.objects("del") == {("netns", f"layerpush-p-{os.getpid() % 100_000}")}


def test_the_error_without_root_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LinkError, match="run this as root, or without an emulated link"), EmulatedLink("1gbit"):
        pass
    result = CliRunner().invoke(app, ["--links", "loopback,500mbit"], env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert "run this as root" in result.output


def test_a_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(linking.shutil, "which", lambda tool: None)
    with pytest.raises(LinkError, match="'ip': install iproute2"), EmulatedLink("1gbit"):
        pass
