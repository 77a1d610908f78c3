"""Access to each port of P, D and router by the NetworkPolicies of the manifests, under the rules of Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address, ip_network
from typing import Any, Literal

import pytest
import yaml

from layerpush.apps.files.command import MANIFESTS, POD_MONITOR, text_of

Labels = Mapping[str, str]
Way = Literal["ingress", "egress"]
HERE, MONITORING, SYSTEM, ELSEWHERE = "serving", "monitoring", "kube-system", "other"
HTTP, METRICS, BEHIND_THE_SIDECAR, SIDE_CHANNEL, UCX, DNS, HTTPS = 8000, 8001, 8200, 5600, 41234, 53, 443
ROUTER_METRICS = 29000
API_SERVER = (443, 6443)
PEER = {"ingress": "from", "egress": "to"}
PLAIN, WITH_LLM_D = MANIFESTS, (*MANIFESTS, "llm-d/decode.yaml")


@dataclass(frozen=True)
class Pod:
    """A pod, or a host outside the cluster, which has an ``address`` alone."""

    labels: Labels = field(default_factory=dict)
    namespace: str = HERE
    address: str = "10.1.2.3"


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


def is_peer(peer: Mapping[str, Any], source: Pod) -> bool:
    """A peer without a ``namespaceSelector`` is in the policy's namespace."""
    assert peer.keys() <= {"podSelector", "namespaceSelector"} or peer.keys() == {"ipBlock"}
    if "ipBlock" in peer:
        address = ip_address(source.address)
        block = peer["ipBlock"]
        return address in ip_network(block["cidr"]) and not any(address in ip_network(each) for each in block["except"])
    if "namespaceSelector" in peer:
        namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
    else:
        namespace = source.namespace == HERE
    return namespace and selects(peer.get("podSelector", {}), source.labels)


def allows(names: Sequence[str], way: Way, pod: Pod, other: Pod, port: int) -> bool:
    """Whether ``pod`` may be reached by the other one, or may reach it. Policies and their rules add up. A pod that no
    policy selects may do all. A rule without peers, or without ports, is for all.
    """
    policies = [each["spec"] for each in documents(names, "NetworkPolicy")]
    mine = [
        spec for spec in policies if selects(spec["podSelector"], pod.labels) and way.title() in spec["policyTypes"]
    ]
    return not mine or any(
        (PEER[way] not in rule or any(is_peer(peer, other) for peer in rule[PEER[way]]))
        and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])
        for spec in mine
        for rule in spec[way]
    )


def admits(names: Sequence[str], source: Pod, target: Pod, port: int) -> bool:
    return allows(names, "ingress", target, source, port)


def connects(names: Sequence[str], source: Pod, target: Pod, port: int) -> bool:
    return allows(names, "egress", source, target, port) and admits(names, source, target, port)


P, D, ROUTER = (component(role) for role in ("prefill", "decode", "router"))
PROMETHEUS = Pod(namespace=MONITORING)
GATEWAY = Pod({"gateway.networking.k8s.io/gateway-name": "inference"})
EPPS = [Pod({label: "pool-epp"}) for label in ("inferencepool", "llm-d-router-gateway", "llm-d-router-standalone")]


@pytest.mark.parametrize("names", [PLAIN, WITH_LLM_D], ids=["plain", "llm-d"])
@pytest.mark.parametrize("target", [P, D], ids=["P", "D"])
def test_engines_reach_each_other_and_the_router_reaches_their_servers(names: Sequence[str], target: Pod) -> None:
    for port in (HTTP, METRICS, SIDE_CHANNEL, UCX):
        assert connects(names, P, target, port)
        assert connects(names, D, target, port)
        assert connects(names, ROUTER, target, port) == (port == HTTP)
        assert not admits(names, Pod(), target, port)
        assert not admits(names, Pod(ROUTER.labels, ELSEWHERE), target, port)


@pytest.mark.parametrize("names", [PLAIN, WITH_LLM_D], ids=["plain", "llm-d"])
@pytest.mark.parametrize("target", [P, D], ids=["P", "D"])
def test_the_namespace_of_prometheus_reaches_metrics_and_no_api(names: Sequence[str], target: Pod) -> None:
    reached = (HTTP, METRICS, BEHIND_THE_SIDECAR, SIDE_CHANNEL, UCX)
    assert [port for port in reached if admits(names, PROMETHEUS, target, port)] == [METRICS]


@pytest.mark.parametrize("source", [P, D], ids=["P", "D"])
def test_an_engine_reaches_engines_dns_and_the_public_hosts_of_models_only(source: Pod) -> None:
    """``kv_transfer_params`` and registrations name hosts to which engines connect."""
    for port in (HTTP, SIDE_CHANNEL, UCX, DNS, HTTPS):
        assert allows(PLAIN, "egress", source, Pod(namespace=SYSTEM), port) == (port == DNS)
        assert allows(PLAIN, "egress", source, Pod(address="93.184.216.34", namespace=ELSEWHERE), port) == (
            port == HTTPS
        )
        for address in ("10.1.2.3", "169.254.169.254", "192.168.0.1", "172.16.0.1", "100.64.0.1"):
            assert not allows(PLAIN, "egress", source, Pod(address=address, namespace=ELSEWHERE), port)
        assert not allows(PLAIN, "egress", source, ROUTER, port)


def test_the_router_reaches_engines_dns_and_the_api_server() -> None:
    """No manifest can know the address of the API server. So the router may reach its ports at all addresses."""
    for port in (HTTP, METRICS, SIDE_CHANNEL, UCX, DNS, HTTPS, ROUTER_METRICS):
        for source in (Pod(), PROMETHEUS, Pod(namespace=ELSEWHERE)):
            of_prometheus = source == PROMETHEUS and port == ROUTER_METRICS
            assert admits(PLAIN, source, ROUTER, port) == (port == HTTP or of_prometheus)
        for engine in (P, D):
            assert allows(PLAIN, "egress", ROUTER, engine, port) == (port == HTTP or port in API_SERVER)
            assert connects(PLAIN, ROUTER, engine, port) == (port == HTTP)
        assert allows(PLAIN, "egress", ROUTER, Pod(namespace=SYSTEM), port) == (port == DNS or port in API_SERVER)
    outside = Pod(address="10.96.0.1", namespace=ELSEWHERE)
    assert [port for port in range(1, 1 << 16) if allows(PLAIN, "egress", ROUTER, outside, port)] == [*API_SERVER]


@pytest.mark.parametrize("source", [GATEWAY, *EPPS], ids=lambda pod: next(iter(pod.labels)))
@pytest.mark.parametrize("target", [P, component("decode", ["llm-d/decode.yaml"])], ids=["P", "D"])
def test_llm_ds_gateway_and_epp_reach_the_servers_only(source: Pod, target: Pod) -> None:
    assert admits(WITH_LLM_D, source, target, HTTP)
    for port in (BEHIND_THE_SIDECAR, SIDE_CHANNEL, UCX):
        assert not admits(WITH_LLM_D, source, target, port)
    assert not admits(WITH_LLM_D, Pod(source.labels, ELSEWHERE), target, HTTP)
    assert not admits(PLAIN, source, target, HTTP)


@pytest.mark.parametrize(
    "manifest", ["kubernetes/prefill.yaml", "kubernetes/decode.yaml", "kubernetes/router.yaml", "llm-d/decode.yaml"]
)
def test_prometheus_reaches_the_port_of_one_pod_monitor(manifest: str) -> None:
    (deployment,) = documents([manifest], "Deployment")
    template = deployment["spec"]["template"]
    pod = Pod(template["metadata"]["labels"])
    (monitor,) = (
        each["spec"] for each in documents([POD_MONITOR], "PodMonitor") if selects(each["spec"]["selector"], pod.labels)
    )
    (name,) = (endpoint["port"] for endpoint in monitor["podMetricsEndpoints"])
    containers = (*template["spec"]["containers"], *template["spec"].get("initContainers", ()))
    (port,) = (each["containerPort"] for one in containers for each in one["ports"] if each["name"] == name)
    assert admits(WITH_LLM_D, PROMETHEUS, pod, port)
