"""Patches a module right after another one imports it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook(MetaPathFinder, ABC):
    """Finds the modules `names` through the other finders, and calls `patch` for each right after its code has run."""

    names: frozenset[str]

    @abstractmethod
    def patch(self, module: ModuleType) -> None:
        """Called once per module. Its exceptions reach the importer."""

    def install(self) -> None:
        """Patch the modules that are imported already; the others follow when they are imported. May be repeated."""
        for name in self.names & sys.modules.keys():
            self.patch(sys.modules[name])
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:  # another hook may patch the same module
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _PatchingLoader(spec.loader, self)
                return spec
        return None


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader, hook: ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._hook.patch(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source and the like, for tracebacks and inspect
