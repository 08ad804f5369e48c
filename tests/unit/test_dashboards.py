"""Dashboards, alerts, runbook and reference: current, and true to the metrics of the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.dashboards import __main__ as dashboards_check
from tools.dashboards.alerts.rules import ALERTS, RUNBOOK
from tools.dashboards.catalog import MetricInfo, catalog
from tools.dashboards.files import BOARDS, FOLDER, ROOT, generated_files
from tools.dashboards.grafana import VARIABLES
from tools.dashboards.promql import names_of, substitute

# Of Prometheus itself, with labels that they have.
OF_PROMETHEUS = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity"}}
# Of every series, from the scrape.
OF_TARGETS = {"job", "instance"}


@cache
def metrics() -> tuple[MetricInfo, ...]:
    return tuple(catalog())


def queries() -> Iterator[tuple[str, str]]:
    """Yields the name and the expression of every query and alert."""
    for board in BOARDS:
        for panel in board.panels:
            for query in panel.queries:
                yield f"{board.name}: {panel.title}", substitute(query.expr)
    for alert in ALERTS:
        yield f"alert {alert.name}", alert.expr


@pytest.mark.slow
def test_the_generated_files_are_current() -> None:
    for path, content in generated_files().items():
        assert path.exists(), f"{path}: make dashboards"
        assert path.read_text() == content, f"{path}: make dashboards"
    folder = FOLDER / "grafana" / "dashboards"
    assert {path.stem for path in folder.iterdir()} == {board.name for board in BOARDS}


@pytest.mark.slow
def test_every_query_names_metrics_and_labels_of_the_code() -> None:
    samples = {name: labels for one in metrics() for name, labels in one.samples.items()}
    samples |= {name: frozenset(labels) for name, labels in OF_PROMETHEUS.items()}
    for place, expr in queries():
        names = names_of(expr)
        assert names.selectors, place
        known = set(OF_TARGETS)
        for metric, matched in names.selectors.items():
            assert metric in samples, f"{place}: no service has {metric}"
            unknown = matched - samples[metric] - OF_TARGETS
            assert not unknown, f"{place}: {metric} has no label {unknown}"
            known |= samples[metric]
        assert names.groupings <= known, f"{place}: no metric has {names.groupings - known}"


def test_titles_are_unique_and_every_panel_is_described() -> None:
    assert len({board.name for board in BOARDS}) == len(BOARDS) >= 7
    for board in BOARDS:
        titles = [panel.title for panel in board.panels]
        assert len(set(titles)) == len(titles), board.name
        assert all(panel.description.endswith(".") for panel in board.panels), board.name
        assert all(panel.queries for panel in board.panels)
    assert [name for name, *_ in VARIABLES] == ["model", "role", "instance"]
    exemplars = [q for board in BOARDS for p in board.panels for q in p.queries if q.exemplars]
    assert exemplars


def test_every_alert_has_a_runbook_entry_under_its_anchor() -> None:
    headings = re.findall(r"^### (.+)$", (ROOT / RUNBOOK).read_text(), re.M)
    anchors = [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]
    assert len(set(anchors)) == len(anchors)
    assert {alert.anchor for alert in ALERTS} == set(anchors)
    assert len(ALERTS) >= 15
    for alert in ALERTS:
        assert alert.meaning, alert.name
        assert alert.look, alert.name
        assert alert.do, alert.name


def test_the_labels_of_an_alert_are_in_its_example() -> None:
    for alert in ALERTS:
        used = set(re.findall(r"\$labels\.(\w+)", alert.symptom))
        assert used <= alert.example.labels.keys(), alert.name


@pytest.mark.slow
def test_promtool_accepts_the_rules_and_each_alert_fires_and_resolves() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus; make dashboards-check requires it")
    for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run(
            [promtool, *command], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_sleeping_model_does_not_page_and_a_waking_one_does(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt-get install prometheus; make dashboards-check requires it")
    asleep = 'kvmesh_router_pool_asleep{model="sim",role="decode"}'
    series = {'kvmesh_frontend_canary_success{model="sim"}': "0x20", asleep: "1x10 0x10"}
    annotations = {"summary": "sim is not served", "runbook_url": "docs/runbook.md#modelnotserved"}
    page = {"exp_labels": {"severity": "page", "model": "sim"}, "exp_annotations": annotations}
    checks = [
        {"eval_time": time, "alertname": "ModelNotServed", "exp_alerts": [page] if fires else []}
        for time, fires in (("9m", False), ("18m", True))
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": inputs, "alert_rule_test": checks}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(FOLDER / "alerts.yml")], "tests": [test]}))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_query_with_a_wrong_metric_or_label_is_found() -> None:
    names = names_of('sum by (model) (rate(kvmesh_x_total{role=~"a.*"}[1m])) / on (job) up > 0')
    assert names.selectors == {"kvmesh_x_total": {"role"}, "up": set()}
    assert names.groupings == {"model", "job"}
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        names_of("sum by (model (up)")


def test_without_prometheus_the_check_fails_and_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.dashboards.prometheus.shutil.which", lambda _: None)
    monkeypatch.setattr("sys.argv", ["dashboards"])
    assert dashboards_check.main() == 1
    *_, failure, _, sums = capsys.readouterr().out.splitlines()
    assert failure.endswith(
        "prometheus, promtool not found; as root:"
        " apt-get install -y --no-install-recommends prometheus"
    )
    assert json.loads(sums)["failed"] == 1
