"""Placement without a router, and errors of the router in the frontend's terms."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from common.errors import MeshError, Unavailable
from common.registry.instances import Instance, Snapshot
from common.request.placement import Decision, Placement, Query
from common.request.preprocessed import RoutingHints
from frontend_svc.models.adapters import serving
from frontend_svc.models.catalog import no_worker_error
from frontend_svc.request.retry_policy import NO_ROUTER


def place_locally(
    snapshot: Snapshot, open_slots: dict[int, int], query: Query, rng: Random
) -> Decision | MeshError:
    """Places a request without a router: the better of two random workers, by own open slots.
    Candidates are aggregated workers; if there are none, decode workers that can prefill. If the
    query names an adapter, they have it."""
    adapter = adapter_of(query)
    workers = serving(snapshot.serving(query.model), adapter)
    if not workers:
        return no_worker_error(adapter or query.model)
    if query.routing is not None and _restricts_workers(query.routing):
        return Unavailable(
            "no router is available, and only a router can apply the request's constraints on "
            "workers (ids, ranks, taints); retry after 1 s, or send the request without them",
            1.0,
            reason=NO_ROUTER,
        )
    not_excluded = [w for w in workers if w.id not in query.excluded_worker_ids]
    eligible = [w for w in not_excluded if w.role == "aggregated"]
    eligible = eligible or [w for w in not_excluded if w.role == "decode" and w.local_prefill]
    if not eligible:
        return Unavailable(
            f"no router is available, and no other worker of {query.model!r} serves whole "
            "requests; retry after 1 s",
            1.0,
            reason=NO_ROUTER,
        )
    two_candidates: list[Instance] = rng.sample(eligible, min(2, len(eligible)))
    worker = min(two_candidates, key=lambda w: open_slots.get(w.id, 0))
    reasons = ("unrouted: no router is available",)
    placement = Placement(worker.id, worker.dp_rank_start)
    return Decision(placement, reasons=reasons, is_unrouted=True)


def has_workers(snapshot: Snapshot, query: Query) -> bool:
    return bool(serving(snapshot.serving(query.model), adapter_of(query)))


def adapter_of(query: Query) -> str:
    """Returns the adapter that a query names, "" if none."""
    return (query.routing.lora_name or "") if query.routing is not None else ""


def _restricts_workers(routing: RoutingHints) -> bool:
    """Returns whether the hints exclude workers, other than those without the adapter.
    Priorities, expected length, sessions and preferences exclude none."""
    constraints = routing.routing_constraints
    if constraints is not None and constraints.required_taints:
        return True
    other_hints = replace(
        routing,
        expected_output_tokens=None,
        lora_name=None,
        priority=None,
        priority_jump=None,
        routing_constraints=None,
        session_control=None,
    )
    return other_hints != RoutingHints()
