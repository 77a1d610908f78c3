"""Compare the names of vLLM on which layerpush relies with the recorded ones, and name those that have moved.

They are: imported names, targets of patches, methods and attributes that layerpush's subclasses override, and private
names. Reads sources only. Compares the installed vLLM, and build/vllm-0.33 where it exists.

  python -m scripts.vllm_names            exit status 1 if a name has moved, or is not recorded
  python -m scripts.vllm_names --record   write scripts/vllm_names.json, after layerpush has been adapted
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from layerpush.compat.patches import PATCHES
from layerpush.compat.vllm_sources import VllmSources

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
NEWER = ROOT / "build/vllm-0.33/vllm"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"

_SERVING = "vllm.entrypoints.generate.base.serving:GenerateBaseServing"
OWNERS: Mapping[str, str] = {
    "_call_utility_async": "vllm.v1.engine.core_client:DPLBAsyncMPClient",
    "_get_data_parallel_rank": _SERVING,
    "_with_kv_transfer_rejection_cleanup": _SERVING,
}
"""Classes of private names whose object has no class in its annotation."""

UNSEEN = (
    f"{_MULTI}:MultiConnector._connectors",
    f"{_MULTI}:MultiKVConnectorMetadata.metadata",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient.core_engines",
    "vllm.v1.engine.core_client:DPLBAsyncMPClient.reqs_in_flight",
    "vllm.v1.engine.core:EngineCore.scheduler",
    f"{_NIXL}.push_worker:NixlPushConnectorWorker._push_writer_thread",
    "vllm.distributed.kv_transfer.kv_connector.utils:TransferTopology.get_engine_info",
    "vllm.distributed.kv_transfer.kv_connector.utils:TransferTopology.handshake_target_ranks",
)
"""Names in strings, and of objects without an annotation."""


class Package:
    """The classes of layerpush, and the classes of vLLM that they extend."""

    def __init__(self, root: Path = ROOT) -> None:
        files = sorted((root / "layerpush").rglob("*.py"))
        self.modules = {_module_name(file.relative_to(root)): ast.parse(file.read_text()) for file in files}
        self._imports = {name: dict(_imports(tree)) for name, tree in self.modules.items()}
        self._own = {name for tree in self.modules.values() for name in _own_names(tree)}

    def names(self, sources: VllmSources) -> set[str]:
        """Every name of vLLM on which layerpush relies. Raises ``LookupError`` for a private name without an owner."""
        found = {target.path for patch in PATCHES for target in patch.targets if not target.is_new} | set(UNSEEN)
        for module, tree in self.modules.items():
            found |= {path for path in self._imports[module].values() if path.startswith("vllm.") and ":" in path}
            for scope in tree.body:
                if isinstance(scope, ast.ClassDef):
                    found |= self._overridden(module, scope, sources)
            if module.startswith("layerpush.compat."):  # tests/unit/test_boundaries.py: no other folder uses one
                found |= set(self._private(module, tree, sources))
        return found

    def _bases(self, module: str, name: str) -> list[str]:
        """The classes of vLLM that a class extends: one of vLLM, or one of layerpush by its name in ``module``."""
        path = self._imports.get(module, {}).get(name, f"{module}:{name}")
        home, _, plain = path.partition(":")
        if home.startswith("vllm."):
            return [path]
        if f"{module}:{name}" != path:
            return self._bases(home, plain)
        scope = next((n for n in ast.walk(self.modules.get(home, ast.Module([], []))) if _is_class(n, plain)), None)
        bases = [] if scope is None else [base for base in scope.bases if isinstance(base, ast.Name)]
        return [path for base in bases for path in self._bases(home, base.id)]

    def _overridden(self, module: str, scope: ast.ClassDef, sources: VllmSources) -> set[str]:
        members = {name for name in _own_names(scope) if not name.startswith("__") or name == "__init__"}
        paths = {f"{base}.{name}" for base in self._bases(module, scope.name) for name in members}
        return {path for path in paths if sources.find(path) is not None}

    def _private(self, module: str, tree: ast.AST, sources: VllmSources) -> Iterator[str]:
        for scope, node in _with_scopes(tree):
            if not (isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)):
                continue
            for base in self._classes_of(module, scope, node.value):
                if sources.find(f"{base}.{node.attr}") is not None:
                    yield f"{base}.{node.attr}"
                    break
            else:
                if node.attr in self._own:
                    continue
                if node.attr not in OWNERS:
                    raise LookupError(
                        f"{module}:{node.lineno}: vLLM has no {node.attr} there; name its class in OWNERS"
                    )
                yield f"{OWNERS[node.attr]}.{node.attr}"

    def _classes_of(self, module: str, scope: list[ast.AST], value: ast.expr) -> list[str]:
        """vLLM's classes of ``value``: ``self``, ``super()`` or a parameter with an annotation."""
        name = value.func if isinstance(value, ast.Call) else value
        if not isinstance(name, ast.Name):
            return []
        if name.id in ("self", "super", "cls"):
            owner = next((each for each in reversed(scope) if isinstance(each, ast.ClassDef)), None)
            if owner is not None:
                return self._bases(module, owner.name)
        for each in reversed(scope):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                for one in [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]:
                    if one.arg == name.id and one.annotation is not None:
                        words = [n.id for n in ast.walk(one.annotation) if isinstance(n, ast.Name)]
                        return [path for word in words for path in self._bases(module, word)]
        return []


def _module_name(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"


def _own_names(tree: ast.AST) -> set[str]:
    """The names that are defined in a class or a module: functions, classes, variables, attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id == "self" else set()
    body = getattr(tree, "body", [])
    targets = [t for n in body for t in getattr(n, "targets", [getattr(n, "target", None)]) if isinstance(t, ast.Name)]
    return found | {target.id for target in targets}


def _is_class(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == name


def _with_scopes(tree: ast.AST, scope: tuple[ast.AST, ...] = ()) -> Iterator[tuple[list[ast.AST], ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        yield list(scope), node
        inner = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _with_scopes(node, (*scope, node) if inner else scope)


def version_of(sources: VllmSources) -> str:
    found = re.search(r"^__version__ = version = '(\d+\.\d+\.\d+)", (sources.home / "_version.py").read_text(), re.M)
    assert found is not None, "vllm/_version.py names no version"
    return found[1]


def moved(recorded: Mapping[str, Any], sources: VllmSources, names: Iterable[str]) -> Iterator[str]:
    """One line for each name that is not as recorded. A release without a record is compared with the newest one."""
    version = version_of(sources)
    known = version if version in recorded["versions"] else max(recorded["versions"], key=_number)
    for path in sorted(names):
        if path not in recorded["names"]:
            yield f"{path} is not recorded"
            continue
        expected, found = _in_version(recorded, path, known), sources.describe(path)
        if found != expected:
            yield f"{path} of vLLM {version} is {found or 'missing'}; recorded for {known}: {expected or 'missing'}"


def _in_version(recorded: Mapping[str, Any], path: str, version: str) -> str | None:
    entry = recorded["names"].get(path)
    found: str | None = entry.get(version) if isinstance(entry, dict) else entry
    return found


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def record(recorded: Mapping[str, Any], homes: Mapping[str, VllmSources], names: Iterable[str]) -> dict[str, Any]:
    """``names`` in these versions, and in those that are recorded already."""
    versions = sorted({*recorded["versions"], *homes}, key=_number)
    entries: dict[str, Any] = {}
    for path in sorted(names):
        each = {v: homes[v].describe(path) if v in homes else _in_version(recorded, path, v) for v in versions}
        entries[path] = each if len(set(each.values())) > 1 else each[versions[0]]
    return {"versions": versions, "names": entries}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.vllm_names", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write the record instead of comparing")
    wanted = parser.parse_args()
    every = [VllmSources()] + ([VllmSources(NEWER)] if NEWER.is_dir() else [])
    homes = {version_of(sources): sources for sources in every}
    package = Package()
    names = set[str]().union(*(package.names(sources) for sources in homes.values()))
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {"versions": [], "names": {}}
    if wanted.record:
        if absent := sorted(set(recorded["versions"]) - set(homes)):
            print(
                f"The record has vLLM {', '.join(absent)} too, whose sources are not here: run scripts/vllm-0.33 first"
            )
            return 1
        FILE.write_text(json.dumps(record(recorded, homes, names), indent=1) + "\n")
        return 0
    problems = [f"{path} is recorded, and layerpush does not use it" for path in recorded["names"].keys() - names]
    for sources in homes.values():
        problems += moved(recorded, sources, names)
    for problem in sorted(set(problems)):
        print(problem)
    if problems:
        print("Adapt layerpush where it relies on these names, then run: python -m scripts.vllm_names --record")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
