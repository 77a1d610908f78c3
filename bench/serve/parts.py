"""Finished calls, kept in a folder until all are there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.serve.measured import Measured

SETTINGS = "settings.json"


class PartsError(RuntimeError):
    """Without --resume: an unfinished run exists. With it: there is none, or it has other settings."""


class Parts:
    """``FILE.parts`` beside the result ``FILE``: settings, and a file for each call.

    ``starts`` counts the times that engines were started for this run.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], resume: bool) -> None:
        """Raises ``PartsError``."""
        self.folder = out.with_name(f"{out.name}.parts")
        kept = self.folder / SETTINGS
        wanted = json.loads(json.dumps(settings))
        if not resume:
            if self.folder.exists():
                raise PartsError(
                    f"{self.folder} is an unfinished run: go on with --resume {out}, or delete it to begin anew"
                )
            self.folder.mkdir(parents=True)
            kept.write_text(json.dumps(wanted, indent=1))
        elif not kept.is_file():
            raise PartsError(f"--resume {out}: there is no {self.folder}, so there is nothing to go on with")
        elif differing := _differing(json.loads(kept.read_text()), wanted):
            raise PartsError(f"--resume {out}: it was begun with other settings: {'; '.join(differing)}")
        self.calls = [msgspec.json.decode(path.read_bytes(), type=Measured) for path in self._files()]
        self.starts = 1 + max((call.start for call in self.calls), default=-1)

    @property
    def have(self) -> set[str]:
        """The keys of the calls that are there."""
        return {path.stem for path in self._files()}

    def save(self, key: str, call: Measured) -> None:
        """Keep a call. A kill meanwhile leaves nothing of it."""
        fresh = self.folder / f"{key}.tmp"
        fresh.write_bytes(msgspec.json.encode(call))
        os.replace(fresh, self.folder / f"{key}.json")
        self.calls.append(call)

    def remove(self) -> None:
        """Delete the folder, once the result has all calls."""
        shutil.rmtree(self.folder)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.json") if path.name != SETTINGS)


def _differing(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} was {kept.get(key)!r}, is {wanted.get(key)!r}"
        for key in dict.fromkeys([*kept, *wanted])
        if kept.get(key) != wanted.get(key)
    ]
