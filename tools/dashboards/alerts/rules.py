"""The files that follow from the alerts: rules, tests of promtool, runbook."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from tools.dashboards.alerts import batches, members, serving, workers
from tools.dashboards.alerts.model import BEFORE_MIN, Alert

ALERTS: tuple[Alert, ...] = (
    *serving.ALERTS,
    *workers.ALERTS,
    *batches.ALERTS,
    *members.ALERTS,
)
GROUPS: Mapping[str, tuple[Alert, ...]] = {
    "kvmesh-requests": serving.ALERTS,
    "kvmesh-workers": workers.ALERTS,
    "kvmesh-batches": batches.ALERTS,
    "kvmesh-members": members.ALERTS,
}
RUNBOOK = "docs/runbook.md"
_SECTIONS = {
    "Requests": serving.ALERTS,
    "Workers, handoffs, index": workers.ALERTS,
    "Batches": batches.ALERTS,
    "Processes": members.ALERTS,
}
_GENERATED = "python -m tools.dashboards writes this file."
_RANGE = re.compile(r"\[\d+[smhd]\]")
_INTRODUCTION = (
    "# Runbook\n\nAn entry for each alert of"
    " [deploy/observability/alerts.yml](../deploy/observability/alerts.yml): what it means, what to"
    " look at, what to do. `meshctl doctor` comes first: it names most causes. Alerts of severity"
    " *page* mean that users are affected; those of severity *ticket* that they may be soon, or"
    " that the mesh is slower than it could be. Tasks such as upgrades are in"
    f" [operate/replace.md](operate/replace.md#tasks).\n\n<!-- {_GENERATED} -->\n"
)


# Any: YAML.
def rules_document(*, is_short: bool = False) -> dict[str, Any]:
    """Returns the rules of Prometheus. is_short: with windows of seconds, for a mesh that is broken
    on purpose."""
    groups = [
        {"name": name, "rules": [_rule(alert, is_short=is_short) for alert in alerts]}
        for name, alerts in GROUPS.items()
    ]
    return {"groups": groups}


def rules_file() -> str:
    return _as_yaml(rules_document())


def tests_file() -> str:
    """Returns the tests of promtool: each alert is silent, fires, and is silent again."""
    document = {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": "1m",
        "tests": [_test(alert) for alert in ALERTS],
    }
    return _as_yaml(document)


def runbook_file() -> str:
    """Returns the runbook."""
    parts = [_INTRODUCTION]
    for title, alerts in _SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += map(_entry, alerts)
    return "\n".join(parts)


def _rule(alert: Alert, *, is_short: bool) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "alert": alert.name,
        "expr": _RANGE.sub("[20s]", alert.expr) if is_short else alert.expr,
        "for": "2s" if is_short and alert.lasts != "0s" else alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.symptom, "runbook_url": f"{RUNBOOK}#{alert.anchor}"},
    }
    if alert.lasts == "0s":
        del rule["for"]
    return rule


def _test(alert: Alert) -> dict[str, Any]:
    example = alert.example
    expected = {
        "exp_labels": {"severity": alert.severity, **example.labels},
        "exp_annotations": {
            "summary": alert.symptom_of(example.labels),
            "runbook_url": f"{RUNBOOK}#{alert.anchor}",
        },
    }
    fault_end = BEFORE_MIN + example.fault_min - 1
    end = fault_end + example.after_min
    moments: list[tuple[int, list[dict[str, Any]]]] = [
        (BEFORE_MIN - 1, []),
        (fault_end, [expected]),
        (end, []),
    ]
    return {
        "name": alert.name,
        "interval": "1m",
        "input_series": [
            {"series": one.name, "values": one.values(example.fault_min, example.after_min)}
            for one in example.series
        ],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert.name, "exp_alerts": alerts}
            for minute, alerts in moments
        ],
    }


def _entry(alert: Alert) -> str:
    symptom = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"*\1*", alert.symptom)
    lines = [
        f"### {alert.name}\n",
        f"*{alert.severity}.* {symptom}.\n",
        f"**Meaning.** {alert.meaning}\n",
        "**Look at**\n",
        *_list(alert.look),
        "**Do**\n",
        *_list(alert.do),
    ]
    return "\n".join(lines)


def _list(items: Iterable[str]) -> list[str]:
    return [*(f"- {item}" for item in items), ""]


def _as_yaml(document: dict[str, Any]) -> str:
    text = yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True)
    return f"# {_GENERATED}\n{text}"
