"""The table of patches of vLLM: each target exists, is wrapped once, and can be left out."""

from __future__ import annotations

import inspect
import logging
import sys
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from layerpush.compat import patches
from layerpush.compat.patches import MARK, PATCHES, VARIABLE, Patch, PatchHook, Process, Target
from layerpush.core.config import ConfigError

HERE = "tests.unit.test_patches"


def logs_before(plain: Any) -> Any:
    def wrapper(self: Any, done: list[str]) -> None:
        done.append("first")
        plain(self, done)

    return wrapper


def logs_around(plain: Any) -> Any:
    def wrapper(self: Any, done: list[str]) -> None:
        done.append("second")
        plain(self, done)
        done.append("second again")

    return wrapper


def answers(_: None) -> Any:
    return lambda self: "new"


TABLE = (
    Patch("first", (Target(Process.WORKER, "vllm_like:Runner.run", f"{HERE}:logs_before"),), "why", "First is lost."),
    Patch(
        "second",
        (
            Target(Process.WORKER, "vllm_like:Runner.run", f"{HERE}:logs_around"),
            Target(Process.WORKER, "vllm_like:Runner.added", f"{HERE}:answers", is_new=True),
            Target(Process.ENGINE_CORE, "vllm_like:Runner.other", f"{HERE}:logs_before"),
        ),
        "why",
        "Second is lost.",
    ),
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Runner:
        def run(self, done: list[str]) -> None:
            done.append("vLLM")

    monkeypatch.setattr(patches, "PATCHES", TABLE)
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, PatchHook)])
    monkeypatch.delenv(VARIABLE, raising=False)
    module: Any = ModuleType("vllm_like")
    module.Runner = Runner
    monkeypatch.setitem(sys.modules, "vllm_like", module)
    return module


def ran(module: Any) -> list[str]:
    done: list[str] = []
    module.Runner().run(done)
    return done


def test_patches_of_one_target_wrap_it_once_in_the_order_of_the_table(module: Any) -> None:
    patches.install(Process.WORKER)
    once = module.Runner.run
    assert getattr(once, MARK) == ("first", "second")
    assert ran(module) == ["second", "first", "vLLM", "second again"]
    assert module.Runner().added() == "new"
    patches.install(Process.WORKER)
    assert module.Runner.run is once
    assert len([each for each in sys.meta_path if isinstance(each, PatchHook) and each.process is Process.WORKER]) == 1


def test_a_process_gets_its_own_patches_only(module: Any) -> None:
    patches.install(Process.FRONT_END)
    assert ran(module) == ["vLLM"]


def test_a_patch_that_is_left_out_is_logged_with_what_is_lost(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "second, ")
    with caplog.at_level(logging.WARNING):
        patches.install(Process.WORKER)
        patches.install(Process.WORKER)
    assert [record.getMessage() for record in caplog.records] == [
        f"layerpush: {VARIABLE} leaves out second. Second is lost."
    ]
    assert ran(module) == ["first", "vLLM"]
    assert not hasattr(module.Runner, "added")
    assert patches.is_on("first")
    assert not patches.is_on("second")


def test_a_target_that_vllm_lacks_is_logged_with_what_is_lost(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        patches.install(Process.ENGINE_CORE)
    assert caplog.messages == ["layerpush: vllm_like:Runner.other does not exist in this vLLM. Second is lost."]


def test_an_unknown_name_is_an_error_that_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "first-tokens,first_token")
    with pytest.raises(ConfigError, match=r"LAYERPUSH_WITHOUT_PATCHES: no patch first_token; known: request-checks, "):
        patches.left_out()


def test_our_connectors_are_found_inside_of_others() -> None:
    ours, inner = SimpleNamespace(is_layerpush=True), SimpleNamespace(is_layerpush=True)
    several = SimpleNamespace(
        _connectors=[SimpleNamespace(), ours, SimpleNamespace(_connectors=[SimpleNamespace(), inner])]
    )
    found = patches.our_connectors(several, SimpleNamespace(metadata=(1, 2, SimpleNamespace(metadata=(3, 4)))))
    assert list(found) == [(ours, 2), (inner, 4)]
    assert list(patches.our_connectors(several)) == [(ours, None), (inner, None)]
    assert list(patches.our_connectors(ours, 5)) == [(ours, 5)]
    assert not list(patches.our_connectors(None))
    assert not list(patches.our_connectors(Mock())), "it has every attribute"


@pytest.mark.parametrize(
    "target", [target for patch in PATCHES for target in patch.targets], ids=lambda each: each.path
)
def test_each_wrapper_keeps_the_signature_of_vllms_function(target: Target) -> None:
    wrapper = resolve_name(target.wrapper)
    if target.is_new:
        assert list(inspect.signature(wrapper(None)).parameters) == ["core", "request_id", "rank"]
        return
    plain = inspect.unwrap(resolve_name(target.path))
    assert inspect.unwrap(wrapper(plain)) is plain
    assert inspect.signature(wrapper(plain)) == inspect.signature(plain)
