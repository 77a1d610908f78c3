"""Log lines and refusals at the start of an engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from layerpush.compat.engine_settings import captured_tokens
from layerpush.compat.handshake import read_answer
from layerpush.connector import LayerwisePushConnector
from layerpush.core.config import ConfigError
from layerpush.engine.worker.writer_thread import THREAD_NAME
from layerpush.prefill.unhooked_layers import GRAPH_TOKENS
from layerpush.transport import port as port_module
from layerpush.transport.port import SideChannelError
from tests.connector.engine import Engine, cache_config, config_of

Build = Callable[..., Engine]


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_a_bad_setting_is_named(world: None, model: Path, role: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    config = config_of(model, "kv_producer", "bad", {"layer_wise": True})
    with pytest.raises(ConfigError, match="'layer_wise'; did you mean 'layerwise'"):
        LayerwisePushConnector(config, KVConnectorRole[role], cache_config())


def test_decode_context_parallelism_is_refused(world: None, model: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    config = config_of(model, "kv_producer", "dcp")
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ValueError, match="decode_context_parallel_size"):
        LayerwisePushConnector(config, KVConnectorRole.SCHEDULER, cache_config())


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_sleep_mode_is_refused(world: None, model: Path, role: str) -> None:
    """The memory after a sleep is not the memory that NIXL has registered."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    config = config_of(model, "kv_both", "asleep")
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ValueError, match=r"sleep mode.*enable_sleep_mode"):
        LayerwisePushConnector(config, KVConnectorRole[role], cache_config())


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_auxiliary_outputs_are_refused(world: None, model: Path, role: str) -> None:
    """vLLM lets no external prefix count then: D would decline each load without a word."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    config = config_of(model, "kv_consumer", "experts")
    config.aux_output_config.enable_return_routed_experts = True
    with pytest.raises(ValueError, match=r"auxiliary outputs.*--enable-return-routed-experts"):
        LayerwisePushConnector(config, KVConnectorRole[role], cache_config())


def test_a_vllm_without_auxiliary_outputs_is_accepted(engine: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    monkeypatch.delattr(VllmConfig, "aux_output_config", raising=False)
    engine("kv_producer")


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_a_fallback_is_logged_once(engine: Build, no_layers: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.layerpush"):
        p = engine("kv_producer")
        for number in range(3):
            p.prefill(f"r-{number}", 40)
            p.step()
    (line,) = said(caplog, "whole requests")
    assert "cannot be told apart by layer" in line


def test_the_layers_are_logged_once(engine: Build, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.layerpush"):
        engine("kv_producer", {"granularity": "chunk"})
    assert len(said(caplog, "4 layers, granularity chunk")) == 1


def test_the_size_of_the_engines_graphs_is_known(engine: Build) -> None:
    p = engine("kv_producer")
    assert p.pushes._unhooked._captured_tokens == GRAPH_TOKENS, "a CPU has no graphs"
    p.config.compilation_config.max_cudagraph_capture_size = 512
    assert captured_tokens(p.config) == 512


def test_with_layerwise_off_nothing_is_logged(engine: Build, no_layers: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.layerpush"):
        engine("kv_producer", {"layerwise": False})
    assert said(caplog, "layerpush pushes") == []


def test_vllms_settings_pass_through(engine: Build) -> None:
    p = engine("kv_producer", {"kv_lease_duration": 7})
    assert p.connector.connector_scheduler._kv_lease_duration == 7


@pytest.mark.parametrize("threads", [None, 0, 2])
def test_one_nixl_agent_is_made(engine: Build, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's initialiser would build a second worker. The agent has no threads for WRITEs unless the operator wants."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    made = []
    agent = base_worker.NixlWrapper

    def counting(name: str, config: Any) -> object:
        made.append(config.num_threads)
        return agent(name, config)

    monkeypatch.setattr(base_worker, "NixlWrapper", counting)
    engine("kv_producer", {} if threads is None else {"num_threads": threads})
    assert made == [threads or 0]


def test_the_compute_thread_is_not_bound_to_the_transfer_core(engine: Build) -> None:
    """vLLM's own worker binds this thread there, and so all threads that it starts."""
    before = os.sched_getaffinity(0)
    engine("kv_producer")
    assert os.sched_getaffinity(0) == before
    tasks = Path("/proc/self/task").iterdir()
    writers = [int(task.name) for task in tasks if (task / "comm").read_text().strip() == THREAD_NAME]
    assert {frozenset(os.sched_getaffinity(writer)) for writer in writers} == {frozenset(before)}


def test_a_taken_side_channel_port_ends_the_start(engine: Build, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's core makes this call at its start. It waits without a deadline for the listener's thread."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    monkeypatch.setattr(port_module, "BIND_S", 0.3)
    monkeypatch.setattr(port_module, "BIND_RETRY_S", 0.05)
    first = engine("kv_producer")
    config = config_of(model, "kv_producer", "second")
    second = LayerwisePushConnector(config, KVConnectorRole.SCHEDULER, cache_config())
    with pytest.raises(SideChannelError, match=rf"127.0.0.1:{first.port} .*VLLM_NIXL_SIDE_CHANNEL_PORT"):
        second.set_xfer_handshake_metadata_pp_aware({(0, 0): first.worker.get_handshake_metadata()})
    second.shutdown()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"dtype": "torch.bfloat16"}, "dtype is 'torch.bfloat16' there and 'torch.float32' here"),
        ({"the model": "/models/other\n"}, "the model is '/models/other\\n' there and "),
        ({"the KV cache dtype": "fp8"}, "the KV cache dtype is 'fp8' there and 'auto' here"),
        ({"vLLM": "0.1" + "0" * 1000}, "vLLM is '0.1" + "0" * 197 + "' there and "),
    ],
)
def test_settings_that_differ_are_named(engine: Build, changed: dict[str, str], named: str) -> None:
    """Before vLLM's own check, which compares only hashes of the settings."""
    p = engine("kv_producer").worker.connector_worker
    ours = p.xfer_handshake_metadata
    theirs = replace(ours, compatibility_hash="other", settings=ours.settings | changed)

    def found(payload: object) -> Any:
        return p._difference(read_answer(msgspec.msgpack.encode(payload)))

    assert named in found(theirs)
    assert found(ours) is None
    assert found(replace(theirs, settings={})) is None, "a stock engine lists none"
    assert p._difference(read_answer(b"\xc1")) is None, "vLLM's handshake has an error of its own"
    p.enforce_compat_hash = False
    assert found(theirs) is None
