"""The shares of a core and the bytes of each member, from unit costs (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from bench.scale.fleet import FleetCosts
from bench.scale.registry import RegistryCosts
from common.kv.load import LOAD_HEARTBEAT_S
from worker_svc.kv_events.publisher import FULL_RATE_WORKERS, LOAD_SAMPLE_S

REQUESTS_PER_S = 1.0
"""Of each worker."""

INDEXERS = 2
BEND = 0.7
"""Share of a core at which a member is full."""


@dataclass(frozen=True, slots=True)
class FrameCosts:
    """CPU of a load report in microseconds, and its bytes to each subscriber."""

    in_us: float
    """Of the indexer that receives it."""

    out_us: float
    """Of the indexer, for each router."""

    router_us: float
    bytes: float


def report_s(workers: int) -> float:
    """Returns the seconds between two load reports of a busy worker, as `Publisher` has them."""
    return min(LOAD_SAMPLE_S * max(1.0, workers / FULL_RATE_WORKERS), LOAD_HEARTBEAT_S)


def member_row(
    costs: FleetCosts, reports: FrameCosts, registry: RegistryCosts
) -> dict[str, float | str]:
    """Returns the shares of a core, and kilobytes a second, of a router and an indexer."""
    workers, routers = costs.workers, costs.routers
    requests = workers * REQUESTS_PER_S
    own, peers = requests / routers, routers - 1
    load_rate = workers / report_s(workers)
    batch_rate = requests * costs.batches_per_request
    shares = {
        "decisions": own * costs.decide_us / 1e6,
        "replication": own * peers * (costs.sync_send_us + costs.sync_receive_us) / 1e6,
        "loads": load_rate * reports.router_us / 1e6,
        "events": batch_rate * costs.batch_us / 1e6,
    }
    indexer = (load_rate + batch_rate) * (reports.in_us + routers / INDEXERS * reports.out_us) / 1e6
    subscribed = load_rate * reports.bytes + batch_rate * costs.batch_bytes
    members = {**shares, "indexer": indexer}
    full = max(members, key=lambda name: members[name])
    return {
        "workers": workers,
        "routers": routers,
        "decide_us": costs.decide_us,
        **{name: round(share, 4) for name, share in shares.items()},
        "router": round(sum(shares.values()), 4),
        "indexer": round(indexer, 4),
        "sync_kb_s": round(2 * own * peers * costs.sync_bytes / 1e3, 1),
        "subscribe_kb_s": round(subscribed / 1e3, 1),
        "router_mb": round(costs.router_mb, 1),
        "registry_kb": round(registry.listing_mb * 1e3, 1),
        "registry_ms": round(registry.parse_ms + registry.router_ms, 1),
        "bend": full if max(sum(shares.values()), indexer) > BEND else "",
    }


def print_table(rows: Sequence[dict[str, float | str]], out: TextIO) -> None:
    """Prints the rows; shares in percent of a core."""
    shares = ("decisions", "replication", "loads", "events", "router", "indexer")
    names = list(rows[0])
    out.write("".join(name.rjust(max(12, len(name) + 2)) for name in names) + "\n")
    for row in rows:
        cells = [
            f"{100 * float(row[name]):.1f} %" if name in shares else _text(row[name])
            for name in names
        ]
        widths = (max(12, len(name) + 2) for name in names)
        out.write("".join(map(str.rjust, cells, widths)) + "\n")


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.1f}".removesuffix(".0")
