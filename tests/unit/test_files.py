"""`layerpush files`: the manifests fit the router, the connector and each other."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from layerpush.apps.cli import app
from layerpush.apps.files.command import DESCRIPTIONS, MANIFESTS, POD_MONITOR, RULE, WITH_ALERTS, text_of
from tests.docblocks import Command
from tests.docprograms import check, check_transfer_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "layerpush/apps/files"
KUBERNETES = "1.33"
DEPLOYMENTS = ("kubernetes/prefill.yaml", "kubernetes/decode.yaml", "llm-d/decode.yaml")
ROUTER = "kubernetes/router.yaml"
COPIES = 3
"""The router's body of a request, and those that it sends to P and to D."""


def of_kind(name: str, kind: str) -> dict[str, Any]:
    (found,) = [each for each in yaml.safe_load_all(text_of(name)) if each["kind"] == kind]
    return dict(found)


def pod(name: str) -> dict[str, Any]:
    return dict(of_kind(name, "Deployment")["spec"]["template"])


def engine(name: str) -> dict[str, Any]:
    (found,) = pod(name)["spec"]["containers"]
    return dict(found)


def containers(name: str) -> list[dict[str, Any]]:
    """All of them, with sidecars."""
    spec = pod(name)["spec"]
    return [*spec["containers"], *spec.get("initContainers", ())]


def transfer_config(name: str) -> dict[str, Any]:
    """With the ConfigMap's values in the place of variables, as Kubernetes puts them."""
    arguments = engine(name)["args"]
    text = arguments[arguments.index("--kv-transfer-config") + 1]
    values: Mapping[str, str] = of_kind("kubernetes/config.yaml", "ConfigMap")["data"] | {"POD_NAME": "pod-0"}
    return dict(json.loads(re.sub(r"\$\((\w+)\)", lambda variable: values[variable[1]], text)))


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([MG])i", text).groups()
    return int(number) << {"M": 20, "G": 30}[unit]


def test_every_file_is_listed_and_printed() -> None:
    shipped = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.suffix in (".yml", ".yaml", ".json")}
    assert shipped == DESCRIPTIONS.keys() - {"kubernetes", RULE}
    listed = CliRunner().invoke(app, ["files"]).stdout
    assert [line.split()[0] for line in listed.splitlines()] == list(DESCRIPTIONS)
    for name in DESCRIPTIONS:
        done = CliRunner().invoke(app, ["files", name])
        assert done.exit_code == 0
        assert done.stdout == text_of(name) != ""


def test_an_unknown_file_is_an_error_of_one_line() -> None:
    done = CliRunner().invoke(app, ["files", "../cli.py"])
    assert done.exit_code == 2
    assert done.stderr.startswith("layerpush files: no file '../cli.py'; there are alerts.yml, ")
    assert done.stderr.count("\n") == 1


def test_a_misspelt_file_has_a_hint() -> None:
    done = CliRunner().invoke(app, ["files", "grafana.jsn"])
    assert done.stderr.startswith("layerpush files: no file 'grafana.jsn'; did you mean 'grafana.json'? there are ")


@pytest.mark.parametrize("name", WITH_ALERTS)
def test_alerts_link_to_the_operators_runbook_url(name: str) -> None:
    done = CliRunner().invoke(app, ["files", name, "--runbook-url", "https://docs.example.org/layerpush/metrics/"])
    assert done.exit_code == 0
    plain, linked = (re.findall(r"runbook(?:_url)?: (.*)", text) for text in (text_of(name), done.stdout))
    sections = [each.removeprefix("docs/metrics.md#") for each in plain]
    assert linked == [f'"https://docs.example.org/layerpush/metrics/#{each}"' for each in sections] != []
    yaml.safe_load(done.stdout)


@pytest.mark.parametrize(
    ("name", "url", "problem"),
    [
        ("grafana.json", "https://a.example/", "--runbook-url is for alerts.yml and prometheus-rule.yaml"),
        ("alerts.yml", "a.example/metrics", "--runbook-url must be the http address of a page"),
        ("alerts.yml", "https://a.example/#b", "--runbook-url must be the http address of a page"),
        ("alerts.yml", 'https://a.example/"', "--runbook-url must be the http address of a page"),
    ],
)
def test_a_bad_runbook_url_is_an_error(name: str, url: str, problem: str) -> None:
    done = CliRunner().invoke(app, ["files", name, "--runbook-url", url])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"layerpush files: {problem}")
    assert done.stdout == ""


def test_the_prometheus_rule_has_the_alerts() -> None:
    assert of_kind(RULE, "PrometheusRule")["spec"] == yaml.safe_load(text_of("alerts.yml"))


def test_the_kubernetes_file_contains_all_manifests() -> None:
    together = list(yaml.safe_load_all(text_of("kubernetes")))
    assert together == [each for name in MANIFESTS for each in yaml.safe_load_all(text_of(name))]
    names = [(each["kind"], each["metadata"]["name"]) for each in together]
    assert len(set(names)) == len(names)


def check_schema(document: dict[str, Any]) -> None:
    """Raises for an unknown field, too. The models of the Prometheus operator's resources drop such fields silently."""
    if not document["apiVersion"].startswith("monitoring.coreos.com/"):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    import cloudcoil.models.prometheus_operator.v1 as prometheus_operator  # it takes four seconds

    resource = getattr(prometheus_operator, document["kind"]).model_validate(document)
    if resource.model_dump(mode="json", by_alias=True, exclude_none=True) != document:
        raise ValueError(f"{document['kind']} has an unknown field")


@pytest.mark.parametrize("name", [*MANIFESTS, POD_MONITOR, "llm-d/decode.yaml", RULE])
def test_a_manifest_fits_the_published_schemas(name: str) -> None:
    documents = list(yaml.safe_load_all(text_of(name)))
    assert documents
    for document in documents:
        check_schema(document)


def test_an_unknown_field_of_a_manifest_is_found() -> None:
    deployment = of_kind("kubernetes/prefill.yaml", "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_schema(deployment)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        (POD_MONITOR, ("spec", "podMetricsEndpoints", 0, "intervall"), "15s"),
        (RULE, ("spec", "groups", 0, "rules", 0, "expression"), "up"),
        (RULE, ("spec", "groups", 0, "rules", 0, "for"), "ten minutes"),
    ],
)
def test_a_bad_field_of_the_prometheus_operators_resources_is_found(
    name: str, path: tuple[Any, ...], value: Any
) -> None:
    document = next(yaml.safe_load_all(text_of(name)))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=r"unknown field|validation error"):
        check_schema(document)


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_each_deployment_configures_its_engine(name: str) -> None:
    container = engine(name)
    role = "prefill" if "prefill" in name else "decode"
    config = transfer_config(name)
    check_transfer_config(config)
    assert config["engine_id"] == "pod-0"
    assert config.get("kv_load_failure_policy") == {"prefill": None, "decode": "recompute"}[role]
    assert "POD_NETWORK" in text_of("kubernetes/config.yaml")
    assert config["kv_connector_extra_config"]["allowed_hosts"] == ["10.0.0.0/8"]
    assert config["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    labels = pod(name)["metadata"]["labels"]
    assert labels["llm-d.ai/role"] == labels["app.kubernetes.io/component"] == role
    assert labels["llm-d.ai/inference-serving"] == "true"
    http, side_channel = (port["containerPort"] for port in container["ports"])
    assert http == (8200 if name.startswith("llm-d") else 8000)
    assert side_channel == 5600
    assert f"--port={http}" in container["args"]
    assert {each["name"]: each.get("value") for each in container["env"]}["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    startup = container["startupProbe"]
    assert (startup["httpGet"]["path"], startup["periodSeconds"], startup["failureThreshold"]) == (
        "/v1/models",
        30,
        120,
    )
    assert container["resources"]["limits"]["rdma/ib"] == "1"
    volumes = {each["name"]: each["emptyDir"] for each in pod(name)["spec"]["volumes"]}
    assert volumes["shm"]["medium"] == "Memory"
    assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
    assert container["envFrom"] == [
        {"configMapRef": {"name": of_kind("kubernetes/config.yaml", "ConfigMap")["metadata"]["name"]}}
    ]
    assert container["args"][0] == "$(MODEL)"


@pytest.mark.parametrize("name", DEPLOYMENTS)
@pytest.mark.parametrize("status", [0, 1])
def test_the_doctor_checks_the_configuration_before_the_engine_starts(name: str, status: int, tmp_path: Path) -> None:
    for program, ending in (("layerpush", status), ("vllm", 0)):
        stand_in = tmp_path / program
        stand_in.write_text(f'#!/bin/sh\nprintf "%s\\0" {program} "$@"\nexit {ending}\n')
        stand_in.chmod(0o755)
    container = engine(name)
    words, path = [*container["command"], *container["args"]], f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True, check=False)
    doctor = ["layerpush", "doctor", "--kv-transfer-config", container["args"][-1]]
    serve = ["vllm", "serve", *container["args"]]
    assert (done.returncode, done.stdout.split("\0")[:-1]) == (status, doctor if status else doctor + serve)


def test_names_and_ports_of_the_manifests_match() -> None:
    arguments = engine(ROUTER)["args"]
    assert "--service-discovery-port=8000" in arguments
    for role in ("prefill", "decode"):
        first = arguments.index(f"--{role}-selector") + 1
        labels = pod(f"kubernetes/{role}.yaml")["metadata"]["labels"]
        for selector in (arguments[first : first + 2], [f"app.kubernetes.io/component={role}"]):
            assert dict(each.split("=") for each in selector).items() <= labels.items()
        assert of_kind(f"kubernetes/{role}.yaml", "Deployment")["spec"]["replicas"] > 1
    assert of_kind(ROUTER, "Service")["spec"]["selector"].items() <= pod(ROUTER)["metadata"]["labels"].items()
    for name in (*DEPLOYMENTS, ROUTER):
        labels = pod(name)["metadata"]["labels"]
        assert of_kind(name, "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_router_may_read_pods_of_its_namespace_and_nothing_else() -> None:
    """Only its pods have a token of the API server."""
    (rule,) = of_kind(ROUTER, "Role")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    binding, account = of_kind(ROUTER, "RoleBinding"), of_kind(ROUTER, "ServiceAccount")
    name = account["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name}]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == (
        "Role",
        of_kind(ROUTER, "Role")["metadata"]["name"],
    )
    assert pod(ROUTER)["spec"]["serviceAccountName"] == name
    assert account["automountServiceAccountToken"] is False
    container = engine(ROUTER)
    assert "--service-discovery-namespace=$(POD_NAMESPACE)" in container["args"]
    (variable,) = container["env"]
    assert (variable["name"], variable["valueFrom"]["fieldRef"]["fieldPath"]) == ("POD_NAMESPACE", "metadata.namespace")


@pytest.mark.parametrize("name", [*DEPLOYMENTS, ROUTER])
def test_no_pod_has_more_rights_than_it_needs(name: str) -> None:
    spec = pod(name)["spec"]
    assert spec["automountServiceAccountToken"] is (name == ROUTER)
    assert ("serviceAccountName" in spec) == (name == ROUTER)
    assert not spec.keys() & {"hostNetwork", "hostIPC", "hostPID"}
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(name):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert not own.keys() & {"privileged", "runAsUser", "runAsNonRoot", "seccompProfile"}
        resources = container["resources"]
        assert size(resources["requests"]["memory"]) <= size(resources["limits"]["memory"])
        if container["name"] in ("metrics", "router"):
            assert own["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("name", [*DEPLOYMENTS, ROUTER])
def test_pods_run_as_the_user_of_our_images(name: str) -> None:
    security = pod(name)["spec"]["securityContext"]
    for path in (ROOT / "docker").iterdir():
        *_, user = re.findall(r"^USER (.+)$", path.read_text(), re.MULTILINE)
        assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
        assert f"--uid {security['runAsUser']} " in path.read_text()


def test_the_memory_of_an_engine_has_room_for_its_shared_memory() -> None:
    for name in DEPLOYMENTS:
        (shm,) = (each["emptyDir"] for each in pod(name)["spec"]["volumes"] if each["name"] == "shm")
        assert size(shm["sizeLimit"]) < size(engine(name)["resources"]["requests"]["memory"])


def test_the_memory_of_the_router_has_room_for_all_bodies() -> None:
    container = engine(ROUTER)
    given = dict(
        word.removeprefix("--").split("=") for word in container["args"] if word.startswith("--") and "=" in word
    )
    requests = int(given["max-concurrent-requests"]) + int(given["queue-size"])
    bodies = COPIES * requests * int(given["max-payload-size"])
    assert bodies + size("512Mi") <= size(container["resources"]["limits"]["memory"])


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_sidecar_serves_the_metrics_of_its_engine(name: str) -> None:
    (sidecar,) = (each for each in pod(name)["spec"]["initContainers"] if each["name"] == "metrics")
    http = engine(name)["ports"][0]["containerPort"]
    (port,) = (each["containerPort"] for each in sidecar["ports"])
    assert sidecar["restartPolicy"] == "Always"  # else it would be one that must end before the engine starts
    assert sidecar["command"] == ["layerpush", "metrics"]
    assert sidecar["args"] == [f"--engine=http://127.0.0.1:{http}", "--host=0.0.0.0", f"--port={port}"]
    assert sidecar["image"].startswith("layerpush-proxy:")


@pytest.mark.parametrize("name", [*DEPLOYMENTS, ROUTER])
def test_our_programs_accept_their_arguments(name: str) -> None:
    for container in containers(name):
        words = [*container.get("command", ()), *container["args"]]
        if words[0] == "layerpush":
            check(Command(tuple(words), ()))


@pytest.mark.parametrize("path", sorted((ROOT / "docker").iterdir()), ids=lambda path: path.stem)
def test_a_dockerfile_names_only_files_and_extras_that_exist(path: Path) -> None:
    """No test builds it."""
    text = path.read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"/src/layerpush\[(\w+)\]", text):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    assert f"-f docker/{path.name} " in text


@pytest.mark.parametrize("path", sorted((ROOT / "docker").iterdir()), ids=lambda path: path.stem)
def test_a_base_image_needs_its_digest(path: Path) -> None:
    """It has no default: without it the build fails. The comment says how to look it up."""
    text = path.read_text()
    (base,) = re.findall(r"^ARG DIGEST\nFROM (\S+)@\$\{DIGEST\}$", text, re.MULTILINE)
    assert f"docker buildx imagetools inspect {base}\n" in text
    assert "--build-arg DIGEST=sha256:" in text
    assert text.count("FROM ") == 1
