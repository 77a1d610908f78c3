"""Access to each port of P and D by the NetworkPolicies of the manifests, under the rules of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import yaml

from layerpush.apps.files.command import MANIFESTS, text_of

Labels = Mapping[str, str]
HERE, MONITORING, ELSEWHERE = "serving", "monitoring", "other"
HTTP, BEHIND_THE_SIDECAR, SIDE_CHANNEL, UCX = 8000, 8200, 5600, 41234
PLAIN, WITH_LLM_D = MANIFESTS, (*MANIFESTS, "llm-d/decode.yaml")


@dataclass(frozen=True)
class Pod:
    labels: Labels = field(default_factory=dict)
    namespace: str = HERE


@cache
def parsed(name: str) -> tuple[dict[str, Any], ...]:
    return tuple(yaml.safe_load_all(text_of(name)))


def documents(names: Sequence[str], kind: str) -> list[dict[str, Any]]:
    return [each for name in names for each in parsed(name) if each["kind"] == kind]


def component(role: str, names: Sequence[str] = PLAIN) -> Pod:
    """A pod of a Deployment of the manifests."""
    templates = [each["spec"]["template"] for each in documents(names, "Deployment")]
    (labels, *_) = [
        each["metadata"]["labels"]
        for each in templates
        if each["metadata"]["labels"]["app.kubernetes.io/component"] == role
    ]
    return Pod(labels)


def selects(selector: Mapping[str, Any], labels: Labels) -> bool:
    def holds(expression: Mapping[str, Any]) -> bool:
        key, operator = expression["key"], expression["operator"]
        assert operator in ("In", "Exists")
        return key in labels and (operator == "Exists" or labels[key] in expression["values"])

    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        map(holds, selector.get("matchExpressions", ()))
    )


def is_from(peer: Mapping[str, Any], source: Pod) -> bool:
    """A peer without a ``namespaceSelector`` is in the policy's namespace."""
    assert peer.keys() <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" in peer:
        namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
    else:
        namespace = source.namespace == HERE
    return namespace and selects(peer.get("podSelector", {}), source.labels)


def admits(names: Sequence[str], source: Pod, target: Pod, port: int) -> bool:
    """A pod that no policy selects admits all. Policies and their rules add up."""
    policies = [each["spec"] for each in documents(names, "NetworkPolicy")]
    rules = [rule for spec in policies if selects(spec["podSelector"], target.labels) for rule in spec["ingress"]]
    if not rules:
        return True
    return any(
        any(is_from(peer, source) for peer in rule["from"])
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for rule in rules
    )


P, D, PROXY = (component(role) for role in ("prefill", "decode", "proxy"))
PROMETHEUS = Pod(namespace=MONITORING)
GATEWAY = Pod({"gateway.networking.k8s.io/gateway-name": "inference"})
EPPS = [Pod({label: "pool-epp"}) for label in ("inferencepool", "llm-d-router-gateway", "llm-d-router-standalone")]


@pytest.mark.parametrize("names", [PLAIN, WITH_LLM_D], ids=["plain", "llm-d"])
@pytest.mark.parametrize("target", [P, D], ids=["P", "D"])
def test_engines_reach_each_other_and_the_proxy_reaches_their_servers(names: Sequence[str], target: Pod) -> None:
    for port in (HTTP, SIDE_CHANNEL, UCX):
        assert admits(names, P, target, port)
        assert admits(names, D, target, port)
        assert admits(names, PROXY, target, port) == (port == HTTP)
        assert admits(names, PROMETHEUS, target, port) == (port == HTTP)
        assert not admits(names, Pod(), target, port)
        assert not admits(names, Pod(PROXY.labels, ELSEWHERE), target, port)
    assert admits(names, Pod(), PROXY, HTTP)


@pytest.mark.parametrize("source", [GATEWAY, *EPPS], ids=lambda pod: next(iter(pod.labels)))
@pytest.mark.parametrize("target", [P, component("decode", ["llm-d/decode.yaml"])], ids=["P", "D"])
def test_llm_ds_gateway_and_epp_reach_the_servers_only(source: Pod, target: Pod) -> None:
    assert admits(WITH_LLM_D, source, target, HTTP)
    for port in (BEHIND_THE_SIDECAR, SIDE_CHANNEL, UCX):
        assert not admits(WITH_LLM_D, source, target, port)
    assert not admits(WITH_LLM_D, Pod(source.labels, ELSEWHERE), target, HTTP)
    assert not admits(PLAIN, source, target, HTTP)


def test_prometheus_reaches_each_port_of_the_pod_monitor() -> None:
    """It also reaches the port of a D behind a sidecar."""
    (monitor,) = documents(PLAIN, "PodMonitor")
    names = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    for manifest in ("kubernetes/prefill.yaml", "kubernetes/decode.yaml", "llm-d/decode.yaml"):
        (deployment,) = documents([manifest], "Deployment")
        template = deployment["spec"]["template"]
        (container,) = template["spec"]["containers"]
        (port,) = (each["containerPort"] for each in container["ports"] if each["name"] in names)
        assert admits(WITH_LLM_D, PROMETHEUS, Pod(template["metadata"]["labels"]), port)
