"""How routers place requests, and whether their view of the caches is right."""

from __future__ import annotations

from tools.dashboards.model import Board, Panel, Query
from tools.dashboards.queries import of_instance, of_model, quantile, rate, ratio, total

_R, _F = "kvmesh_router", "kvmesh_frontend"


def _count(title: str, metric: str, label: str, text: str) -> Panel:
    """Returns the panel of a counter by one label."""
    expr = total(rate(of_instance(f"{_R}_{metric}_total")), label)
    return Panel(title, "ops", (Query(expr, f"{{{{{label}}}}}"),), text)


def _value(title: str, metric: str, text: str, unit: str = "short") -> Panel:
    """Returns the panel of a gauge of each router."""
    expr = f"max by (instance) ({of_instance(f'{_R}_{metric}')})"
    return Panel(title, unit, (Query(expr, "{{instance}}"),), text)


DECISIONS = (
    _count("Decisions", "decisions", "outcome", "By outcome: placed, or the kind of the error."),
    Panel(
        "Time to decide",
        "s",
        tuple(
            Query(quantile(share, of_instance(f"{_R}_decision_seconds_bucket")), name)
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ),
        "Without network and queue.",
    ),
    Panel(
        "Time to decide, by stage",
        "s",
        (
            Query(
                quantile(0.99, of_instance(f"{_R}_overhead_seconds_bucket"), "stage"),
                "p99 {{stage}}",
            ),
        ),
        "Of placed requests.",
    ),
    _value("Workers", "workers", "That serve a model, as each router sees them."),
    _value("Bookings", "bookings", "Including those of other routers."),
    _value("Load reports that are too old", "stale_reports", "Ranks whose load is unknown."),
)
QUEUE = (
    _value("Requests in the queue", "queue_requests", "They wait for capacity for their prompt."),
    _value("Age of the oldest request", "queue_age_seconds", "In the queue now.", "s"),
    Panel(
        "Time in the queue",
        "s",
        tuple(
            Query(quantile(share, of_instance(f"{_R}_queue_wait_seconds_bucket")), name)
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ),
        "Of requests that left it, all outcomes.",
    ),
    _count("Refused: queue full", "queue_full", "limit", "By the limit that was reached."),
)
CACHE = (
    Panel(
        "Blocks found in the index",
        "percentunit",
        (
            Query(
                ratio(
                    total(rate(of_instance(f"{_R}_overlap_blocks_total"))),
                    total(rate(of_instance(f"{_R}_prompt_blocks_total"))),
                ),
                "share",
            ),
        ),
        "Share of the blocks of placed prompts that the chosen worker holds, by the index.",
    ),
    Panel(
        "Cached tokens, predicted and actual",
        "short",
        (
            Query(total(rate(of_model(f"{_F}_kv_predicted_cached_tokens_total"))), "predicted"),
            Query(total(rate(of_model(f"{_F}_kv_actual_cached_tokens_total"))), "actual"),
        ),
        "Two lines that part: events are lost, or hashes differ.",
    ),
    Panel(
        "Drift by worker",
        "percentunit",
        (
            Query(
                f"max by (worker, dp_rank) ({of_model(f'{_F}_kv_drift_ratio')})",
                "{{worker}} {{dp_rank}}",
            ),
        ),
        "Share of cached tokens predicted wrongly in the last minute.",
    ),
    Panel(
        "Ranks in the index, by state",
        "short",
        (Query(f"min by (state) ({of_instance(f'{_R}_index_sources')})", "{{state}}"),),
        "Only `exact` is complete; blocks of `gapped` ranks do not count.",
    ),
    _value("Indexer followed", "index_connected", "0: the router places without the index."),
    Panel(
        "Assumed blocks",
        "short",
        (
            Query(
                f"max by (instance, kind) ({of_instance(f'{_R}_guessed_blocks')})",
                "{{instance}} {{kind}}",
            ),
        ),
        "Of earlier decisions: guesses without KV events, predictions with them.",
    ),
)
STATE = (
    _count("Sessions", "affinity", "outcome", "Placed requests of client sessions."),
    _value("Client sessions", "affinity_bindings", "Placed on a worker."),
    _value("Sessions of frontends", "sessions", "Open now."),
    _value("Peers", "peers", "Routers that send their bookings."),
    _value("Bookings without an owner", "orphaned_bookings", "They count for 3 s more."),
    _count("Reports without effect", "unclaimed", "kind", "About bookings of others."),
)

BOARD = Board(
    "routing",
    "KVMesh: routing and cache",
    "Decisions, the admission queue, the index as routers use it, and sessions.",
    {"Decisions": DECISIONS, "Queue": QUEUE, "Cache": CACHE, "State": STATE},
)
