"""Rules, alerts and dashboards: their syntax, their tests, and the metrics that they name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import trustme
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse
from support import models
from support.models import ROOT
from support.processes import eventually, running
from support.prometheus import PROMTOOL, RULES, alerts, free_port, rules, scaled

from iskander.client import Tls
from iskander.gateway.auth.tokens import add_token
from iskander.gateway.telemetry.metrics.exposition import GPU_LABELS, GPU_METRICS

DASHBOARDS = ROOT / "configs" / "grafana"
RUNBOOK = ROOT / "docs" / "alarms.md"
ALARM_TESTS = Path(__file__).with_name("test_alarms.py")
NAMES = re.compile(r"(?<![\w:])(?:\w+:)?(?:iskander|nv)_\w+(?::\w+)?|\bup\b|\bALERTS\b")
SYNTHETIC = {"up", "ALERTS"}
"""Series of Prometheus itself."""
LABELS = {"job", "instance", "process", "le", "alertname", "alertstate"}
"""Labels that Prometheus, the merged page and histograms add."""

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="needs `promtool`: apt-get install prometheus"
)


def promtool(*arguments: str, page: str | None = None) -> str:
    """The output of promtool, which must succeed."""
    done = subprocess.run(
        [str(PROMTOOL), *arguments],
        input=page,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a gateway with tokens, TLS and the names of Triton, after some requests."""
    folder = tmp_path_factory.mktemp("page")
    token = add_token(folder / "tokens.toml", "scorer", ("*",))
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "chain.pem"))
    authority.cert_pem.write_to_path(str(folder / "roots.pem"))
    address = f"127.0.0.1:{free_port()}"
    with running(
        folder,
        [{"name": "ids", "path": str(models.row_ids(folder / "ids"))}],
        server={"processes": request.param},
        workers={"groups": ["0"], "count": 1},
        admin={"address": address, "triton_metrics": True},
        access={"tokens": "tokens.toml"},
        tls={"certificate": str(folder / "chain.pem")},
        token=token,
        secrecy=Tls(roots=folder / "roots.pem"),
    ) as gateway:

        def score() -> bool:
            with gateway.client() as client:
                client.score("ids", pa.record_batch({"x": pa.array([1, 2], pa.int64())}))
            return all(
                re.search(rf"^iskander_cost_base_seconds{{.*process=\"{index}\"", read(), re.M)
                for index in range(request.param if request.param > 1 else 0)
            )

        def read() -> str:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
                text: str = response.read().decode()
                return text

        eventually(score, what="requests to every process")
        yield eventually(lambda: 'code="OK"' in (text := read()) and text, what="ended calls")


@needs_promtool
def test_page_follows_the_conventions(page: str) -> None:
    """Triton's names do not."""
    own = re.sub(r"^(# \w+ )?nv_.*\n", "", page, flags=re.MULTILINE)

    assert promtool("check", "metrics", page=own) == ""


def test_page_has_triton_names_of_each_model(page: str) -> None:
    samples = [sample for family in parse(page) for sample in family.samples]
    found = {sample.name: sample for sample in samples if sample.name.startswith("nv_")}

    assert found["nv_inference_request_success"].labels.items() >= {
        ("model", "ids"), ("version", "1")
    }  # fmt: skip
    count = sum(s.value for s in samples if s.name == "nv_inference_count")
    assert count == 2 * sum(s.value for s in samples if s.name == "nv_inference_request_success")


@needs_promtool
@pytest.mark.parametrize("check", ["check config", "check rules", "test rules"])
def test_rules_are_valid_and_pass_their_unit_tests(check: str, tmp_path: Path) -> None:
    files = {
        "check config": ["prometheus.yml"],
        "check rules": ["objectives.yml", "recording.yml", "alerts.yml"],
        "test rules": ["tests.yml"],
    }[check]
    promtool(*check.split(), *(str(RULES / name) for name in files))


@needs_promtool
def test_scaled_rules_are_valid(tmp_path: Path) -> None:
    """The live tests use them."""
    for name in ("recording.yml", "alerts.yml"):
        text = scaled((RULES / name).read_text())
        assert not re.search(r"\[\d+h\]|for: \d+m", text)
        (tmp_path / name).write_text(text)
        promtool("check", "rules", str(tmp_path / name))


def test_every_alert_has_a_unit_test_that_fires_and_one_that_does_not() -> None:
    tests = yaml.safe_load((RULES / "tests.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    names = {rule["alert"] for rule in alerts()}

    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_every_alert_has_a_live_test() -> None:
    named = set(re.findall(r'"(Iskander[A-Z]\w+)"', ALARM_TESTS.read_text()))

    assert {rule["alert"] for rule in alerts()} == named


def test_every_alert_has_a_paragraph_in_the_runbook_that_begins_with_a_command() -> None:
    section = RUNBOOK.read_text().partition("\n## Alarms\n")[2].partition("\n## ")[0]
    paragraphs = dict(re.findall(r"^### (\w+)\n\n(.+?)(?=\n### |\Z)", section, re.M | re.S))

    assert list(paragraphs) == [rule["alert"] for rule in alerts()]
    for rule in alerts():
        anchor = f"docs/{RUNBOOK.name}#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == anchor
        assert paragraphs[rule["alert"]].startswith("`"), rule["alert"]


def expressions() -> list[tuple[str, str]]:
    """Every query of the rules and dashboards, with its origin."""
    found = [(str(rule.get("alert", rule.get("record"))), rule["expr"]) for rule in rules()]
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            found += [(f"{name}: {panel['title']}", each["expr"]) for each in panel["targets"]]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                series = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])
                assert series
                found.append((f"{name}: variable {variable['name']}", series[1]))
    return found


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.iterdir())}


def known_labels(page: str) -> dict[str, set[str]]:
    """Labels of each series: of the page, and of the recording rules."""
    known: dict[str, set[str]] = {name: set() for name in SYNTHETIC}
    for family in parse(page):
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
        # No worker, step or failed reload may exist in this gateway.
        known.setdefault(family.name, set())
    for rule in rules():
        if "record" in rule:
            grouped = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
            labels = {label.strip() for each in grouped for label in each.split(",")}
            inner = [known.get(name, set()) for name in NAMES.findall(rule["expr"])]
            known[rule["record"]] = labels.union(rule.get("labels", ()), *inner)
    return known


def test_queries_name_only_existing_metrics_and_labels(page: str) -> None:
    known = known_labels(page)
    # Samples of pipelines and of several processes.
    known.setdefault("iskander_step_seconds_bucket", set()).update({"model", "version", "step"})
    known.setdefault("iskander_process_up", {"process"})
    # Samples of models with observed requests.
    known["iskander_drift_columns"] = {"model", "version", "side", "state"}
    known["iskander_drift_severity"] = {"model", "version", "side", "column"}
    # Samples of GPUs.
    known |= {metric.name: {*GPU_LABELS, *metric.labels} for metric in GPU_METRICS}
    for origin, expression in expressions():
        names = NAMES.findall(expression)
        assert names or expression.startswith("vector("), origin
        assert [name for name in names if name not in known] == [], origin
        everywhere = LABELS.union(*(known[name] for name in names))
        for name, selector in re.findall(r"([\w:]+)\{([^}]*)\}", expression):
            labels = set(re.findall(r"(\w+)(?:=|!)", re.sub(r'"[^"]*"', '""', selector)))
            assert labels <= LABELS | known[name], (origin, name)
        for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            labels = {label.strip() for label in group.split(",")}
            assert labels <= everywhere, (origin, labels - everywhere)


@needs_promtool
def test_queries_of_dashboards_are_valid(tmp_path: Path) -> None:
    variables = {"$job": "iskander", "$instance": ".+", "$model": ".+", "$__rate_interval": "1m"}
    lines = ["groups:", "  - name: queries", "    rules:"]
    for index, (_, expression) in enumerate(expressions()):
        query = re.sub(r"\$\w+", lambda found: variables[found[0]], expression)
        lines += [f"      - record: query_{index}", f"        expr: {json.dumps(query)}"]
    (tmp_path / "queries.yml").write_text("\n".join(lines))

    promtool("check", "rules", str(tmp_path / "queries.yml"))


def test_dashboards_are_those_of_the_script() -> None:
    script = str(ROOT / "scripts" / "gen_dashboards.py")
    done = subprocess.run(
        [sys.executable, script, "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", list(dashboards()))
def test_dashboard_has_the_shape_that_grafana_imports(name: str) -> None:
    """There is no Grafana to import it."""
    dashboard = dashboards()[name]
    variables = dashboard["templating"]["list"]

    assert dashboard["uid"] == f"iskander-{name.removesuffix('.json')}"
    assert "id" not in dashboard and dashboard["schemaVersion"] >= 36
    assert [each["name"] for each in variables] == ["datasource", "job", "instance", "model"]
    assert variables[0]["type"] == "datasource" and variables[0]["query"] == "prometheus"
    panels = dashboard["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24 and not own & cells
        cells |= own
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
