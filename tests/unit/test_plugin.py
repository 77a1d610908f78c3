"""The ways of layerpush into vLLM's processes. Changes of a process run in a new one, with real vLLM and NIXL."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from bench import ROOT, calm
from layerpush import plugin
from layerpush.compat.patches import PatchHook
from layerpush.core.config import CONNECTOR_NAME, ConfigError

# vLLM's own way to call us: through the entry point of the installed package.
LOAD = "from vllm.plugins import load_general_plugins; load_general_plugins()\n"


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "VLLM_PLUGINS"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


PLAIN = (
    LOAD
    + """
import sys
import vllm.distributed.utils as utils
import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from layerpush import plugin

eager = [name for name in sys.modules if name.split(".")[0].startswith("nixl") or name == "layerpush.connector"]
assert not eager, eager
assert "vllm.v1.engine.input_processor" not in sys.modules
assert utils.sched_yield.__module__ == "vllm.distributed.utils"
assert shm_broadcast.sched_yield is utils.sched_yield
from vllm.v1.engine.core import EngineCoreProc
assert EngineCoreProc._process_engine_step.__module__ == "vllm.v1.engine.core"
import inspect
import vllm.v1.engine.input_processor as front_end  # the other order, import and then load, is that of tests/e2e
assert front_end.InputProcessor.process_inputs.patched_by_layerpush == ("request-checks",)
assert "class InputProcessor" in inspect.getsource(front_end)

registered = KVConnectorFactory._registry["LayerwisePushConnector"]
plugin.register()  # a second time, as vLLM may
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
assert not hasattr(GPUModelRunner.finish_requests, "patched_by_layerpush")  # only where there is our connector
assert "layerpush.connector" not in sys.modules
plugin._registered = False
plugin.register()  # as if the operator had registered our class by hand before: no clash
assert KVConnectorFactory._registry["LayerwisePushConnector"] is registered
cls = KVConnectorFactory.get_connector_class_by_name("LayerwisePushConnector")
assert (cls.__module__, cls.__qualname__) == ("layerpush.connector", "LayerwisePushConnector"), cls
"""
)
CALM = (
    "import logging; logging.basicConfig(level=logging.INFO)\n"
    + LOAD
    + """
import sys
import vllm.distributed.utils as utils
import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
from bench import calm

assert calm.applied()
assert not any(name.split(".")[0].startswith("nixl") for name in sys.modules)
assert utils.sched_yield == shm_broadcast.sched_yield
assert type(utils.sched_yield.__self__).__module__ == "bench.calm"
hooks = [finder for finder in sys.meta_path if type(finder).__module__ == "bench.calm"]
calm.apply()
assert [finder for finder in sys.meta_path if type(finder).__module__ == "bench.calm"] == hooks
assert len(hooks) == 3

from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
assert EngineCoreProc._process_engine_step.__module__ == "bench.calm"
assert DPEngineCoreProc._process_engine_step is EngineCoreProc._process_engine_step

import inspect, nixl._api
config = nixl._api.nixlBind.nixlAgentConfig()
config.pthrDelay = 0
assert config.pthrDelay == calm.PROGRESS_DELAY_US
config.pthrDelay = 7
assert config.pthrDelay == 7
assert "class nixl_agent" in inspect.getsource(nixl._api)
"""
)
FORKS = """
import json, os, sys, traceback
import vllm.plugins, vllm.distributed.device_communicators.shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

for code, log, folders in json.loads(sys.argv[1]):
    if os.fork():
        os.wait()
        continue
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.path += folders
    try:
        exec(code)
        print("all is well", flush=True)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)
"""
"""Forks of one process that has imported what every process of vLLM imports before its plugins."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What two processes of vLLM say: "plain" without the plugin of calm mode, "calm" with it."""
    folder = tmp_path_factory.mktemp("forks")
    forks = [(PLAIN, str(folder / "plain"), []), (CALM, str(folder / "calm"), [str(calm.FOLDER)])]
    done = python(FORKS, json.dumps(forks), LAYERPUSH_CALM="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.exhaustive
def test_vllm_loads_the_connector_lazily_and_leaves_busy_loops_alone(said: dict[str, str]) -> None:
    """LAYERPUSH_CALM means nothing to the connector: bench has the plugin."""
    assert "all is well" in said["plain"], said["plain"]


@pytest.mark.exhaustive
def test_calm_patches_the_busy_loops_on_request(said: dict[str, str]) -> None:
    assert "all is well" in said["calm"], said["calm"]
    assert said["calm"].count("LAYERPUSH_CALM is set") == 1


def test_an_unknown_patch_and_a_foreign_class_of_that_name_stop_vllm_with_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM does not catch the error of a plugin's function."""
    from vllm import plugins
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(KVConnectorFactory, "_registry", {**KVConnectorFactory._registry})
    monkeypatch.setattr(plugin, "_registered", False)

    def load(holder: str) -> None:
        KVConnectorFactory._registry.pop(CONNECTOR_NAME, None)
        KVConnectorFactory.register_connector(CONNECTOR_NAME, holder, "OrderedDict")
        monkeypatch.setattr(plugins, "plugins_loaded", False)
        plugins.load_general_plugins()

    taken = f"layerpush cannot register its vLLM connector: the name '{CONNECTOR_NAME}' already belongs to "
    with pytest.raises(plugin.ConnectorNameError, match=f"{taken}a class that cannot be imported .ModuleNotFoundError"):
        load("gone")
    with pytest.raises(plugin.ConnectorNameError, match=f"{taken}collections.OrderedDict.*VLLM_PLUGINS"):
        load("collections")
    monkeypatch.setenv("LAYERPUSH_WITHOUT_PATCHES", "other")
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, PatchHook)])
    with pytest.raises(ConfigError, match="no patch other; known: request-checks"):
        plugin.register()
