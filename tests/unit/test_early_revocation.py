"""Blocks that a step takes away: the writer learns of them before vLLM's V2 model runner overwrites them."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed import kv_transfer

from layerpush.compat.early_revocation import revoking
from layerpush.compat.metadata import LayerwiseMetadata
from tests.quotes import package


class Connector:
    def __init__(self, done: list[Any], is_layerpush: bool = True) -> None:
        self.done, self.is_layerpush = done, is_layerpush

    def handle_preemptions(self, metadata: Any) -> None:
        self.done.append(metadata)


def runner(done: list[Any]) -> Any:
    class GPUModelRunner:
        @revoking
        def finish_requests(self, scheduler_output: Any) -> None:
            done.append("vLLM")

    return GPUModelRunner()


def step(done: list[Any], connector: Any, metadata: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: connector is not None)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: connector)
    runner(done).finish_requests(SimpleNamespace(kv_connector_metadata=metadata))
    return done


def test_the_connector_gets_the_metadata_before_the_runner_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    ours = LayerwiseMetadata()
    assert step(done, Connector(done), ours, monkeypatch) == [ours, "vLLM"]


def test_of_several_connectors_only_ours_gets_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    ours, other = LayerwiseMetadata(), SimpleNamespace()
    several = SimpleNamespace(_connectors=[Connector(done, is_layerpush=False), Connector(done)])
    assert step(done, several, SimpleNamespace(metadata=(other, ours)), monkeypatch) == [ours, "vLLM"]


@pytest.mark.parametrize("metadata", [None, SimpleNamespace()])
def test_engines_without_our_connector_are_left_alone(metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    assert step(done, None if metadata is None else Connector(done, is_layerpush=False), metadata, monkeypatch) == [
        "vLLM"
    ]


def test_vllm_calls_the_patched_method_before_it_overwrites_blocks() -> None:
    """Checks the source of the installed vLLM: the runner itself needs a GPU."""
    tree = ast.parse((package("vllm") / "v1/worker/gpu/model_runner.py").read_text())
    functions = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    lines = {called: _line(functions["execute_model"], called) for called in ("finish_requests", "update_requests")}
    assert lines["finish_requests"] < lines["update_requests"] < _line(functions["execute_model"], "pre_forward")
    for overwriting in ("zero_block_ids", "copy_kv_cache_blocks_inplace"):
        assert _line(functions["update_requests"], overwriting)


def _line(function: ast.FunctionDef, called: str) -> int:
    """The first line of ``function`` that calls ``called``."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return min(
        call.lineno for call in calls if called in (getattr(call.func, "attr", None), getattr(call.func, "id", None))
    )
