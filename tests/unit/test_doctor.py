"""Every check of `layerpush doctor`: its passes, its failures, and their advice."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import msgspec
import pytest

from bench.servers.ports import PortAllocator
from layerpush import plugin
from layerpush.apps import doctor
from layerpush.apps.checks import side_channel
from layerpush.apps.checks.finding import Grade, Result
from layerpush.compat import patches
from layerpush.transport.port import bind_at_once
from tests.support.ports import PEER_CHECK_PORTS

OK, WARN, FAIL = Grade.OK, Grade.WARN, Grade.FAIL
UCX_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "NIXL_UCX_SGL_ENABLE")
PORTS = PortAllocator(PEER_CHECK_PORTS)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("VLLM_PLUGINS", "NIXL_PLUGIN_DIR", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
    for name in (*names, *UCX_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def answers(
    returncode: int = 0, stdout: str = "", stderr: str = ""
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    return lambda code: subprocess.CompletedProcess([], returncode, stdout, stderr)


def expect(result: Result, verdict: Grade, found: str = "", advice: str = "") -> None:
    assert result.verdict is verdict, result
    assert found in result.found
    assert advice in result.advice
    if verdict is not OK:
        assert result.advice, "a problem without advice"


@pytest.mark.parametrize(("version", "verdict"), [((3, 10), FAIL), ((3, 11), OK), ((3, 13), OK), ((3, 14), FAIL)])
def test_python(version: tuple[int, int], verdict: Grade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 5, "final", 0))
    expect(doctor.check_python(), verdict, f"{version[0]}.{version[1]}.5")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("0.31.2", FAIL), ("0.32.0", OK), ("0.33.1rc2+cpu", OK), ("0.34.0", FAIL), ("1.0", FAIL), ("dev", WARN)],
)
def test_vllm_version(version: str, verdict: Grade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version, __spec__=object()))
    monkeypatch.setattr(metadata, "version", lambda name: version)
    expect(doctor.check_vllm(), verdict, version)


def test_vllm_without_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_metadata(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0", __spec__=object()))
    monkeypatch.setattr(metadata, "version", no_metadata)
    expect(doctor.check_vllm(), OK, "0.32.0", "python -m vllm.entrypoints.openai.api_server")


@pytest.mark.parametrize("check", [doctor.check_vllm, doctor.check_patches, doctor.check_nixl])
def test_a_missing_package_fails(check: Callable[[], Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    expect(check(), FAIL, "not installed", "pip install")


def test_broken_torch_companions_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: name != "torchcodec")
    monkeypatch.setattr(doctor, "_run_python", lambda code: answers(int("torchvision" in code))(code))
    expect(doctor.check_torch_companions(), FAIL, "torchvision cannot", "pip uninstall torchvision")


def test_loadable_or_absent_torch_companions_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: True)
    monkeypatch.setattr(doctor, "_run_python", answers())
    expect(doctor.check_torch_companions(), OK, "torchvision, torchaudio, torchcodec can be loaded")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    expect(doctor.check_torch_companions(), OK, "none installed")


def test_plugin_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    expect(doctor.check_plugin(), FAIL, "no entry point", "pip install")


def test_plugin_left_out_by_vllm_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,another")
    expect(doctor.check_plugin(), FAIL, "VLLM_PLUGINS=other,another", "add layerpush")


def test_a_clash_of_connector_names_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def clash() -> None:
        raise plugin.ConnectorNameError("taken by theirs.Class")

    monkeypatch.setattr(plugin, "register", clash)
    expect(doctor.check_plugin(), FAIL, "theirs.Class", "every vLLM process stops")


def test_nixl_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_run_python", answers(1, stderr="Traceback\nnixlBackendError: NIXL_ERR_BACKEND\n"))
    expect(doctor.check_nixl(), FAIL, "nixlBackendError: NIXL_ERR_BACKEND", "reinstall")
    monkeypatch.setenv("UCX_TLS", "posix,self")
    expect(doctor.check_nixl(), FAIL, "NIXL_ERR_BACKEND", "check UCX_TLS=posix,self")


def test_a_bad_folder_of_plugins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_PLUGIN_DIR", "/nonexistent")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    expect(doctor.check_nixl(), FAIL, "cannot create an agent", "unset NIXL_PLUGIN_DIR=/nonexistent")


def test_a_misspelt_variable_of_ucx_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TSL", "tcp")
    expect(doctor.check_nixl(), WARN, "created an agent with UCX", "UCX_TSL")


def test_nixl_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(code: str) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(code, doctor.PROBE_TIMEOUT_S)

    monkeypatch.setattr(doctor, "_run_python", hang)
    expect(doctor.check_nixl(), FAIL, "no agent after", "unset UCX_TLS")


def test_nixl_without_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_run_python", answers(stdout='log line\n{"version": "1.5.1", "plugins": ["POSIX"]}\n'))
    expect(doctor.check_nixl(), FAIL, "without its UCX plugin", "NIXL_PLUGIN_DIR")


@pytest.mark.parametrize(("version", "verdict"), [("1.4.9", FAIL), ("0.10.0", FAIL), ("1.5.0", OK), ("1.10", OK)])
def test_nixl_version(version: str, verdict: Grade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_run_python", answers(0, json.dumps({"version": version, "plugins": ["UCX"]})))
    expect(doctor.check_nixl(), verdict, version, "nixl>=1.5" if verdict is FAIL else "")


def test_real_nixl_with_unknown_ucx_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "pigeon")
    expect(doctor.check_nixl(), FAIL, "cannot create an agent", "UCX_TLS=pigeon")


def test_transports_with_a_missing_device_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo,mlx5_77:1")
    expect(doctor.check_transports(), FAIL, "UCX_NET_DEVICES=lo,mlx5_77:1", "names mlx5_77:1")


@pytest.mark.parametrize("value", ["all", "lo", "^lo"])
def test_transports_with_an_existing_device_pass(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    monkeypatch.setenv("UCX_NET_DEVICES", value)
    expect(doctor.check_transports(), OK, "lo")


def test_lists_of_descriptors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_gpu", lambda: False)
    monkeypatch.setenv("UCX_TLS", "all")
    monkeypatch.setenv("NIXL_UCX_SGL_ENABLE", "1")
    expect(doctor.check_transports(), OK, "UCX_TLS=all; NIXL_UCX_SGL_ENABLE=1 (a WRITE's descriptors as one list); ")


@pytest.mark.parametrize(
    ("tls", "verdict"), [("tcp,self", WARN), ("tcp,cuda_copy,self", OK), ("all", OK), ("^sysv", OK), (None, OK)]
)
def test_transports_of_a_gpu_machine(tls: str | None, verdict: Grade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    expect(doctor.check_transports(), verdict, tls or "", "cuda_copy" if verdict is WARN else "")


@pytest.mark.parametrize(
    ("gpu", "build", "verdict", "advice"),
    [
        (False, "cpu", OK, ""),
        (False, "cuda", FAIL, "'.[cpu]'"),
        (False, "", FAIL, "'.[cpu]'"),
        (True, "cuda", OK, ""),
        (True, "cpu", WARN, "'.[cuda]'"),
    ],
)
def test_device(gpu: bool, build: str, verdict: Grade, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(doctor, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Fast 9000")
    platforms = types.SimpleNamespace(current_platform=types.SimpleNamespace(device_type=build))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    expect(doctor.check_device(), verdict, "2 x Fast 9000" if gpu else "no CUDA device", advice)


@pytest.mark.parametrize(
    ("interface", "address", "verdict", "found"),
    [
        ("eth1", "10.0.0.1", OK, "listens on eth1"),
        (None, "127.0.1.1", OK, "listens at 127.0.1.1"),
        (None, None, OK, "a loopback address"),
        (None, "10.0.0.1", WARN, "listens at 10.0.0.1"),
        (None, "fd00::1", WARN, "listens at fd00::1"),
    ],
)
def test_gloo(
    interface: str | None, address: str | None, verdict: Grade, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(*_: object) -> list[Any]:
        if address is None:
            raise socket.gaierror
        return [(None, None, None, "", (address, 0))]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    expect(doctor.check_gloo(), verdict, found, "set GLOO_SOCKET_IFNAME=lo" if verdict == WARN else "")


def test_port_free_then_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        listener.listen()
        expect(side_channel.check_port(), FAIL, f"127.0.0.1:{port}", "another program has this port")
    expect(side_channel.check_port(), WARN, "is free", "VLLM_NIXL_SIDE_CHANNEL_PORT below")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(PORTS.next_free()))
    expect(side_channel.check_port(), OK, "is free")


@pytest.mark.parametrize("value", ["0", "70000", "http", ""])
def test_an_invalid_port_fails(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", value)
    expect(side_channel.check_port(), FAIL, "is not a port number", "VLLM_NIXL_SIDE_CHANNEL_PORT=")


def test_a_host_of_another_machine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "192.0.2.1")
    advice = "VLLM_NIXL_SIDE_CHANNEL_HOST must be an address of this machine"
    expect(side_channel.check_port(), FAIL, "192.0.2.1:5600", advice)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "[::]"])
def test_a_host_to_which_no_peer_can_connect_fails(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(PORTS.next_free()))
    expect(side_channel.check_port(), FAIL, "is free", f"no peer can connect to {host}")


def test_a_host_that_is_not_set_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(PORTS.next_free()))
    expect(side_channel.check_port(), WARN, "localhost:", "set VLLM_NIXL_SIDE_CHANNEL_HOST")


def test_an_ephemeral_port_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    expect(side_channel.check_port(), WARN, "is free", "set VLLM_NIXL_SIDE_CHANNEL_PORT below ")


@contextmanager
def engine(settings: dict[str, str] | None) -> Iterator[int]:
    """The side channel of an engine; None: of a stock one. Gives its port."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

    from layerpush.compat.engine_threads import EngineThreads
    from layerpush.compat.handshake import signed
    from layerpush.engine.scheduler.side_channel import listen

    agent = msgspec.msgpack.encode({"engine_id": "prefill-0", "agent_metadata": b"agent"})
    payload = NixlHandshakePayload("hash", agent)
    answer = msgspec.msgpack.encode(payload if settings is None else signed(payload, settings))
    port, stop = PORTS.next_free(), threading.Event()
    bound = bind_at_once("127.0.0.1", port)
    arguments = (bound, EngineThreads(), {(0, 0): answer}, threading.Event(), stop)
    listener = threading.Thread(target=listen, args=arguments)
    listener.start()
    try:
        yield port
    finally:
        stop.set()
        listener.join()


def peer(port: int, **fields: object) -> Result:
    config = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer", "engine_id": "decode-0"} | fields
    return side_channel.check_peer("127.0.0.1", port, json.dumps(config))


def test_a_peer_is_shown_with_its_settings() -> None:
    import vllm

    settings = {
        "vLLM": vllm.__version__,
        "the model": "llama\x1b[2J",
        "\x1b[2J": "",
        **{f"{n}": "" for n in range(999)},
    }
    with engine(settings) as port:
        expect(peer(port), OK, f"engine 'prefill-0', layerpush\nvLLM: '{vllm.__version__}'\nthe model: 'llama\\x1b[2J'")
        expect(side_channel.check_peer("127.0.0.1", port, None), OK, "engine 'prefill-0'")
        expect(side_channel.check_peer("127.0.0.1", port, "{"), OK, "engine 'prefill-0'")
        assert peer(port).found.count("\n") == 2, "names that nobody knows are not shown"
    with engine(None) as port:
        expect(peer(port), OK, "engine 'prefill-0', no layerpush")


def test_a_peer_that_cannot_pair_fails() -> None:
    with engine({"vLLM": "0.1"}) as port:
        expect(peer(port), FAIL, "prefill-0", "P and D must have the same settings: vLLM is '0.1' there and ")
    with engine({}) as port:
        expect(peer(port, engine_id="prefill-0"), FAIL, "prefill-0", "give this engine another engine_id")
        elsewhere = {"allowed_hosts": ["10.0.0.0/8"]}
        expect(peer(port, kv_connector_extra_config=elsewhere), FAIL, "prefill-0", "add '127.0.0.1' to allowed_hosts")


def test_a_peer_without_a_side_channel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from layerpush.engine.worker import side_channel_probe

    port = PORTS.next_free()
    expect(peer(port), FAIL, f"nothing listens at 127.0.0.1:{port}", "start that engine")
    monkeypatch.setattr(side_channel_probe.agent_of, "__defaults__", (0, 0, 0.2))
    with socket.create_server(("127.0.0.1", port)) as server:
        expect(peer(port), FAIL, f"no answer of 127.0.0.1:{port}", "firewall")

        def http() -> None:
            for _ in range(2):  # the first one is the check before
                connection, _ = server.accept()
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request")
                connection.close()

        monkeypatch.setattr(side_channel_probe.agent_of, "__defaults__", (0, 0, 10.0))
        serving = threading.Thread(target=http)
        serving.start()
        expect(peer(port), FAIL, f"127.0.0.1:{port} is no side channel", "not the port of its API server")
        serving.join()
    expect(side_channel.check_peer("no such host", port, None), FAIL, "no such host", "correct the host")


def test_a_check_that_raises_fails_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> Result:
        raise OSError("libthing.so: cannot open")

    monkeypatch.setattr(doctor, "CHECKS", {"first": breaks, "second": doctor.check_python})
    first, second = doctor.examine()
    assert (first.check, first.verdict, first.found) == ("first", FAIL, "OSError: libthing.so: cannot open")
    assert first.advice
    assert (second.check, second.verdict) == ("second", OK)


def test_every_patch_of_the_installed_vllm_is_printed_with_its_targets() -> None:
    result = doctor.check_patches()
    expect(result, OK, "first-tokens is on: ")
    assert "\n    engine core: vllm.v1.core.sched.scheduler:Scheduler.schedule\n" in result.found


def test_a_patch_without_its_target_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    target = patches.Target(
        patches.Process.WORKER, "vllm.v1.request:Request.gone", "layerpush.compat.admission:checking"
    )
    monkeypatch.setattr(patches, "PATCHES", (patches.Patch("one", (target,), "Why.", "Lost."),))
    expect(doctor.check_patches(), WARN, "worker: vllm.v1.request:Request.gone DOES NOT EXIST", "without one")


def test_a_patch_that_is_left_out_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(patches.VARIABLE, "handshakes")
    expect(doctor.check_patches(), WARN, "handshakes is off", "unset LAYERPUSH_WITHOUT_PATCHES")
    monkeypatch.setenv(patches.VARIABLE, "handshake")
    expect(doctor.check_patches(), FAIL, "no patch handshake; known: ")
