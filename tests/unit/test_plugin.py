"""How layerpush gets into vLLM's processes; what changes a process runs in one of its own, with real vLLM and NIXL."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import types

import pytest

from layerpush import plugin
from layerpush.compat import busy_wait
from layerpush.core.config import ConfigError

# vLLM's own way to call us: through the entry point of the installed package.
LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins()\n"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in (busy_wait.VARIABLE, "VLLM_PLUGINS")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_vllm_finds_the_connector_lazily_and_nothing_is_calmed_unasked() -> None:
    done = python(
        LOAD
        + """
import sys
import vllm.distributed.utils as utils
import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from layerpush import plugin
from layerpush.compat import busy_wait

eager = [name for name in sys.modules if name.split(".")[0].startswith("nixl") or name == "layerpush.connector"]
assert not eager, eager
assert not busy_wait.applied()
assert utils.sched_yield.__module__ == "vllm.distributed.utils"
assert shm_broadcast.sched_yield is utils.sched_yield
from vllm.v1.engine.core import EngineCoreProc
assert EngineCoreProc._process_engine_step.__module__ == "vllm.v1.engine.core"
assert not any(type(finder).__module__ == "layerpush.compat.busy_wait" for finder in sys.meta_path)

registered = KVConnectorFactory._registry["LayerwisePushConnector"]
plugin.register()  # a second time, as vLLM may
assert "layerpush.connector" not in sys.modules
plugin._registered = False
plugin.register()  # as if the operator had registered our class by hand before: no clash
assert KVConnectorFactory._registry["LayerwisePushConnector"] is registered
cls = KVConnectorFactory.get_connector_class_by_name("LayerwisePushConnector")
assert (cls.__module__, cls.__qualname__) == ("layerpush.connector", "LayerwisePushConnector"), cls
"""
    )
    assert done.returncode == 0, done.stderr


def test_somebody_elses_class_of_that_name_stops_vllm_with_a_clear_error() -> None:
    done = python(
        """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from layerpush import plugin

def try_with(module):
    KVConnectorFactory._registry.pop(plugin.CONNECTOR_NAME, None)
    KVConnectorFactory.register_connector(plugin.CONNECTOR_NAME, module, "OrderedDict")

try_with("gone")
try:
    plugin.register()
except plugin.ConnectorNameError as error:
    print(error)
try_with("collections")
"""
        + LOAD
        + "print('went on')"
    )
    assert done.returncode != 0
    assert "went on" not in done.stdout
    taken = "the name 'LayerwisePushConnector' already belongs to "
    assert f"{taken}a class that cannot be imported (ModuleNotFoundError" in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert f"ConnectorNameError: layerpush cannot register its vLLM connector: {taken}collections.OrderedDict" in last
    assert "VLLM_PLUGINS" in last


def test_calm_cures_the_loops_when_asked() -> None:
    done = python(
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        + LOAD
        + """
import sys
import vllm.distributed.utils as utils
import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
from layerpush.compat import busy_wait

assert busy_wait.applied()
assert not any(name.split(".")[0].startswith("nixl") for name in sys.modules)
assert utils.sched_yield == shm_broadcast.sched_yield
assert type(utils.sched_yield.__self__).__module__ == "layerpush.compat.busy_wait"
hooks = [finder for finder in sys.meta_path if type(finder).__module__ == "layerpush.compat.busy_wait"]
busy_wait.apply()
assert [finder for finder in sys.meta_path if type(finder).__module__ == "layerpush.compat.busy_wait"] == hooks
assert len(hooks) == 2

from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
assert EngineCoreProc._process_engine_step.__module__ == "layerpush.compat.busy_wait"
assert DPEngineCoreProc._process_engine_step is EngineCoreProc._process_engine_step

import inspect, nixl._api
config = nixl._api.nixlBind.nixlAgentConfig()
config.pthrDelay = 0
assert config.pthrDelay == busy_wait.PROGRESS_DELAY_US
config.pthrDelay = 7
assert config.pthrDelay == 7
assert "class nixl_agent" in inspect.getsource(nixl._api)
""",
        LAYERPUSH_CALM="1",
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("LAYERPUSH_CALM is set") == 1


def test_a_calm_progress_thread_leaves_the_core_alone() -> None:
    """Real agents; the first one, made before the cure, shows that there is something to cure."""
    done = python(
        """
import time, nixl
from layerpush.compat import busy_wait

def seconds_used():
    agent = nixl.nixl_agent(f"calm-test-{busy_wait.applied()}")
    before = time.process_time()
    time.sleep(1.0)  # the measured interval
    return time.process_time() - before

spinning = seconds_used()  # its agent is gone when this returns
busy_wait.apply()
print("SECONDS", spinning, seconds_used())
""",
        UCX_TLS="tcp,self",
        UCX_NET_DEVICES="lo",
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SECONDS"))
    spinning, calmed = map(float, line.split()[1:])
    assert spinning > 0.2
    assert calmed < 0.1


class Clock:
    """Time that passes in sleeps only."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def test_who_waits_long_sleeps_long_but_never_later_than_a_share_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(busy_wait, "time", clock)
    rest, start = busy_wait.Rest(), clock.now
    waited = 0.0
    while waited < 1.0:
        rest.sleep()
        assert clock.sleeps[-1] <= max(busy_wait.YIELD_SECONDS, busy_wait.YIELD_SHARE * waited) + 1e-12
        waited = clock.now - start
    assert clock.sleeps[0] == busy_wait.YIELD_SECONDS
    assert clock.sleeps[-1] == busy_wait.LONGEST_YIELD_SECONDS
    assert len(clock.sleeps) < 1100


def test_another_wait_begins_with_short_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(busy_wait, "time", clock)
    rest = busy_wait.Rest()
    for _ in range(200):
        rest.sleep()
    clock.now += 2 * busy_wait.NEW_WAIT_SECONDS  # something was done
    rest.sleep()
    assert clock.sleeps[-2] == busy_wait.LONGEST_YIELD_SECONDS
    assert clock.sleeps[-1] == busy_wait.YIELD_SECONDS


class Core:
    """An engine that takes one step, with or without work, and then has requests or none."""

    def __init__(self, computes: bool, requests: bool) -> None:
        self.computes, self.requests = computes, requests
        self.scheduler = self
        self.input_queue: queue.Queue[str] = queue.Queue()
        self.steps = 0

    def has_requests(self) -> bool:
        return self.requests

    def _process_engine_step(self) -> bool:
        self.steps += 1
        return self.computes


def calm_core(monkeypatch: pytest.MonkeyPatch, *, computes: bool, requests: bool) -> tuple[Core, list[float]]:
    """With every wait noted instead of waited for."""
    waits: list[float] = []
    monkeypatch.setattr(busy_wait, "wait_for_input", lambda _, seconds: waits.append(seconds))
    module = types.ModuleType("core")
    module.EngineCoreProc = type("Calm", (Core,), {"_process_engine_step": Core._process_engine_step})  # type: ignore[attr-defined]
    busy_wait.rest_after_empty_steps(module)
    return module.EngineCoreProc(computes, requests), waits


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize("requests", [True, False])
def test_a_calm_engine_rests_only_while_requests_wait_and_nothing_is_computed(
    monkeypatch: pytest.MonkeyPatch, computes: bool, requests: bool
) -> None:
    core, waits = calm_core(monkeypatch, computes=computes, requests=requests)
    assert core._process_engine_step() is computes
    assert core.steps == 1
    assert waits == ([busy_wait.EMPTY_STEP_SECONDS] if requests and not computes else [])


def test_a_resting_engine_wakes_up_for_a_request() -> None:
    inputs: queue.Queue[str] = queue.Queue()
    resting = threading.Thread(target=busy_wait.wait_for_input, args=(inputs, 100.0), daemon=True)
    asking = threading.Thread(target=inputs.put, args=("request",), daemon=True)
    for thread in (resting, asking):
        thread.start()
    for thread in (resting, asking):
        thread.join(timeout=10.0)
        assert not thread.is_alive()
    assert inputs.get_nowait() == "request"


def test_an_engine_with_a_request_at_hand_does_not_rest() -> None:
    inputs: queue.Queue[str] = queue.Queue()
    inputs.put("request")
    resting = threading.Thread(target=busy_wait.wait_for_input, args=(inputs, 100.0), daemon=True)
    resting.start()
    resting.join(timeout=10.0)
    assert not resting.is_alive()


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", " 1 "])
def test_calm_is_wanted(value: str) -> None:
    assert busy_wait.wanted({busy_wait.VARIABLE: value})


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_calm_is_not_wanted(value: str) -> None:
    assert not busy_wait.wanted({busy_wait.VARIABLE: value})
    assert not busy_wait.wanted({})


@pytest.mark.parametrize("value", ["2", "maybe", "y", "enabled"])
def test_neither_yes_nor_no_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(busy_wait.VARIABLE, value)
    with pytest.raises(ConfigError, match=f"LAYERPUSH_CALM={value!r}"):
        plugin.register()
