"""Placement requests and decisions, as a frontend has them."""

from __future__ import annotations

from typing import Any

from common.kv.hashing import PrefixHasher
from common.request.placement import Decision, Placement, Query
from frontend_svc.request.placement_request import PlacementRequest


def placement_request(
    model: str,
    total_tokens: int = 0,
    arrived_at: float = 0.0,
    *,
    hasher: PrefixHasher | None = None,
    **query: Any,
) -> PlacementRequest:
    """query: further fields of the query."""
    return PlacementRequest(Query(model, total_tokens, **query), arrived_at, hasher=hasher)


def decided(
    worker_id: int, dp_rank: int = 0, *, prefill: Placement | None = None, **fields: Any
) -> Decision:
    """A decision for a worker. fields: further fields of the decision."""
    return Decision(Placement(worker_id, dp_rank), prefill, **fields)
