"""Writes deploy/grafana/dashboards/kvmesh.json: python deploy/make_dashboard.py

The dashboard is code, so that panels are rows of a table and a test can check every query.
"""

from __future__ import annotations

import json
from pathlib import Path

OUT = Path(__file__).parent / "grafana/dashboards/kvmesh.json"
F = "kvmesh_frontend"


def quantile(share: float, metric: str) -> str:
    """A quantile of a histogram over all models."""
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket[1m])))"


# title, unit, [(legend, query)]
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Requests ended, per second",
        "reqps",
        [
            (
                "{{status}} {{error_type}}",
                f"sum by (status, error_type) (rate({F}_requests_total[1m]))",
            )
        ],
    ),
    (
        "Tokens generated, per second",
        "short",
        [("tokens/s", f"sum(rate({F}_output_tokens_total[1m]))")],
    ),
    (
        "Time to first token",
        "s",
        [
            (f"p{int(100 * q)}", quantile(q, f"{F}_time_to_first_token_seconds"))
            for q in (0.5, 0.9, 0.99)
        ],
    ),
    (
        "Gap between tokens",
        "s",
        [
            (f"p{int(100 * q)}", quantile(q, f"{F}_inter_token_latency_seconds"))
            for q in (0.5, 0.9, 0.99)
        ],
    ),
    (
        "Requests under way",
        "short",
        [
            ("in flight", f"sum({F}_inflight_requests)"),
            ("before the first token", f"sum({F}_queued_requests)"),
        ],
    ),
    (
        "Prompt tokens from the KV cache",
        "percentunit",
        [
            (
                "share",
                f"sum(rate({F}_cached_tokens_sum[1m]))"
                f" / sum(rate({F}_input_sequence_tokens_sum[1m]))",
            )
        ],
    ),
    (
        "Router: decisions, per second",
        "ops",
        [("{{outcome}}", "sum by (outcome) (rate(kvmesh_router_decisions_total[1m]))")],
    ),
    (
        "Router: time to decide",
        "s",
        [(f"p{int(100 * q)}", quantile(q, "kvmesh_router_decision_seconds")) for q in (0.5, 0.99)],
    ),
    (
        "Workers: requests",
        "short",
        [
            ("{{instance}} running", "kvmesh_worker_running_requests"),
            ("{{instance}} waiting", "kvmesh_worker_waiting_requests"),
        ],
    ),
    (
        "Workers: KV blocks in use",
        "percentunit",
        [("{{instance}}", "kvmesh_worker_kv_used_blocks / kvmesh_worker_kv_total_blocks")],
    ),
]


def dashboard() -> dict[str, object]:
    """The dashboard as Grafana reads it: two panels a row."""
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": {"type": "prometheus", "uid": "prometheus"},
            "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(65 + i), "expr": query, "legendFormat": legend}
                for i, (legend, query) in enumerate(targets)
            ],
        }
        for number, (title, unit, targets) in enumerate(PANELS)
    ]
    return {
        "uid": "kvmesh",
        "title": "KVMesh",
        "schemaVersion": 41,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": panels,
    }


if __name__ == "__main__":
    OUT.write_text(json.dumps(dashboard(), indent=1) + "\n")
