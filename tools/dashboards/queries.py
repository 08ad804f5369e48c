"""Parts of PromQL expressions.

Variables of the dashboards are regular expressions: `$model`, `$role` and `$instance`. Metrics with
the label `model` are selected by it. Those of workers get role and model from
`kvmesh_instance_info`, so that they need no labels from the configuration of Prometheus.
"""

from __future__ import annotations

RANGE = "$__rate_interval"
# Several processes of one frontend have one target with an info each.
_INFO = (
    "max by (job, instance, role, model)"
    ' (kvmesh_instance_info{role=~"$role", model=~"$model", instance=~"$instance"})'
)


def of_model(metric: str, matchers: str = "") -> str:
    """Returns the series of the chosen models, of a metric with the label `model`."""
    return _select(metric, 'model=~"$model"', 'instance=~"$instance"', matchers)


def of_instance(metric: str, matchers: str = "") -> str:
    """Returns the series of the chosen processes."""
    return _select(metric, 'instance=~"$instance"', matchers)


def of_worker(expr: str) -> str:
    """Returns an expression of workers, of the chosen roles and models, with these labels."""
    return f"{expr} * on (job, instance) group_left (role, model) {_INFO}"


def rate(selector: str) -> str:
    """Returns the increase a second."""
    return f"rate({selector}[{RANGE}])"


def total(expr: str, *by: str) -> str:
    """Returns the sum over all labels but `by`."""
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def quantile(share: float, selector: str, *by: str) -> str:
    """Returns a quantile of a histogram. selector: of its buckets."""
    return f"histogram_quantile({share}, {total(rate(selector), 'le', *by)})"


def ratio(part: str, whole: str) -> str:
    """Returns a share; no series without a whole."""
    return f"{part} / ({whole} > 0)"


def any_of(*expressions: str) -> str:
    """Returns the series of all expressions."""
    return " or ".join(expressions)


def _select(metric: str, *matchers: str) -> str:
    return f"{metric}{{{', '.join(one for one in matchers if one)}}}"
