"""vLLM as it is without layerpush's patches of a process, until the test ends."""

from __future__ import annotations

import importlib
import sys

import pytest

from layerpush.compat.patches import MARK, PATCHES, VARIABLE, PatchHook, Process


def leave_out(name: str, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next engine of this process do without one patch. Its constructor installs the others again."""
    monkeypatch.setenv(VARIABLE, name)
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, PatchHook)])
    for patch in PATCHES:
        for target in patch.targets:
            if target.process is process:
                owner, attribute = target.owner_in(importlib.import_module(target.module))
                if target.is_new:
                    monkeypatch.delattr(owner, attribute, raising=False)
                else:
                    plain = getattr(owner, attribute)
                    for _ in getattr(plain, MARK, ()):
                        plain = plain.__wrapped__
                    monkeypatch.setattr(owner, attribute, plain)
