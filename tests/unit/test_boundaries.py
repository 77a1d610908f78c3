"""Imports that import-linter cannot forbid, as to it all of vLLM is one module; and names of classes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from layerpush.core import wire
from layerpush.decode import load_protocol
from layerpush.engine.scheduler import turn_protocol
from layerpush.prefill import claim_protocol, push_protocol
from tests.quotes import package

PACKAGE = Path(__file__).parents[2] / "layerpush"
NIXL_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


def imports(source: str) -> set[str]:
    """All modules that `source` imports, `from a import b` counted as both `a` and `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def importers(module: str) -> set[str]:
    return {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if any(name == module or name.startswith(f"{module}.") for name in imports(file.read_text()))
    }


def test_only_compat_imports_vllms_nixl_connector() -> None:
    assert all(name.startswith("compat/") for name in importers(NIXL_CONNECTOR))


def test_only_the_plugin_and_the_doctor_import_vllms_connector_factory() -> None:
    assert importers("vllm.distributed.kv_transfer.kv_connector.factory") <= {"plugin.py", "apps/doctor.py"}


@pytest.mark.parametrize("module", ["vllm", "torch", "nixl", "threading"])
def test_objects_of_the_writer_thread_import_neither_engine_nor_threading(module: str) -> None:
    """The worker passes in all that these objects need: tests need no engine. Each file must exist: no stale name."""
    files = {
        *(f"prefill/{name}.py" for name in ("claims", "decode_peers", "links", "pushes", "push")),
        *(f"decode/{name}.py" for name in ("loads", "load", "outcomes", "prefill_peers", "early_messages")),
        *(f"transport/{name}.py" for name in ("writes", "connections")),
        "telemetry/peer_errors.py",
    }
    assert all((PACKAGE / file).exists() for file in files)
    assert not files & importers(module)


@pytest.mark.parametrize("protocol", [claim_protocol, push_protocol, load_protocol, turn_protocol])
def test_a_message_shares_its_name_with_no_event_or_action(protocol: ModuleType) -> None:
    messages = {message.__name__ for message in get_args(wire.Message)}
    roots = (protocol.Event, protocol.Action)
    assert not messages & {kind.__name__ for root in roots for kind in root.__subclasses__()}


def test_class_names_are_unique() -> None:
    """But for the protocols: each has its own ``State``, ``Event`` and ``Action``, and events of one name."""
    places = defaultdict(list)
    for folder in ("layerpush", "kernels", "bench", "scripts"):
        for file in sorted((PACKAGE.parent / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(file))
    assert {"PushSession", "FleetEngine"} <= places.keys()
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not {name for name, files in shared.items() if not all(file.endswith("_protocol.py") for file in files)}


def test_no_module_imports_a_top_level_kernels() -> None:
    assert not importers("kernels")


@pytest.mark.parametrize(
    "source",
    [
        f"import {NIXL_CONNECTOR}.metadata",
        f"from {NIXL_CONNECTOR} import x",
        f"def f():\n    from {NIXL_CONNECTOR}.a import b",
    ],
)
def test_every_form_of_import_is_found(source: str) -> None:
    assert any(name.startswith(NIXL_CONNECTOR) for name in imports(source))


def is_private(name: str) -> bool:
    return len(name) > 1 and name.startswith("_") and not name.startswith("__")


def members(scope: ast.ClassDef) -> set[str]:
    """The names that a class defines: methods, class variables, and attributes of self."""
    found = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and is_private(node.id):
            found.add(node.id)
    return found


def private_names_of_vllm() -> frozenset[str]:
    """Private names that the NIXL connector and the base classes of its package define, functions and constants too."""
    v1 = package("vllm").joinpath(*NIXL_CONNECTOR.split(".")[1:-1])
    found = set()
    for file in [*(v1 / "nixl").glob("*.py"), v1 / "base.py", v1 / "metrics.py"]:
        tree = ast.parse(file.read_text())
        for scope in ast.walk(tree):
            if isinstance(scope, ast.ClassDef):
                found |= members(scope)
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                found.add(statement.name)
            elif isinstance(statement, ast.Assign):
                found |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    return frozenset(filter(is_private, found))


def uses_of_private_names(source: str, private: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, name) for each attribute, import or string in ``source`` that is one of ``private``, and for each
    definition of one in a class that extends vLLM's or compat's. A name that another class of ``source`` defines is
    that class's own.
    """
    tree = ast.parse(source)
    foreign = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("vllm.", "layerpush.compat"))
        for alias in node.names
    }
    own: set[str] = set()
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.ClassDef):
            continue
        if foreign & {base.id for base in scope.bases if isinstance(base, ast.Name)}:
            yield from ((scope.lineno, name) for name in members(scope) & private)
        else:
            own |= members(scope)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private - own:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in private - own:
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm."):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


def test_only_compat_uses_vllms_private_names() -> None:
    private = private_names_of_vllm()
    assert {"_push_writer_loop", "_reg_send_inbox", "_cleanup_remote_engine", "_reqs_to_send"} <= private
    uses = {
        f"{file.relative_to(PACKAGE)}:{line} {name}"
        for file in PACKAGE.rglob("*.py")
        if "compat" not in file.relative_to(PACKAGE).parts
        for line, name in uses_of_private_names(file.read_text(), private)
    }
    assert sorted(uses) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("worker._secret.put(1)", True),
        ("getattr(worker, '_secret')", True),
        (f"from {NIXL_CONNECTOR}.utils import _unlisted", True),
        ("from layerpush.compat.x import Base\nclass A(Base):\n    def _secret(self): ...", True),
        ("from layerpush.compat.x import Base\nclass A(Base):\n    _secret = 1", True),
        ("from layerpush.compat.x import Base\nclass A(Base):\n    def f(self): self._secret = 1", True),
        ("from vllm.x import Base\nclass A(Base):\n    def f(self): return self._secret", True),
        ("class A:\n    def f(self): self._secret = 1\n    def g(self): return self._secret", False),
        ("class A:\n    def _secret(self): ...\nA()._secret()", False),
        ("from layerpush.compat.x import Base\nclass A(Base):\n    def f(self): self._own = 1", False),
    ],
)
def test_every_use_of_a_private_name_is_found(source: str, found: bool) -> None:
    assert bool(list(uses_of_private_names(source, frozenset({"_secret"})))) == found
