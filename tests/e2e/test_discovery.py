"""vLLM's router by the arguments of its Kubernetes manifest: it finds P and D at a stand-in for the API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from layerpush.apps.files.command import text_of
from tests.e2e.test_vllm_router import ROOT, ROUTER
from tests.unit.proxy.stub import MODEL, Network, Stub, running
from tests.unit.proxy.world import asynchronous, free_port, until

NAMESPACE = "serving"
AT_P, AT_D = "127.0.0.2", "127.0.0.3"
"""Discovery has one port for all engines, so each has an address of its own, as pods do."""


def arguments(**places: int) -> list[str]:
    """Those of the manifest, with other ports."""
    documents = yaml.safe_load_all(text_of("kubernetes/router.yaml"))
    (deployment,) = (each for each in documents if each["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    text = "\n".join(container["args"]).replace("$(POD_NAMESPACE)", NAMESPACE)
    for name, port in places.items():
        text, changed = re.subn(rf"^(--{name.replace('_', '-')}=).*", rf"\g<1>{port}", text, flags=re.MULTILINE)
        assert changed == 1
    return text.splitlines()


def pod(role: str, address: str) -> dict[str, Any]:
    """A ready pod with the labels of the manifest."""
    (deployment,) = yaml.safe_load_all(text_of(f"kubernetes/{role}.yaml"))
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": role,
            "namespace": NAMESPACE,
            "uid": role,
            "resourceVersion": "1",
            "labels": deployment["spec"]["template"]["metadata"]["labels"],
        },
        "spec": {"containers": [{"name": "vllm"}]},
        "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]},
    }


@contextlib.asynccontextmanager
async def api_server(*pods: dict[str, Any]) -> AsyncIterator[tuple[str, list[str]]]:
    """Its URL, and the paths that were asked for. It has the list of pods, and nothing changes."""
    asked: list[str] = []

    async def listed(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.query.get("watch") != "true":
            return web.json_response(
                {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": pods}
            )
        watch = web.StreamResponse(headers={"Content-Type": "application/json"})
        await watch.prepare(request)
        await asyncio.Event().wait()
        return watch

    app = web.Application()
    app.router.add_get("/{path:.*}", listed)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def router(scratch: Path, api: str, port_of_engines: int) -> AsyncIterator[str]:
    """The URL of a router that is ready."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": api}}],
        "users": [{"name": "u", "user": {"token": "x"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "current-context": "c",
    }
    (scratch / "kubeconfig").write_text(json.dumps(config))
    port = free_port()
    command = [str(ROUTER), *arguments(port=port, prometheus_port=free_port(), service_discovery_port=port_of_engines)]
    environment = os.environ | {"KUBECONFIG": str(scratch / "kubeconfig"), "NO_PROXY": "*", "no_proxy": "*"}
    with (scratch / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=scratch)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def installed() -> None:
    subprocess.run([ROOT / "scripts" / "vllm-router"], check=True)


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("installed")
@asynchronous
async def test_the_router_finds_engines_and_asks_both_at_the_same_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    network = Network()
    p, d = Stub(network, "prefill", "p0", AT_P), Stub(network, "decode", "d0", AT_D)
    p.port = d.port = free_port()
    body = {"model": MODEL, "prompt": "x", "max_tokens": 4}
    async with (
        running(p, d),
        api_server(pod("prefill", AT_P), pod("decode", AT_D)) as (api, asked),
        router(tmp_path_factory.mktemp("discovery"), api, p.port) as url,
        aiohttp.ClientSession() as session,
    ):

        async def ask() -> int:
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    return response.status
            return 0

        while await ask() != 200:  # it has not found both engines yet
            await asyncio.sleep(0.05)
        assert set(asked) == {f"/api/v1/namespaces/{NAMESPACE}/pods"}
        before = len(d.seen)
        p.hold = asyncio.Event()
        second = asyncio.create_task(ask())
        await until(lambda: len(d.seen) > before, "D has the second request while P computes it")
        assert d.seen[-1].params["remote_engine_id"] == "p0"
        p.hold.set()
        assert await second == 200
        for probe in ("liveness", "readiness"):
            async with session.get(f"{url}/{probe}") as response:
                assert response.status == 200
