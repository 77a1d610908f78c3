"""Who may import what, where import-linter cannot say it: to it, all of vLLM is one module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

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


def test_only_compat_knows_vllms_nixl_connector() -> None:
    assert all(name.startswith("compat/") for name in importers(NIXL_CONNECTOR))


def test_only_the_plugin_and_the_doctor_know_vllms_connector_factory() -> None:
    assert importers("vllm.distributed.kv_transfer.kv_connector.factory") <= {"plugin.py", "apps/doctor.py"}


@pytest.mark.parametrize("module", ["vllm", "torch", "nixl", "threading"])
def test_the_writer_threads_objects_know_neither_engine_nor_threads(module: str) -> None:
    """The worker hands them all they need, so tests run them without an engine. Each file must exist: no stale name."""
    files = {
        *(f"prefill/{name}.py" for name in ("registrations", "writer", "push")),
        *(f"decode/{name}.py" for name in ("loads", "load")),
        *(f"transport/{name}.py" for name in ("writes", "connections")),
        "telemetry/peer_errors.py",
    }
    assert all((PACKAGE / file).exists() for file in files)
    assert not files & importers(module)


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
def test_every_way_to_import_is_seen(source: str) -> None:
    assert any(name.startswith(NIXL_CONNECTOR) for name in imports(source))
