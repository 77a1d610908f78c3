"""Finds commands of the documentation that their programs would refuse. Runs nothing."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import typer

from layerpush.apps.checks.transfer_config import connectors
from layerpush.apps.cli import app as layerpush_app
from layerpush.core.config import ConfigError, LayerPushConfig
from layerpush.core.request_params import ParamsError, check_params
from layerpush.core.transfer_config import check_levels
from tests.docblocks import ROOT, Command

Words = Sequence[str]
SERVER = "vllm.entrypoints.openai.api_server"
ANY_ARGUMENTS = frozenset(
    [
        "build/docs/bin/mkdocs",
        "cat",
        "cd",
        "cp",
        "echo",
        "export",
        "git",
        "grep",
        "journalctl",
        "kubectl",
        "mkdir",
        "python3",
        "ss",
        "ucx_info",
        "vllm-router",
        "wait",
    ]
)
"""Programs of other projects. Their arguments are not checked."""
UCX = frozenset(
    {"LOG_LEVEL", "MAX_RNDV_RAILS", "NET_DEVICES", "PROTO_INFO", "RCACHE_MAX_UNRELEASED", "TCP_PORT_RANGE", "TLS"}
)
"""UCX's variables that pages name, without ``UCX_``; tests/contract/test_ucx_settings.py asks UCX for them."""


PLACEHOLDERS = {"DIR": str(ROOT), "build/trace": str(ROOT), "FILE": str(ROOT / "pyproject.toml")}
"""Existing paths in the place of a reader's paths."""


class WrongCommandError(ValueError):
    """The program would refuse the command; the text is its message."""


class IncompleteCommandError(WrongCommandError):
    """The command lacks an argument; all others are good."""


def check(command: Command) -> None:
    """Raises ``WrongCommandError``: no such program, option, target or file."""
    if not command.words:
        return
    program, *rest = command.words
    if program.startswith("docs/examples/"):
        if not (ROOT / program).is_file():
            raise WrongCommandError(f"{program} does not exist")
    elif program.startswith(("scripts/", ".ci/")):
        _script(program, rest)
    elif (checker := CHECKS.get(program.removeprefix(".venv/bin/"))) is not None:
        checker(rest)
    elif program.removeprefix(".venv/bin/") not in ANY_ARGUMENTS:
        raise WrongCommandError(f"nothing is known about {program!r}")


def check_transfer_config(config: Mapping[str, Any]) -> None:
    """The value of ``--kv-transfer-config``. Raises ``WrongCommandError``."""
    try:
        check_levels(config)
        connectors(config)
    except ConfigError as error:
        raise WrongCommandError(str(error)) from None


def _vllm(words: Words) -> None:
    if words[:2] == ["bench", "serve"]:
        _parsed(_vllm_parser(bench=True), words[2:])
        return
    if words[:1] != ["serve"]:
        raise WrongCommandError(f"vllm {' '.join(words[:1])}")
    arguments = _parsed(_vllm_parser(bench=False), words[1:])
    if arguments.kv_transfer_config is not None:
        given = words[words.index("--kv-transfer-config") + 1]
        check_transfer_config(json.loads(given))


def _make(words: Words) -> None:
    target, *rest = words
    recipe = re.search(rf"^{re.escape(target)}:.*\n\t@(scripts/[\w-]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    if recipe is None:
        raise WrongCommandError(f"make {target}: no such target")
    variables = dict(word.split("=", 1) for word in rest)
    if variables.keys() - {"ARGS", *(["MINUTES"] if target == "soak" else [])}:
        raise WrongCommandError(f"make {target} does not know {', '.join(variables)}")
    minutes = ["--minutes", variables["MINUTES"]] if "MINUTES" in variables else []
    _script(recipe[1], [*minutes, *shlex.split(variables.get("ARGS", ""))])


def _script(path: str, words: Words) -> None:
    """A script passes its arguments on to one command."""
    if not (ROOT / path).is_file():
        raise WrongCommandError(f"{path} does not exist")
    runs = re.search(r'^(?:exec )?(\S.*) "\$@"(?: \|\| checked=\$\?)?$', (ROOT / path).read_text(), re.MULTILINE)
    if runs is not None:
        program, *own = shlex.split(runs[1].replace('"$python"', "python"))
        check(Command((program, *own, *words), ()))
    elif words:
        raise WrongCommandError(f"{path} takes no arguments")


def _python(words: Words) -> None:
    """``-m MODULE``: one of vLLM's, pytest, the generator of pages, or a module of ours with a typer ``app``."""
    if words[:1] == ["docs/examples/load.py"]:
        _vllm(["bench", "serve", *words[1:]])
    if words[:1] != ["-m"]:
        return
    name, rest = words[1], words[2:]
    if (checker := MODULES.get(name)) is not None:
        checker(rest)
        return
    try:
        module = importlib.import_module(name)
        app = getattr(module, "app", None) or importlib.import_module(f"{name}.__main__").app
    except (ImportError, AttributeError):
        raise WrongCommandError(f"nothing is known about python -m {name}") from None
    _typer(app, rest)


def _pip(words: Words) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {extra for word in words for found in re.findall(r"\[([\w,]+)\]", word) for extra in found.split(",")}
    if unknown := wanted - extras.keys():
        raise WrongCommandError(f"pip install: no such extra: {unknown.pop()}")


def _pytest(words: Words) -> None:
    for word in words:
        if word.startswith("tests") and not (ROOT / word.split("::")[0]).exists():
            raise WrongCommandError(f"pytest {word}: no such file")


def _curl(words: Words) -> None:
    """The body must be JSON, with good parameters for an engine. A variable of the shell counts as an object."""
    if "-d" not in words:
        return
    body = words[words.index("-d") + 1]
    try:
        request = json.loads(re.sub(r"(?<!\")\$\w+", "{}", body) if ": $" in body else body)
    except ValueError as error:
        raise WrongCommandError(f"curl -d: {error}") from None
    params = request.get("kv_transfer_params")
    if params:
        try:
            check_params(params, "kv_both", LayerPushConfig())
        except ParamsError as error:
            raise WrongCommandError(str(error)) from None


def _docgen(words: Words) -> None:
    from scripts.docgen.sections import SECTIONS

    if unknown := [word for word in words if word not in (*SECTIONS, "--check", "--help")]:
        raise WrongCommandError(f"scripts/pages: {unknown[0]}")


CHECKS: Mapping[str, Callable[[Words], None]] = {
    "curl": _curl,
    "layerpush": lambda words: _typer(layerpush_app, words),
    "make": _make,
    "pip": _pip,
    "pytest": _pytest,
    "python": _python,
    "vllm": _vllm,
}
MODULES: Mapping[str, Callable[[Words], None]] = {
    SERVER: lambda words: _vllm(["serve", *words]),
    "pytest": _pytest,
    "scripts.docgen": _docgen,
}


def _typer(app: typer.Typer, words: Words) -> None:
    command: Any = typer.main.get_command(app)
    name, rest = "command", [PLACEHOLDERS.get(word, word) for word in words]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in command.commands:
            raise WrongCommandError(f"no such command: {name}")
        command = command.commands[name]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            command.make_context(name, rest)
        except (RuntimeError, SystemExit) as ended:  # --help and --version
            if not said.getvalue():
                raise WrongCommandError(f"{name} {' '.join(rest)}: {ended!r}") from None
        except Exception as error:  # noqa: BLE001  # click's errors; typer may bring its own click
            kind = IncompleteCommandError if type(error).__name__ == "MissingParameter" else WrongCommandError
            raise kind(f"{name}: {getattr(error, 'message', error)}") from None


@cache
def _vllm_parser(bench: bool) -> Any:
    """The parser of ``vllm bench serve`` or of ``vllm serve``."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    if not bench:
        return make_arg_parser(parser)
    add_cli_args(parser)
    return parser


def _parsed(parser: Any, words: Words) -> Any:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            return parser.parse_args(list(words))
        except SystemExit:
            raise WrongCommandError(said.getvalue().strip().splitlines()[-1]) from None
