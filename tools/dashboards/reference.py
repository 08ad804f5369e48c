"""docs/metrics.md: every metric of every service."""

from __future__ import annotations

from collections.abc import Sequence

from tools.dashboards.catalog import SERVICES, MetricInfo

_INTRODUCTION = (
    "# Metrics\n\nEach process exposes these on its metrics port (`--metrics-port`; a frontend"
    " without one on its HTTP port, `/metrics`). Scrape configuration, dashboards and alerts:"
    " [operate/metrics.md](operate/metrics.md). Labels other than those of the table come"
    " from the scrape: `instance` is the stable name of the process, and `kvmesh_instance_info`"
    " joins it with role and model. Prefixes of frontends are those of the default"
    " `--metrics-prefix`. Clients that accept OpenMetrics also get `_created` samples, and"
    " exemplars (trace ids) of the time to first token and of the duration.\n\n"
    "<!-- python -m tools.dashboards writes this file. -->\n"
)


def reference_file(metrics: Sequence[MetricInfo]) -> str:
    """Returns the page: first what all services have, then each service."""
    parts = [_INTRODUCTION, _section("All services", metrics, SERVICES)]
    rest = [metric for metric in metrics if metric.services != SERVICES]
    shared = sorted({one.services for one in rest if len(one.services) > 1})
    parts += [_section(", ".join(services).capitalize(), rest, services) for services in shared]
    parts += [_section(name.capitalize(), rest, (name,)) for name in SERVICES]
    return "\n".join(filter(None, parts))


def _section(title: str, metrics: Sequence[MetricInfo], services: tuple[str, ...]) -> str:
    """Returns "" if these services have no metrics of their own."""
    rows = [_row(metric) for metric in metrics if metric.services == services]
    if not rows:
        return ""
    head = "| metric | type | labels | unit | meaning |\n|---|---|---|---|---|"
    return "\n".join([f"## {title}\n", head, *rows, ""])


def _row(metric: MetricInfo) -> str:
    labels = ", ".join(f"`{name}`" for name in metric.labels) or "-"
    text = metric.help.replace("|", "\\|")
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit or '-'} | {text} |"
