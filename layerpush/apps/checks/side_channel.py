"""Checks this engine's side channel before it starts, and that of a peer."""

from __future__ import annotations

import os
from pathlib import Path

from layerpush.apps.checks.finding import Result, fail, ok, warn
from layerpush.apps.checks.transfer_config import connectors, read
from layerpush.core.config import ConfigError
from layerpush.core.hosts import host_allowed
from layerpush.transport.port import SideChannelError, bind_at_once
from layerpush.transport.zmtp import ZmtpError

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
ANY = ("*", "0.0.0.0", "::")
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_port() -> Result:
    """The side channel, from which D fetches P's metadata. Each engine of a machine needs its own port."""
    host, port = os.environ.get(HOST, "localhost"), os.environ.get(PORT, "5600")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        advice = f"set {PORT}=5700 (or another free one, different for each engine of a machine)"
        return fail(f"{PORT}={port!r} is not a port number", advice)
    try:
        bind_at_once(host, int(port)).close()
    except SideChannelError as error:
        return fail(error.reason, error.cure)
    found = f"{host}:{port} is free"
    if host.strip("[]") in ANY:
        return fail(found, f"set {HOST} to this machine's private address: no peer can connect to {host}")
    first, last = map(int, EPHEMERAL.read_text().split())
    if first <= int(port) <= last:
        return warn(found, f"set {PORT} below {first}: any outgoing connection may take this one (see {EPHEMERAL})")
    if HOST not in os.environ:
        return warn(found, f"set {HOST} to this machine's address: peers on other machines connect to themselves")
    return ok(found)


def check_peer(host: str, port: int, transfer_config: str | None) -> Result:
    """The side channel of a running engine: whether one answers, its settings, and whether it pairs with this one."""
    import vllm

    from layerpush.compat.handshake import MAX_SETTING, SETTINGS, difference_of
    from layerpush.engine.worker.side_channel_probe import TIMEOUT_S, agent_of

    at = f"{host}:{port}"
    try:
        agent = agent_of(host, port)
    except ConnectionRefusedError:
        return fail(f"nothing listens at {at}", f"start that engine, or name its {HOST} and {PORT}")
    except TimeoutError:
        return fail(f"no answer of {at} within {TIMEOUT_S:g} s", "open the port in the firewall, or correct the host")
    except (ZmtpError, ValueError, RecursionError) as error:
        return fail(f"{at} is no side channel: {error}", f"name the peer's {PORT}, not the port of its API server")
    except OSError as error:
        return fail(f"{at}: {error}", "correct the host, or the route to it")
    if agent is None:
        return fail(f"{at} has no rank 0", "wait until that engine has started")
    kind = "layerpush" if agent.layerpush else "no layerpush"
    settings = "".join(
        f"\n{name}: {agent.settings[name][:MAX_SETTING]!r}" for name in SETTINGS if name in agent.settings
    )
    found = f"engine {agent.engine_id[:MAX_SETTING]!r}, {kind}{settings}"
    problems = [difference_of({"vLLM": vllm.__version__}, agent.settings)]
    try:
        transfer = {} if transfer_config is None else read(transfer_config)
        ours = connectors(transfer) if transfer else []
    except ConfigError:  # another check's finding
        transfer, ours = {}, []
    if transfer.get("engine_id") == agent.engine_id:
        problems.append("give this engine another engine_id: each needs its own")
    if not all(host_allowed(host, settings.config.allowed_hosts) for settings in ours):
        problems.append(f"add {host!r} to allowed_hosts: this engine would not connect to it")
    advice = "\n".join(filter(None, problems))
    return fail(found, advice) if advice else ok(found)
