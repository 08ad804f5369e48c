"""The indexers: what they hold, and whether events arrive."""

from __future__ import annotations

from tools.dashboards.model import Board, Panel, Query
from tools.dashboards.queries import of_instance, quantile, rate, total

_I = "kvmesh_indexer"


def _value(title: str, metric: str, text: str, unit: str = "short") -> Panel:
    """Returns the panel of a gauge of each indexer."""
    return Panel(title, unit, (Query(of_instance(f"{_I}_{metric}"), "{{instance}}"),), text)


def _count(title: str, metric: str, text: str) -> Panel:
    """Returns the panel of a counter of each indexer."""
    query = Query(rate(of_instance(f"{_I}_{metric}_total")), "{{instance}}")
    return Panel(title, "ops", (query,), text)


CONTENT = (
    _value("Blocks", "blocks", "A block on n ranks counts n times."),
    Panel(
        "Memory of the index",
        "bytes",
        (
            Query(of_instance(f"{_I}_used_bytes"), "{{instance}}"),
            Query(of_instance(f"{_I}_budget_bytes"), "budget of {{instance}}"),
        ),
        "Estimated. Near the budget, workers withdraw blocks.",
    ),
    Panel(
        "Ranks, by state",
        "short",
        (
            Query(
                f"max by (instance, state) ({of_instance(f'{_I}_sources')})",
                "{{instance}} {{state}}",
            ),
        ),
        "`degraded`: only a part of the blocks; `gapped`: events are missing; `stale`: silent.",
    ),
    Panel(
        "Time of a match",
        "s",
        tuple(
            Query(quantile(share, of_instance(f"{_I}_match_seconds_bucket")), name)
            for share, name in ((0.5, "p50"), (0.99, "p99"))
        ),
        "Of calls to the indexer; routers have a replica and call it never.",
        empty="routers match in their replica; only operators and tests call Match",
    ),
)
STREAMS = (
    _value("Publishers", "publishers", "Open streams of workers."),
    _value("Subscribers", "subscribers", "Open streams of routers."),
    _count("Subscribers that were cut", "subscribers_cut", "They read too slowly."),
    _count("Batches", "batches", "Of events, applied."),
    _count("Batches received again", "duplicates", "After a new connection, for example."),
    _count("Gaps", "gaps", "A rank lost events; they are sent again, or a snapshot."),
    _count("Snapshots", "snapshots", "A whole cache sent again."),
    _count("Buffers dropped", "overflows", "At their limit of size."),
    _count("Slow slices", "slow_slices", "Ingest that delayed other work."),
    Panel(
        "Batches and duplicates of all indexers",
        "ops",
        (
            Query(total(rate(of_instance(f"{_I}_batches_total"))), "batches"),
            Query(total(rate(of_instance(f"{_I}_duplicates_total"))), "duplicates"),
        ),
        "Each indexer receives every event.",
    ),
)

BOARD = Board(
    "index",
    "KVMesh: index",
    "Content and streams of the indexers.",
    {"Content": CONTENT, "Streams": STREAMS},
)
