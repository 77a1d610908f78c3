"""The extras that commands need, and the message of a command whose extra is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, TypeAlias

import typer

Extra: TypeAlias = Literal["proxy", "plot"]

MODULES: dict[Extra, tuple[str, ...]] = {
    "proxy": ("aiohttp",),
    "plot": ("matplotlib",),
}
"""The import names of each extra's packages in pyproject.toml."""


def require(command: str, extra: Extra) -> None:
    """Print one line and exit with status 2 if a module of the extra is not installed. Imports nothing."""
    missing = [name for name in MODULES[extra] if find_spec(name) is None]
    if missing:
        typer.echo(
            f"layerpush {command} needs {', '.join(missing)}, not installed here: pip install {' '.join(missing)}",
            err=True,
        )
        raise typer.Exit(2)
