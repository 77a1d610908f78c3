"""The ways of layerpush into vLLM's processes. Changes of a process run in a new one, with real vLLM and NIXL."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
import types
import uuid
from collections.abc import Collection

import pytest

from layerpush import plugin
from layerpush.compat import busy_wait, engine_wake
from layerpush.core.config import ConfigError
from tests.support.waiting import until

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


@pytest.mark.slow
def test_vllm_loads_the_connector_lazily_and_calm_is_off_by_default() -> None:
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
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
assert GPUModelRunner.finish_requests.__module__ == "layerpush.compat.early_revocation"
assert "layerpush.connector" not in sys.modules
plugin._registered = False
plugin.register()  # as if the operator had registered our class by hand before: no clash
assert KVConnectorFactory._registry["LayerwisePushConnector"] is registered
cls = KVConnectorFactory.get_connector_class_by_name("LayerwisePushConnector")
assert (cls.__module__, cls.__qualname__) == ("layerpush.connector", "LayerwisePushConnector"), cls
"""
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_foreign_class_of_that_name_stops_vllm_with_a_clear_error() -> None:
    done = python(
        """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from layerpush import plugin
from layerpush.core.config import CONNECTOR_NAME

def try_with(module):
    KVConnectorFactory._registry.pop(CONNECTOR_NAME, None)
    KVConnectorFactory.register_connector(CONNECTOR_NAME, module, "OrderedDict")

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


@pytest.mark.slow
def test_calm_patches_the_busy_loops_on_request() -> None:
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


@pytest.mark.slow
def test_a_calm_progress_thread_uses_little_of_its_core() -> None:
    """Real agents. The first one, made before the cure, shows the ill."""
    done = python(
        """
import time, nixl
from layerpush.compat import busy_wait

def seconds_used(within_s):
    agent = nixl.nixl_agent(f"calm-test-{busy_wait.applied()}")
    before, end = time.process_time(), time.monotonic() + within_s
    while (used := time.process_time() - before) < 0.3 and time.monotonic() < end:
        time.sleep(0.05)
    return used

spinning = seconds_used(60.0)  # on a busy machine a thread that spins gets little of a second
busy_wait.apply()  # the first agent is gone
print("SECONDS", spinning, seconds_used(1.0))
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


def test_sleeps_grow_with_a_wait_up_to_a_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
    clock.now += 2 * busy_wait.NEW_WAIT_SECONDS  # work was done
    rest.sleep()
    assert clock.sleeps[-2] == busy_wait.LONGEST_YIELD_SECONDS
    assert clock.sleeps[-1] == busy_wait.YIELD_SECONDS


class Core:
    """An engine that takes one step, with or without work, and then has requests or none, with or without new KV."""

    def __init__(self, computes: bool = False, requests: bool = True, received: Collection[str] = ()) -> None:
        self.computes, self.requests = computes, requests
        self.finished_recving_kv_req_ids = set(received)
        self.scheduler = self
        self.input_queue: queue.Queue[str] = queue.Queue()
        engine_id = f"core-{uuid.uuid4()}"
        self.vllm_config = types.SimpleNamespace(kv_transfer_config=types.SimpleNamespace(engine_id=engine_id))
        self.steps = 0

    @property
    def engine_id(self) -> str:
        return str(self.vllm_config.kv_transfer_config.engine_id)

    def has_requests(self) -> bool:
        return self.requests

    def _process_engine_step(self) -> bool:
        self.steps += 1
        return self.computes


def calm_core(core: Core) -> Core:
    """The same engine, made to rest."""
    calm = type("Calm", (Core,), {"_process_engine_step": Core._process_engine_step})
    module = types.ModuleType("core")
    module.EngineCoreProc = calm  # type: ignore[attr-defined]
    busy_wait.rest_after_empty_steps(module)
    core.__class__ = calm
    return core


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.parametrize("requests", [True, False])
@pytest.mark.parametrize("received", [(), ("r",)])
def test_a_calm_engine_rests_only_while_requests_wait_and_it_can_compute_nothing(
    monkeypatch: pytest.MonkeyPatch, computes: bool, requests: bool, received: Collection[str]
) -> None:
    """A request whose KV was reported in this step can be computed in the next one."""
    waits: list[float] = []
    monkeypatch.setattr(busy_wait.InputWait, "wait", lambda _, seconds: waits.append(seconds))
    core = calm_core(Core(computes, requests, received))
    assert core._process_engine_step() is computes
    assert core.steps == 1
    assert waits == ([busy_wait.EMPTY_STEP_SECONDS] if requests and not computes and not received else [])


def ends(wait: busy_wait.InputWait, *others: threading.Thread) -> bool:
    """Whether a rest of 100 seconds ends early, while the other threads run."""
    resting = threading.Thread(target=wait.wait, args=(100.0,), daemon=True)
    for thread in (resting, *others):
        thread.start()
    for thread in (resting, *others):
        thread.join(timeout=10.0)
    return not any(thread.is_alive() for thread in (resting, *others))


def test_a_resting_engine_wakes_up_for_a_request() -> None:
    inputs: queue.Queue[str] = queue.Queue()
    assert ends(busy_wait.InputWait(inputs), threading.Thread(target=inputs.put, args=("request",), daemon=True))
    assert inputs.get_nowait() == "request"


def test_an_engine_with_a_request_at_hand_does_not_rest() -> None:
    inputs: queue.Queue[str] = queue.Queue()
    inputs.put("request")
    assert ends(busy_wait.InputWait(inputs))


def test_a_worker_ends_the_rest_of_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_wait, "EMPTY_STEP_SECONDS", 100.0)
    core = calm_core(Core())
    resting = threading.Thread(target=core._process_engine_step, daemon=True)
    resting.start()
    until(lambda: engine_wake.wake(core.engine_id) or not resting.is_alive())  # it listens from its first rest on
    engine_wake.wake("an engine that nobody knows")


def test_a_wake_up_during_a_step_ends_the_rest_after_it() -> None:
    wait = busy_wait.InputWait(queue.Queue())
    wait.wake()
    assert ends(wait)


def test_a_wake_up_ends_one_rest_only() -> None:
    wait = busy_wait.InputWait(queue.Queue())
    wait.wake()
    assert ends(wait)
    resting = threading.Thread(target=wait.wait, args=(100.0,), daemon=True)
    resting.start()
    until(lambda: wait._inputs.not_empty._waiters)
    assert resting.is_alive()
    wait.wake()
    resting.join(timeout=10.0)
    assert not resting.is_alive()


def test_a_second_engine_with_the_same_id_is_logged_and_not_woken(caplog: pytest.LogCaptureFixture) -> None:
    engine_id = f"twin-{uuid.uuid4()}"
    woken, other = threading.Event(), threading.Event()
    engine_wake.listen(f"not-{engine_id}", other.set)
    engine_wake.listen(engine_id, woken.set)
    with caplog.at_level(logging.WARNING):
        engine_wake.listen(engine_id, lambda: None)
    assert f"workers of engine {engine_id} cannot wake it" in caplog.text
    engine_wake.wake(engine_id)
    assert woken.wait(10.0)
    assert not other.is_set()


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", " 1 "])
def test_calm_is_enabled_by_a_true_value(value: str) -> None:
    assert busy_wait.wanted({busy_wait.VARIABLE: value})


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_calm_is_disabled_by_a_false_value(value: str) -> None:
    assert not busy_wait.wanted({busy_wait.VARIABLE: value})
    assert not busy_wait.wanted({})


@pytest.mark.parametrize("value", ["2", "maybe", "y", "enabled"])
def test_an_invalid_calm_value_is_refused_with_the_variables_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(busy_wait.VARIABLE, value)
    with pytest.raises(ConfigError, match=f"LAYERPUSH_CALM={value!r}"):
        plugin.register()
