"""Alerts on requests: not served, slow, refused, waiting."""

from __future__ import annotations

from tools.dashboards.alerts.model import Alert, Example, counter, gauge
from tools.dashboards.boards.overview import MESH_ERRORS

# Share of requests that may fail by a fault of the mesh.
ERROR_BUDGET = 0.001
_REQUESTS = "kvmesh_frontend_requests_total"


def _error_share(window: str) -> str:
    """Returns the share of requests in a window that failed by a fault of the mesh."""
    errors = f"sum(rate({_REQUESTS}{{{MESH_ERRORS}}}[{window}]))"
    return f"{errors} / (sum(rate({_REQUESTS}[{window}])) > 0)"


def _burn(name: str, factor: float, windows: tuple[str, str], lasts: str, fault_min: int) -> Alert:
    """Returns the alert on a rate at which the error budget is used up. windows: the short one ends
    the alert soon after the fault, the long one ignores short faults."""
    short, long = windows
    limit = factor * ERROR_BUDGET
    is_page = factor > 10
    return Alert(
        name,
        f"{_error_share(short)} > {limit:g} and {_error_share(long)} > {limit:g}",
        lasts,
        "page" if is_page else "ticket",
        f"Requests fail {factor:g} times as often as the error budget allows",
        f"More than {limit:.2%} of the requests of the last {short} and of the last {long} failed"
        f" by a fault of the mesh; the budget is {ERROR_BUDGET:.1%}. At this rate a budget of 30"
        f" days lasts {30 / factor:.2g} days.",
        (
            "The dashboard *frontend*, row *Requests*: failures by type.",
            "`worker_lost`: workers die; `overload`: capacity; `unavailable`: a role is missing;"
            " `internal`: the log of the frontend.",
            "`meshctl explain ID` of a request that failed.",
        ),
        ("Follow the alert that names the cause; if there is none, `meshctl doctor`.",),
        Example(
            (
                counter(f'{_REQUESTS}{{error_type="", status="success"}}', 600, 300),
                counter(f'{_REQUESTS}{{error_type="worker_lost", status="error"}}', 0, 300),
            ),
            {},
            fault_min=fault_min,
            after_min=60,
        ),
    )


ALERTS = (
    Alert(
        "ModelNotServed",
        "min by (model) (kvmesh_frontend_canary_success) == 0"
        " unless on (model) min by (model) (kvmesh_router_pool_asleep) == 1",
        "30s",
        "page",
        "{{ $labels.model }} is not served",
        "The canary of a frontend, a request through router and worker to one token, fails; or the"
        " model is configured and has no worker, unless routers let it sleep.",
        (
            "`canaries` in `/health` of the frontend: the stage that fails, and the reason.",
            "`kvmesh_frontend_canary_failures_total` by stage: all frontends, or one?",
            "[Stages](operate/failures.md#how-a-model-that-is-not-served-is-detected).",
        ),
        (
            "`prepare`: restart the frontend. `route`: see the routers, the queue, RoleAbsent.",
            "`worker`, `token`: restart the workers that `/ready` lists under `degraded`.",
        ),
        Example((gauge('kvmesh_frontend_canary_success{model="sim"}', 1, 0),), {"model": "sim"}),
    ),
    Alert(
        "CanaryOld",
        "max by (model) (kvmesh_frontend_canary_age_seconds) > 120",
        "1m",
        "ticket",
        "No request of {{ $labels.model }} was served for two minutes",
        "At one frontend at least, neither a canary nor a client's request of the model succeeded."
        " Together with ModelNotServed it states since when.",
        ("As for ModelNotServed.", "The log of the frontend: `canary_failed`."),
        ("As for ModelNotServed. If canaries do not run at all, restart the frontend.",),
        Example(
            (gauge('kvmesh_frontend_canary_age_seconds{model="sim"}', 5, 300),), {"model": "sim"}
        ),
    ),
    _burn("ErrorBudgetBurnsFast", 14.4, ("5m", "1h"), "1m", 20),
    _burn("ErrorBudgetBurnsSlowly", 6, ("30m", "6h"), "5m", 60),
    Alert(
        "FirstTokenSlow",
        "histogram_quantile(0.99, sum by (le, model)"
        " (rate(kvmesh_frontend_time_to_first_token_seconds_bucket[5m]))) > 5",
        "5m",
        "ticket",
        "p99 of the time to first token of {{ $labels.model }} is above 5 s",
        "Requests wait: for a worker, in the queue of a router or of a worker, or for a long"
        " prompt.",
        (
            "The dashboard *frontend*: the exemplars of the slowest requests open their traces.",
            "`meshctl trace ID`: which stage takes the time.",
            "The dashboards *routing* (queue) and *workers* (waiting requests).",
        ),
        ("Add workers of the role that waits; see QueueOld, KvFull, HitsDrift.",),
        Example(
            (
                counter(
                    'kvmesh_frontend_time_to_first_token_seconds_bucket{le="5.0", model="sim"}',
                    60,
                    0,
                ),
                counter(
                    'kvmesh_frontend_time_to_first_token_seconds_bucket{le="10.0", model="sim"}',
                    60,
                    60,
                ),
                counter(
                    'kvmesh_frontend_time_to_first_token_seconds_bucket{le="+Inf", model="sim"}',
                    60,
                    60,
                ),
            ),
            {"model": "sim"},
        ),
    ),
    Alert(
        "RequestsRefused",
        "sum by (model)"
        ' (rate(kvmesh_frontend_failures_total{error_type=~"overload|unavailable"}[5m]))'
        " / sum by (model) (rate(kvmesh_frontend_requests_total[5m])) > 0.05",
        "2m",
        "page",
        "More than 5 % of the requests of {{ $labels.model }} get 503",
        "The mesh has too little capacity, or lacks a role.",
        (
            "`kvmesh_router_queue_full_total`: the queue of the routers is full.",
            '`kvmesh_worker_requests_total{outcome="rejected"}`: workers refuse.',
            "RoleAbsent, KvFull, RequestsAwaitWorker.",
        ),
        (
            "Add workers, or raise the limit that is reached.",
            "Limits of tenants (`meshctl keys`) protect the others from one of them.",
        ),
        Example(
            (
                counter(
                    'kvmesh_frontend_failures_total{error_type="overload", model="sim"}', 0, 60
                ),
                counter('kvmesh_frontend_requests_total{model="sim"}', 600, 600),
            ),
            {"model": "sim"},
        ),
    ),
    Alert(
        "RequestsAwaitWorker",
        "max by (model) (kvmesh_frontend_model_awaiting_worker_requests) > 0",
        "30s",
        "page",
        "Requests of {{ $labels.model }} wait because no worker can serve them",
        "They wait for `--worker-wait-s`, then fail with 503.",
        ("`meshctl status`: workers of the model, their health and role.",),
        (
            "Start a worker of the model. For a model that scales to zero this alert is its start:"
            " silence it.",
        ),
        Example(
            (gauge('kvmesh_frontend_model_awaiting_worker_requests{model="sim"}', 0, 3),),
            {"model": "sim"},
        ),
    ),
    Alert(
        "QueueOld",
        "max by (instance) (kvmesh_router_queue_age_seconds) > 10",
        "30s",
        "ticket",
        "A request waits in the queue of {{ $labels.instance }} for more than 10 s",
        "Every worker that may compute the prompt is busy. After `--queue-wait-max-s` the request"
        " fails with 503.",
        (
            "The dashboard *routing*, row *Queue*.",
            "`meshctl top`: are all workers busy, or only those that a constraint permits (pins,"
            " taints, adapters)?",
        ),
        ("Add workers for prompts; or relax the constraint of the requests that wait.",),
        Example(
            (gauge('kvmesh_router_queue_age_seconds{instance="router-0"}', 0, 25),),
            {"instance": "router-0"},
        ),
    ),
    Alert(
        "QueueFull",
        "sum by (instance, limit) (increase(kvmesh_router_queue_full_total[5m])) > 0",
        "0s",
        "page",
        "{{ $labels.instance }} refuses requests: its queue is full ({{ $labels.limit }})",
        "More requests arrive than the mesh computes.",
        ("As for QueueOld.",),
        ("Add workers. A longer queue (`--queue-requests-max`) only delays the refusal.",),
        Example(
            (
                counter(
                    'kvmesh_router_queue_full_total{instance="router-0", limit="requests"}', 0, 5
                ),
            ),
            {"instance": "router-0", "limit": "requests"},
        ),
    ),
    Alert(
        "PlacementsWithoutRouter",
        "sum by (instance) (increase(kvmesh_frontend_unrouted_total[5m])) > 0",
        "1m",
        "ticket",
        "{{ $labels.instance }} places requests without a router",
        "No router answers it: requests are placed by the frontend's own load figures, without the"
        " caches; pairs of prefill and decode get 503.",
        ("`meshctl status`: routers.", "The log of the frontend: `router_lost`."),
        ("Start a router; run at least two.",),
        Example(
            (counter('kvmesh_frontend_unrouted_total{instance="frontend-0"}', 0, 5),),
            {"instance": "frontend-0"},
        ),
    ),
)
