"""`layerpush files`."""

from __future__ import annotations

from importlib.resources import files as resources
from importlib.resources.abc import Traversable
from typing import Annotated

import typer

RULE = "prometheus-rule.yaml"
DESCRIPTIONS = {
    "alerts.yml": "Alert rules for Prometheus: list the file under rule_files.",
    "grafana.json": "Dashboard for Grafana: import it and choose the data source.",
    RULE: "The alert rules as a PrometheusRule, for the Prometheus Operator.",
    "kubernetes": "Two P, two D, proxy, Services, a NetworkPolicy and a PodMonitor, all in one.",
    "kubernetes/config.yaml": "ConfigMap with the model.",
    "kubernetes/prefill.yaml": "Deployment and headless Service of P.",
    "kubernetes/decode.yaml": "Deployment and headless Service of D.",
    "kubernetes/proxy.yaml": "Deployment and Service of the proxy.",
    "kubernetes/network-policy.yaml": "Only P, D, the proxy and Prometheus reach an engine.",
    "kubernetes/pod-monitor.yaml": "PodMonitor of P, D and proxy, for the Prometheus Operator.",
    "llm-d/decode.yaml": "D behind llm-d's sidecar, in the place of kubernetes/decode.yaml.",
}
MANIFESTS = [name for name in DESCRIPTIONS if name.startswith("kubernetes/")]
_RULE_HEAD = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: layerpush
  labels: {app.kubernetes.io/name: layerpush}
spec:
"""


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
) -> None:
    """Print a dashboard, alert rules or Kubernetes manifests, which are part of this package.

    Without NAME the command lists the files. With NAME it prints the file to standard output.

    Example:  layerpush files grafana.json > grafana.json

    Example:  layerpush files kubernetes > layerpush.yaml; set image and model there; kubectl apply -f layerpush.yaml

    Exit status: 0, or 2 if there is no such file.
    """
    if name is None:
        for each, description in DESCRIPTIONS.items():
            typer.echo(f"{each:32}{description}")
        return
    try:
        typer.echo(text_of(name), nl=False)
    except KeyError:
        typer.echo(f"layerpush files: no file {name!r}; there are {', '.join(DESCRIPTIONS)}", err=True)
        raise typer.Exit(2) from None
