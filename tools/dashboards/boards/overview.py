"""Is the mesh healthy, and if not, where to look next?"""

from __future__ import annotations

from tools.dashboards.model import Board, Panel, Query
from tools.dashboards.queries import any_of, of_instance, of_model, quantile, rate, ratio, total

_F = "kvmesh_frontend"
# Errors of the mesh, not of its clients.
MESH_ERRORS = 'error_type=~"internal|overload|response_timeout|unavailable|worker_lost"'
SERVICES = ("frontend", "router", "indexer", "worker")

HEALTH = (
    Panel(
        "Members",
        "short",
        (Query(f"max by (role) ({of_instance(f'{_F}_members')})", "{{role}}"),),
        "Registered members by role, as the frontends see them. A step down without a deployment is"
        " a lost process.",
    ),
    Panel(
        "Models served",
        "short",
        (Query(f"min by (model) ({of_model(f'{_F}_canary_success')})", "{{model}}"),),
        "1: the newest canary of the model was served, through router and worker to a token.",
    ),
    Panel(
        "Routable",
        "short",
        (
            Query(
                any_of(
                    *(
                        f"min by (instance) ({of_instance(f'kvmesh_{name}_routable')})"
                        for name in SERVICES
                    )
                ),
                "{{instance}}",
            ),
        ),
        "1: the peers of the process send it work.",
    ),
    Panel(
        "Registry reachable",
        "short",
        (Query(f"min by (instance) ({of_instance('kvmesh_registry_reachable')})", "{{instance}}"),),
        "0: the process serves with the last members that it read. Replace nothing meanwhile.",
    ),
    Panel(
        "Alerts",
        "short",
        (Query('sum by (alertname, severity) (ALERTS{alertstate="firing"})', "{{alertname}}"),),
        "Alerts that fire now.",
        empty="no alert fires in a healthy mesh",
    ),
    Panel(
        "Scrapes that fail",
        "short",
        (Query(f"count by (instance) ({of_instance('up')} == 0)", "{{instance}}"),),
        "Registered members whose metrics cannot be read.",
        empty="every member of a healthy mesh can be scraped",
    ),
)
TRAFFIC = (
    Panel(
        "Requests ended",
        "reqps",
        (
            Query(
                total(rate(of_model(f"{_F}_requests_total")), "status", "error_type"),
                "{{status}} {{error_type}}",
            ),
        ),
        "All outcomes, by status and type of error.",
    ),
    Panel(
        "Requests served",
        "percentunit",
        (
            Query(
                "1 - "
                + ratio(
                    f"({total(rate(of_model(f'{_F}_requests_total', MESH_ERRORS)))} or vector(0))",
                    total(rate(of_model(f"{_F}_requests_total"))),
                ),
                "share",
            ),
        ),
        "Share of requests without an error of the mesh; errors of clients do not count.",
    ),
    Panel(
        "Tokens generated",
        "short",
        (Query(total(rate(of_model(f"{_F}_output_tokens_total")), "model"), "{{model}}"),),
        "Output tokens a second.",
    ),
    Panel(
        "Time to first token",
        "s",
        tuple(
            Query(quantile(share, of_model(f"{_F}_time_to_first_token_seconds_bucket")), name)
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ),
        "From the start of a request to its first token.",
    ),
    Panel(
        "Requests in progress",
        "short",
        (
            Query(total(of_model(f"{_F}_inflight_requests")), "begun"),
            Query(total(of_model(f"{_F}_queued_requests")), "without a first token"),
            Query(total(of_instance("kvmesh_router_queue_requests")), "in a router's queue"),
        ),
        "If most requests have no first token, look at routing and workers.",
    ),
    Panel(
        "Prompt tokens from the KV cache",
        "percentunit",
        (
            Query(
                ratio(
                    total(rate(of_model(f"{_F}_cached_tokens_sum"))),
                    total(rate(of_model(f"{_F}_input_sequence_tokens_sum"))),
                ),
                "share",
            ),
        ),
        "Share of prompt tokens that no worker had to compute.",
    ),
)

BOARD = Board(
    "overview",
    "KVMesh: overview",
    "Health and traffic of the whole mesh.",
    {"Health": HEALTH, "Traffic": TRAFFIC},
)
