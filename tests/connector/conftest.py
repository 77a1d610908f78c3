"""A vLLM world of one process: a group of one rank, loopback NIXL, no model."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import calm
from bench.servers.ports import PortAllocator
from tests.support.ports import CONNECTOR_PORTS

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "LAYERPUSH_CALM": "1",
    "UCX_MEM_EVENTS": "n",  # as in tests/e2e/preload.py
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
PORTS = PortAllocator(CONNECTOR_PORTS)
LISTENER = "layerpush.engine.scheduler.side_channel"
RETRY = "layerpush.transport.connections.RETRY_S"
"""Between two tries of a handshake."""


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from bench.servers.model import ModelShape, write_model
    from tests.connector.engine import HEAD_SIZE, HEADS, LAYERS

    shape = ModelShape(
        layers=LAYERS, hidden=64, heads=2, kv_heads=HEADS, head_dim=HEAD_SIZE, intermediate=64, vocabulary=1024,
        max_positions=1024,
    )  # fmt: skip
    return write_model(tmp_path_factory.mktemp("model"), shape)


@pytest.fixture(scope="package")
def world(model: Path) -> Iterator[None]:
    with process_groups():
        yield


@contextmanager
def process_groups() -> Iterator[None]:
    """vLLM's process groups, of one rank. The environment and the main thread's cores are put back."""
    before, cores, entry_points = dict(os.environ), os.sched_getaffinity(0), importlib.metadata.entry_points
    importlib.metadata.entry_points = entry_points().select  # read once, not for each engine
    os.environ.update(ENVIRONMENT)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from layerpush import plugin

    calm.register()
    plugin.register()
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{PORTS.next_free()}", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    importlib.metadata.entry_points = entry_points
    os.environ.clear()
    os.environ.update(before)
    os.sched_setaffinity(0, cores)


@pytest.fixture
def no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache of no engine can be told apart by layer."""

    def refuse(*_: Any) -> Any:
        from layerpush.core.layout import LayoutError

        raise LayoutError("no layer is known")

    monkeypatch.setattr("layerpush.engine.worker.worker.cache_layout", refuse)


@pytest.fixture
def engine(world: None, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Builds engines: ``engine("kv_producer", {...extra config})``. All are shut down at the end.

    ``kind`` is the engine's class, ``made`` are arguments of its own. Other options are vLLM's arguments.
    """
    from tests.connector.engine import Engine, config_of

    monkeypatch.setattr(f"{LISTENER}.WAIT_S", 0.01)  # an engine's shutdown waits so long
    monkeypatch.setattr(RETRY, 0.1)
    engines: list[Engine] = []

    def build(role: str, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
        port, kind, made = PORTS.next_free(), options.pop("kind", Engine), options.pop("made", {})
        made |= {name: options.pop(name) for name in ("layout", "runner") if name in options}
        engines.append(kind(config_of(model, role, f"{role}-{port}", extra, **options), port, **made))
        return engines[-1]

    cores = os.sched_getaffinity(0)
    yield build
    for one in engines:
        one.shutdown()
    os.sched_setaffinity(0, cores)
