"""`layerpush files`."""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib.resources import files as resources
from importlib.resources.abc import Traversable
from typing import Annotated, NoReturn

import typer

RULE = "prometheus-rule.yaml"
POD_MONITOR = "kubernetes/pod-monitor.yaml"
DESCRIPTIONS = {
    "alerts.yml": "Alert rules for Prometheus: list the file under rule_files.",
    "grafana.json": "Dashboard for Grafana: import it and choose the data source.",
    RULE: "The alert rules as a PrometheusRule, for the Prometheus Operator.",
    "kubernetes": "Two P, two D, vLLM's router, Services and NetworkPolicies, all in one.",
    "kubernetes/config.yaml": "ConfigMap with the model.",
    "kubernetes/prefill.yaml": "Deployment of P.",
    "kubernetes/decode.yaml": "Deployment of D.",
    "kubernetes/router.yaml": "Deployment, Service and Role of vLLM's router.",
    "kubernetes/network-policy.yaml": "NetworkPolicies of P and D, and of the router.",
    POD_MONITOR: "PodMonitors of P and D, and of the router, for the Prometheus Operator.",
    "llm-d/decode.yaml": "D behind llm-d's sidecar, in the place of kubernetes/decode.yaml.",
}
WITH_ALERTS = ("alerts.yml", RULE)
MANIFESTS = [name for name in DESCRIPTIONS if name.startswith("kubernetes/") and name != POD_MONITOR]
"""In one: a cluster without the Prometheus Operator refuses a PodMonitor."""
_RULE_HEAD = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: layerpush
  labels: {app.kubernetes.io/name: layerpush}
spec:
"""


def with_runbooks(text: str, url: str) -> str:
    """Alert rules whose ``runbook_url`` is the alert's section of ``url``, the page docs/metrics.md wherever it is."""
    return re.sub(r"runbook: docs/metrics\.md(#\w+)", lambda found: f'runbook_url: "{url}{found[1]}"', text)


def text_of(name: str) -> str:
    """The text of one of ``DESCRIPTIONS``. Raises ``KeyError`` for another name."""
    if name not in DESCRIPTIONS:
        raise KeyError(name)
    if name == "kubernetes":
        return "---\n".join(map(text_of, MANIFESTS))
    if name == RULE:
        lines = text_of("alerts.yml").splitlines(keepends=True)
        return _RULE_HEAD + "".join(f"  {line}" if line.strip() else line for line in lines)
    found: Traversable = resources("layerpush.apps.files").joinpath(*name.split("/"))
    return found.read_text(encoding="utf-8")


def files(
    name: Annotated[str | None, typer.Argument(help="The file to print. Without it, the command lists all.")] = None,
    runbook_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of your copy of docs/metrics.md. Each alert then has a runbook_url: its section of that page.",
        ),
    ] = None,
) -> None:
    """Print a dashboard, alert rules or Kubernetes manifests, which are part of this package.

    Without NAME the command lists the files. With NAME it prints the file to standard output.

    Example:  layerpush files grafana.json > grafana.json

    Example:  layerpush files alerts.yml --runbook-url https://docs.example.org/layerpush/metrics/ > alerts.yml

    Example:  layerpush files kubernetes > layerpush.yaml; set image and model there; kubectl apply -f layerpush.yaml

    Exit status: 0, or 2 if there is no such file, or it has no alerts.
    """
    if name is None:
        for each, description in DESCRIPTIONS.items():
            typer.echo(f"{each:32}{description}")
        return
    if name not in DESCRIPTIONS:
        close = get_close_matches(name, DESCRIPTIONS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        _refuse(f"no file {name!r}; {hint}there are {', '.join(DESCRIPTIONS)}")
    text = text_of(name)
    if runbook_url is not None:
        if name not in WITH_ALERTS:
            _refuse(f"--runbook-url is for {' and '.join(WITH_ALERTS)}, not for {name}")
        if not re.fullmatch(r"https?://[^\s\"\\#]+", runbook_url):
            _refuse(f"--runbook-url must be the http address of a page, without #: {runbook_url!r}")
        text = with_runbooks(text, runbook_url)
    typer.echo(text, nl=False)


def _refuse(problem: str) -> NoReturn:
    typer.echo(f"layerpush files: {problem}", err=True)
    raise typer.Exit(2)
