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
    assert importers("vllm.distributed.kv_transfer.kv_connector.factory") <= {"plugin.py", "doctor.py"}


@pytest.mark.parametrize("module", ["vllm", "torch", "nixl", "threading"])
def test_what_the_writer_thread_owns_knows_neither_engine_nor_threads(module: str) -> None:
    """The desks, the peers and the sessions are handed what they need, so that they can be tested without either."""
    known = importers(module)
    for folder in ("prefill", "decode"):
        for name in ("desk", "protocol", "session", "ledger", "watch", "writer", "outbox"):
            assert f"{folder}/{name}.py" not in known
    assert not {"peers.py", "wire.py", "complaints.py", "hosts.py"} & known


@pytest.mark.parametrize("module", ["decode/protocol.py", "decode/session.py", "decode/watch.py", "prefill/ledger.py"])
def test_what_is_pure_has_no_clock(module: str) -> None:
    assert (PACKAGE / module).exists()
    assert module not in importers("time")


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
