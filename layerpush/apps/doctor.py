"""Is this machine ready for layerpush? Each check gives one `Finding`: its result, and advice."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from layerpush import plugin
from layerpush.apps.checks.finding import Finding, Result, fail, ok, warn
from layerpush.apps.checks.side_channel import check_peer, check_port
from layerpush.apps.checks.transfer_config import check_transfer_config
from layerpush.compat import patches
from layerpush.compat.vllm_sources import VllmSources
from layerpush.core.config import CONNECTOR_NAME, ConfigError

PYTHON_VERSIONS = ((3, 11), (3, 14))  # from, up to but not including
VLLM_VERSIONS = ((0, 32), (0, 34))
NIXL_FROM = (1, 5)
GLOO = "GLOO_SOCKET_IFNAME"
SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES", "NIXL_UCX_SGL_ENABLE")
"""Variables of UCX, and of NIXL's UCX backend, that are shown."""
EXTRAS = "in a checkout of layerpush: pip install '.[cuda]' on a GPU machine, '.[cpu]' elsewhere"
PROBE_TIMEOUT_S = 60
TRANSFER_CONFIG = "configuration"

# Runs in a process of its own, as the check of torch's companions does: a bad UCX setting may hang or kill it.
_NIXL_PROBE = """
import json, nixl
from importlib.metadata import version
agent = nixl.nixl_agent("layerpush-doctor")
print()
print(json.dumps({"version": version("nixl"), "plugins": sorted(agent.get_plugin_list())}))
"""


def examine(transfer_config: str | None = None, peer: tuple[str, int] | None = None) -> Iterator[Finding]:
    """Run all checks in turn. Takes 10 to 20 s, because the checks load vLLM and NIXL.

    ``transfer_config`` is JSON, or ``@`` and a file's name. ``peer`` is a side channel's host and port.

    Never raises: an exception in a check counts as its failure.
    """
    checks = dict(CHECKS)
    if transfer_config is not None:  # the first one: it needs a second
        checks = {TRANSFER_CONFIG: partial(check_transfer_config, transfer_config), **checks}
    if peer is not None:
        checks["peer"] = partial(check_peer, *peer, transfer_config)
    for name, check in checks.items():
        try:
            result = check()
        except ModuleNotFoundError as error:
            result = fail(f"{error.name} is not installed", EXTRAS)
        except Exception as error:  # noqa: BLE001  # any exception is a finding
            result = fail(f"{type(error).__name__}: {error}", "reinstall the package in the message")
        yield Finding(name, *result)


def check_python() -> Result:
    found = ".".join(map(str, sys.version_info[:3]))
    if PYTHON_VERSIONS[0] <= sys.version_info[:2] < PYTHON_VERSIONS[1]:
        return ok(found)
    return fail(found, f"use Python {_range(PYTHON_VERSIONS)}")


def check_torch_companions() -> Result:
    """Check torchvision, torchaudio, torchcodec. With CPU torch, their CUDA builds break transformers and so vLLM."""
    installed = [module for module in ("torchvision", "torchaudio", "torchcodec") if find_spec(module)]
    broken = [module for module in installed if _run_python(f"import torch, {module}").returncode != 0]
    if broken:
        return fail(
            f"{', '.join(broken)} cannot be loaded beside torch {metadata.version('torch')}",
            f"not needed here: {sys.executable} -m pip uninstall {' '.join(broken)}",
        )
    return ok(f"{', '.join(installed)} can be loaded" if installed else "none installed, none needed")


def check_vllm() -> Result:
    wanted = f"{EXTRAS} (vLLM {_range(VLLM_VERSIONS)})"
    if not find_spec("vllm"):
        return fail("not installed", wanted)
    import vllm

    version = str(vllm.__version__)
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match:
        return warn(version, f"cannot tell whether this is vLLM {_range(VLLM_VERSIONS)}")
    if not VLLM_VERSIONS[0] <= (int(match[1]), int(match[2])) < VLLM_VERSIONS[1]:
        return fail(version, wanted)
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return ok(
            f"{version}, without the `vllm` command's metadata",
            "instead of `vllm serve MODEL`: python -m vllm.entrypoints.openai.api_server --model MODEL",
        )
    return ok(version)


def check_plugin() -> Result:
    entries = [entry for entry in metadata.entry_points(group="vllm.general_plugins") if entry.name == "layerpush"]
    if not entries:
        return fail("no entry point", "install layerpush itself, in a checkout: pip install .")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "layerpush" not in allowed.split(","):
        return fail(f"VLLM_PLUGINS={allowed} excludes layerpush", "add layerpush to it, or unset it")
    try:
        plugin.register()
    except (plugin.ConnectorNameError, ConfigError) as error:
        return fail(str(error), "every vLLM process stops with this message")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    cls = KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME)
    return ok(f'"kv_connector": "{CONNECTOR_NAME}" is {cls.__module__}.{cls.__qualname__}')


def check_patches() -> Result:
    """Every change of vLLM at run time, and whether its target exists in the installed vLLM. Reads vLLM's sources."""
    try:
        left_out = patches.left_out()
    except ConfigError as error:
        return fail(str(error), "every vLLM process stops with this message")
    if not find_spec("vllm"):
        return fail("vllm is not installed", EXTRAS)
    sources, lines, missing = VllmSources(), list[str](), list[str]()
    for patch in patches.PATCHES:
        lines.append(f"{patch.name} is {'off' if patch.name in left_out else 'on'}: {patch.reason}")
        for target in patch.targets:
            found = sources.find(target.path.rpartition(".")[0] if target.is_new else target.path) is not None
            lines.append(f"    {target.process}: {target.path}{'' if found else ' DOES NOT EXIST'}")
            missing += [] if found else [patch.name]
    found_text = "\n".join([f"{len(patches.PATCHES)} of vLLM", *lines])
    if missing:
        return warn(found_text, f"without {', '.join(dict.fromkeys(missing))}: see docs/compatibility.md")
    return warn(found_text, f"unset {patches.VARIABLE}, if nothing is wrong with them") if left_out else ok(found_text)


def check_nixl() -> Result:
    wanted = f"pip install 'nixl>={NIXL_FROM[0]}.{NIXL_FROM[1]}'"
    if not find_spec("nixl"):
        return fail("not installed", wanted)
    try:
        probe = _run_python(_NIXL_PROBE)
    except subprocess.TimeoutExpired:
        return fail(f"no agent after {PROBE_TIMEOUT_S} s", "unset UCX_TLS and UCX_NET_DEVICES and try again")
    if probe.returncode != 0:
        last = (probe.stderr.strip() or "no message").splitlines()[-1]
        if (folder := os.environ.get("NIXL_PLUGIN_DIR")) is not None:
            advice = f"unset NIXL_PLUGIN_DIR={folder}, or name the folder with NIXL's plugins in it"
            return fail(f"cannot create an agent: {last}", advice)
        set_here = " and ".join(_ucx_settings())
        return fail(
            f"cannot create an agent: {last}",
            f"check {set_here}: UCX must offer the transports and devices in them"
            if set_here
            else "reinstall nixl; UCX_LOG_LEVEL=info logs more",
        )
    answer = json.loads(probe.stdout.strip().splitlines()[-1])
    if "UCX" not in answer["plugins"]:
        return fail(f"{answer['version']} without its UCX plugin", "unset NIXL_PLUGIN_DIR, or reinstall nixl")
    match = re.match(r"(\d+)\.(\d+)", answer["version"])
    if match is None or (int(match[1]), int(match[2])) < NIXL_FROM:
        return fail(answer["version"], wanted)
    found = f"{answer['version']}, created an agent with UCX"
    unused = re.findall(r"unused environment variables?: ([^\n]+)", probe.stdout + probe.stderr)
    return warn(found, f"UCX does not know {unused[0]}: correct or unset it") if unused else ok(found)


def check_transports() -> Result:
    """UCX's settings and this machine's devices. NIXL's check shows whether UCX accepts them."""
    infiniband, network = _devices("infiniband"), _devices("net")
    offered = f"InfiniBand or RoCE: {', '.join(infiniband) or 'none'}; network: {', '.join(network) or 'none'}"
    shown = _ucx_settings()
    if os.environ.get("NIXL_UCX_SGL_ENABLE") == "1":
        shown[-1] += " (a WRITE's descriptors as one list)"
    found = "; ".join([*shown, offered])
    named = os.environ.get("UCX_NET_DEVICES", "all")
    missing = [
        device
        for device in named.lstrip("^").split(",")
        if device != "all" and device.split(":")[0] not in infiniband + network
    ]
    if missing:
        return fail(found, f"UCX_NET_DEVICES names {', '.join(missing)}, which this machine does not have")
    tls = os.environ.get("UCX_TLS", "all")
    if _has_gpu() and tls != "all" and not tls.startswith("^") and "cuda" not in tls:
        return warn(found, "UCX_TLS has no cuda_copy and cuda_ipc: UCX cannot read GPU memory; add them")
    if not infiniband:
        return ok(found, "between machines KV uses TCP" if _has_gpu() else "")
    return ok(found)


def check_gloo() -> Result:
    """The listeners of torch's process groups in each worker. Strangers there can use up a worker's open files."""
    if (interface := os.environ.get(GLOO)) is not None:
        return ok(f"listens on {interface}")
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        return ok(f"listens on a loopback address: nobody knows the address of {name}")
    if ipaddress.ip_address(address).is_loopback:
        return ok(f"listens at {address}")
    return warn(f"listens at {address}", f"set {GLOO}=lo if all ranks are on this machine: docs/security.md")


def check_device() -> Result:
    import torch
    from vllm.platforms import current_platform

    build = current_platform.device_type or "unknown"
    if not _has_gpu():
        found = f"CPU, {_cores()} cores; no CUDA device"
        if build == "cpu":
            return ok(found)
        return fail(
            f"{found}, but vLLM is not its CPU build",
            "pip install '.[cpu]' in a checkout of layerpush, in a fresh environment",
        )
    models = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))
    if build == "cpu":
        return warn(
            f"{found}, but vLLM is its CPU build", "pip install '.[cuda]' in a checkout of layerpush, to use the GPU"
        )
    return ok(found)


# The check of torch's companions comes before vLLM's, because they can break vLLM's import.
CHECKS: dict[str, Callable[[], Result]] = {
    "Python": check_python,
    "torch companions": check_torch_companions,
    "vLLM": check_vllm,
    "vLLM plugin": check_plugin,
    "patches": check_patches,
    "NIXL": check_nixl,
    "transports": check_transports,
    "gloo": check_gloo,
    "device": check_device,
    "side-channel port": check_port,
}


def _run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )


def _range(versions: tuple[tuple[int, int], tuple[int, int]]) -> str:
    return f">={versions[0][0]}.{versions[0][1]},<{versions[1][0]}.{versions[1][1]}"


def _ucx_settings() -> list[str]:
    return [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]


def _devices(kind: str) -> list[str]:
    folder = Path("/sys/class") / kind
    return (
        sorted(entry.name for entry in folder.iterdir() if entry.is_symlink() or entry.is_dir())
        if folder.is_dir()
        else []
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
