"""The dashboard, the alert rules and the page name the metrics of a scrape, and all of them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from layerpush.telemetry.metrics.catalog import CATALOG, EXPOSED, PUSHES, RANKS
from layerpush.telemetry.metrics.metric_delta import MetricDelta
from layerpush.telemetry.metrics.summary import summary
from scripts.docgen import dashboard
from tests import promql
from tests.metrics_front_end import FrontEnd
from tests.metrics_named import ALERTS, DASHBOARD, expressions, unknown_names
from tests.metrics_scrape import Scrape
from tests.quotes import package
from tests.support.scripts import made_by

GRAFANA_UNITS = {"Bps", "bytes", "ops", "percentunit", "reqps", "s", "short", "wps"}
VLLMS_SUFFIX = re.compile(r"_(bucket|count|sum)$")
VLLMS_HISTOGRAM = (("_bucket", ', le="+Inf"'), ("_bucket", ', le="1.0"'), ("_count", ""), ("_sum", ""))
PAGE = Path(__file__).parents[2] / "docs/metrics.md"


@pytest.fixture
def scrape() -> Iterator[Scrape]:
    FrontEnd()
    yield Scrape()
    FrontEnd.close()


def documents() -> dict[str, Any]:
    return {"dashboard": json.loads(DASHBOARD.read_text()), "alerts": yaml.safe_load(ALERTS.read_text())}


def rules() -> list[dict[str, Any]]:
    return [rule for group in documents()["alerts"]["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("name", ["dashboard", "alerts"])
def test_dashboard_and_alert_metrics_are_scraped(scrape: Scrape, name: str) -> None:
    wanted = list(expressions(documents()[name]))
    assert len(wanted) > 10
    vllms = (package("vllm") / "v1/metrics/loggers.py").read_text()
    missing = [name for name in unknown_names(wanted, scrape) if f'"{VLLMS_SUFFIX.sub("", name)}"' not in vllms]
    assert missing == []


def shown() -> list[str]:
    """The expressions of all panels."""
    return [target["expr"] for panel in documents()["dashboard"]["panels"] for target in panel.get("targets", ())]


def evaluated(tmp_path: Path, scrape: Scrape, steps: str, expected: Mapping[str, float]) -> str:
    """promtool's complaint about expressions whose value is another one ten minutes after all series began.

    ``steps`` is a series in promtool's notation.
    """
    series = [
        f"{sample.name}{{{','.join(f'{label}={json.dumps(value)}' for label, value in labels.items())}}}"
        for sample in scrape.samples
        for labels in [sample.labels | {"instance": "one", "job": "vllm"}]
        if not sample.name.endswith("_created")
    ]
    labels = 'instance="one", job="vllm", model_name="m", engine="0"'
    series += [f"{name}{{{labels}}}" for name in dashboard.VLLMS]
    series += [f"{dashboard.TTFT}{part}{{{labels}{le}}}" for part, le in VLLMS_HISTOGRAM]
    checks = [
        {"expr": expression, "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": value}]}
        for expression, value in expected.items()
    ]
    test = {"interval": "15s", "input_series": [{"series": each, "values": steps} for each in series]}
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"tests": [test | {"promql_expr_test": checks}]}))
    promtool = made_by("prometheus") / "usr/bin/promtool"
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def for_promtool(expression: str) -> str:
    return re.sub(r'"\$\w+"', '".*"', expression.replace("$__rate_interval", "1m"))


def test_every_panel_has_data_in_a_quiet_hour(scrape: Scrape, tmp_path: Path) -> None:
    """NaN is no data: no comparison with it holds."""
    expected = {f"count(({for_promtool(each)}) >= 0) > bool 0": 1.0 for each in shown()}
    assert len(expected) > 40
    assert evaluated(tmp_path, scrape, "7+0x60", expected) == ""


def test_panels_show_shares_and_means_under_load(scrape: Scrape, tmp_path: Path) -> None:
    """All series grow alike: one of four outcomes, and a mean of 1. All buckets are equal: the first one has all."""
    share = dashboard.share(PUSHES, "layerwise", dashboard.COMPLETED)
    first_bucket = EXPOSED.buckets[0]
    expected = {share: 0.25, dashboard.mean(EXPOSED): 1.0, dashboard.quantiles(EXPOSED)["p50"]: first_bucket / 2}
    wanted = {for_promtool(expression): value for expression, value in expected.items()}
    assert evaluated(tmp_path, scrape, "0+1x60", wanted) == ""


def test_no_alert_fires_in_a_quiet_hour(scrape: Scrape, tmp_path: Path) -> None:
    expected = {f"count({rule['expr']}) or vector(0)": 0.0 for rule in rules() if "parked_blocks" not in rule["expr"]}
    assert evaluated(tmp_path, scrape, "7+0x60", expected) == ""


@pytest.mark.parametrize(
    ("expression", "missing"),
    [
        ("rate(vllm:layerpush_pushed_total[5m])", "vllm:layerpush_pushed_total"),
        ("vllm:layerpush_exposed_seconds", "vllm:layerpush_exposed_seconds"),
        ('vllm:layerpush_pushes_total{outcome="lost"}', 'vllm:layerpush_pushes_total{outcome="lost"}'),
        ('vllm:layerpush_loads_total{outcome=~"loaded|lost"}', 'vllm:layerpush_loads_total{outcome="lost"}'),
        ('vllm:layerpush_pushes_total{reason="engine"}', "vllm:layerpush_pushes_total{reason}"),
        ('vllm:layerpush_writer_lag_seconds_bucket{le="4.0"}', 'vllm:layerpush_writer_lag_seconds_bucket{le="4.0"}'),
        ("sum by (outcomes) (vllm:layerpush_pushes_total)", "outcomes"),
    ],
)
def test_the_check_finds_unknown_metrics_and_labels(scrape: Scrape, expression: str, missing: str) -> None:
    assert unknown_names([expression], scrape) == [missing]


def test_every_metric_is_on_the_dashboard() -> None:
    text = " ".join(expressions(documents()["dashboard"]))
    assert [metric.key for metric in CATALOG if metric.name not in text] == []


def test_the_dashboard_is_up_to_date() -> None:
    assert DASHBOARD.read_text() == dashboard.render(), "run scripts/pages"


def test_panels_do_not_overlap_and_have_unique_ids() -> None:
    panels = documents()["dashboard"]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)


def test_panels_match_grafanas_schema() -> None:
    board = documents()["dashboard"]
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(board))) - {"__rate_interval", "__all"}
    assert used == set(variables)
    for panel in board["panels"]:
        assert panel["type"] in ("row", "timeseries")
        if panel["type"] == "timeseries":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["fieldConfig"]["defaults"]["unit"] in GRAFANA_UNITS
            letters = [target["refId"] for target in panel["targets"]]
            assert letters == sorted(set(letters)) != []
            assert all(target["legendFormat"] for target in panel["targets"])


def test_panels_filter_by_all_variables_and_variables_by_earlier_ones() -> None:
    board = documents()["dashboard"]
    labels = list(dashboard.VARIABLES)
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            for rest in re.split(r"vllm:\w+", target["expr"])[1:]:
                assert rest.startswith("{" + dashboard.HERE), target["expr"]
    queries = [each for each in board["templating"]["list"] if each["type"] == "query"]
    assert [each["name"] for each in queries] == labels
    for number, query in enumerate(queries):
        assert re.findall(r"\$(\w+)", query["definition"]) == labels[:number]
        assert (query["includeAll"], query["allValue"]) == (True, ".*"), "a scrape may lack the label"


def test_expressions_are_promql() -> None:
    wanted = [text for document in documents().values() for text in expressions(document)]
    checked = [text for text in wanted if not text.startswith("label_values(")]
    assert len(checked) > 40
    for text in checked:
        promql.check(text)
    assert len(wanted) - len(checked) == 2 * len(dashboard.VARIABLES), "their queries are Grafana's own language"


@pytest.mark.parametrize(
    "expression",
    [
        "sum(rate(a_total[5m])",
        "rate(a[5m])",
        "a_total > 1",
        "a[5m]",
        "histogram_quantile(0.9, sum by (x) (rate(a_bucket[5m])))",
        "sum by (x) (a) / sum by (y) (a)",
    ],
)
def test_the_check_rejects_expressions_with_bad_syntax_or_no_match(expression: str) -> None:
    with pytest.raises(promql.PromqlError):
        promql.check(expression)


def test_every_alert_links_to_its_section_of_the_page() -> None:
    named = re.findall(r"^### (Layerpush\w+)$", PAGE.read_text(), re.MULTILINE)
    assert named == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"docs/metrics.md#{rule['alert'].lower()}"


def test_rules_are_valid_and_have_severity_and_engine_labels() -> None:
    for group in documents()["alerts"]["groups"]:
        assert set(group) == {"name", "rules"}
    for rule in rules():
        assert set(rule) | {"for"} == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        summary_text = rule["annotations"]["summary"]
        for template in re.findall(r"\{\{ (.*?) \}\}", summary_text):
            assert re.fullmatch(r"\$labels\.\w+|\$value( \| humanize(Percentage|Duration)?)?", template)
        for names in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            assert {*dashboard.VARIABLES, "job"} <= set(names.split(", ")), rule["alert"]
        kept = {name for names in re.findall(r"by \(([^)]*)\)", rule["expr"]) for name in names.split(", ")}
        assert {"instance"} <= set(re.findall(r"\$labels\.(\w+)", summary_text)) <= kept, rule["alert"]


def test_the_page_quotes_the_current_log_line() -> None:
    (quoted,) = re.findall(r"^KV Transfer metrics: (.*), \.\.\.$", PAGE.read_text(), re.MULTILINE)
    delta = MetricDelta()
    delta.count(PUSHES, "layerwise")
    assert re.findall(r"([^,=]+)=", quoted.replace(", ", ","))[:6] == list(summary(delta))[:6]


def test_the_page_names_the_metric_for_the_number_of_ranks() -> None:
    assert RANKS.exposed_name in PAGE.read_text()
