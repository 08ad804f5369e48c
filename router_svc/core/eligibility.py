"""Who may be chosen at all: pins, allow-list, taints, adapters, sessions, failed workers (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from common.errors import InvalidRequest, MeshError, Overloaded, Unavailable
from common.request.preprocessed import RoutingHints
from router_svc.core.query import Query
from router_svc.core.types import AffinityConstraint, Candidate, Leg

# required: a request for an adapter runs where that is resident; preferred: there if somebody who
# has it may serve, else anywhere, since engines may load adapters when they are asked for.
LoraResidency = Literal["required", "preferred"]

_ROUTING = "query.routing"
# Hint to callers whom nobody can serve just now: about the time discovery takes to show a worker.
RETRY_AFTER_S = 1.0


class Excluded(NamedTuple):
    """A candidate that a filter took out, and why. A tuple, since one pin makes many."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, slots=True)
class _CandidateFilter:
    """keeps: whether a candidate may stay. If nobody may, `error_if_empty` is the error; without
    one it is
    a wish, which nobody's staying puts aside.
    """

    accepts: Callable[[Candidate], bool]
    reason: str
    error_if_empty: Callable[[], MeshError] | None = None


def pinned_worker_id(routing: RoutingHints | None, leg: Leg = "whole") -> int | None:
    """The worker that a request pins for a leg; None if it pins none.

    The whole request and the decode leg go by backend_instance_id or decode_worker_id, which must
    agree (else InvalidRequest); the prefill leg goes by prefill_worker_id.
    """
    if routing is None:
        return None
    if leg == "prefill":
        return routing.prefill_worker_id
    backend, decode = routing.backend_instance_id, routing.decode_worker_id
    if backend is not None and decode is not None and backend != decode:
        raise InvalidRequest(
            f"backend_instance_id {backend} and decode_worker_id {decode} pin different workers",
            f"{_ROUTING}.decode_worker_id",
        )
    return decode if backend is None else backend


def eligible(
    query: Query,
    candidates: Sequence[Candidate],
    leg: Leg = "whole",
    *,
    affinity_constraint: AffinityConstraint | None = None,
    residency: LoraResidency = "required",
    has_capacity: Callable[[Candidate], bool] | None = None,
) -> tuple[Sequence[Candidate], list[Excluded]]:
    """The candidates that may serve the query's leg, and the others with the reason.

    has_room: if given, the only wish: others than the wished for may serve if these have no room.
    Raises Unavailable or InvalidRequest, with a reason that names the filter that left nobody, and
    the field that asked for it.
    """
    if query.routing is None and not query.excluded_worker_ids:
        return candidates, []
    excluded: list[Excluded] = []
    for candidate_filter in _candidate_filters(
        query, leg, affinity_constraint, residency, has_capacity
    ):
        kept = [c for c in candidates if candidate_filter.accepts(c)]
        if not kept:
            if candidate_filter.error_if_empty is None:
                continue
            raise candidate_filter.error_if_empty()
        if len(kept) < len(candidates):
            excluded += [
                Excluded(c, candidate_filter.reason)
                for c in candidates
                if not candidate_filter.accepts(c)
            ]
        candidates = kept
    return candidates, excluded


def all_busy_error(model: str, leg: Leg) -> Overloaded:
    """The error where all who may serve the leg are above a busy threshold."""
    role = "" if leg == "whole" else f"{leg} "
    return Overloaded(
        RETRY_AFTER_S,
        f"every {role}worker of {model!r} that may serve the request is busy",
        reason="ALL_WORKERS_BUSY",
        metadata={"model": model, "leg": leg},
    )


def _candidate_filters(
    query: Query,
    leg: Leg,
    affinity_constraint: AffinityConstraint | None,
    residency: LoraResidency,
    has_capacity: Callable[[Candidate], bool] | None,
) -> list[_CandidateFilter]:
    """In the order in which an empty result is best explained; wishes come last."""
    requirements: list[_CandidateFilter] = []
    preferences: list[_CandidateFilter] = []
    if (routing := query.routing) is not None:
        requirements += _hint_requirements(query.model, routing, leg)
        if routing.lora_name:
            adapter_filter = _adapter_filter(query.model, routing.lora_name, leg, residency)
            (preferences if adapter_filter.error_if_empty is None else requirements).append(
                adapter_filter
            )
    if failed_worker_ids := query.excluded_worker_ids:
        requirements.append(
            _CandidateFilter(
                lambda c: c.placement.worker_id not in failed_worker_ids,
                "excluded: it failed this request before",
                lambda: _no_worker_error(
                    query.model, leg, "ALL_EXCLUDED", "worker is left: all failed it"
                ),
            )
        )
    if affinity_constraint is not None:
        session_filter = _session_filter(query.model, affinity_constraint, leg)
        (requirements if affinity_constraint.is_hard else preferences).append(session_filter)
    if has_capacity is not None:
        preferences = [_CandidateFilter(has_capacity, "has no room, and others have")]
    return requirements + preferences


def _adapter_filter(
    model: str, lora_name: str, leg: Leg, residency: LoraResidency
) -> _CandidateFilter:
    def error_if_empty() -> MeshError:
        requirement = f"worker that has the adapter {lora_name!r}"
        return _no_worker_error(model, leg, "NO_ADAPTER_WORKER", requirement, "lora_name")

    return _CandidateFilter(
        lambda c: lora_name in c.instance.loras,
        "does not have the adapter",
        error_if_empty if residency == "required" else None,
    )


def _session_filter(
    model: str, affinity_constraint: AffinityConstraint, leg: Leg
) -> _CandidateFilter:
    worker_id, rank = affinity_constraint.placement

    def error_if_empty() -> MeshError:
        requirement = f"choice but worker {worker_id}, rank {rank}, as its session is bound to it"
        return _no_worker_error(
            model, leg, "SESSION_WORKER_NOT_ELIGIBLE", requirement, "session_control.session_id"
        )

    return _CandidateFilter(
        lambda c: c.placement == affinity_constraint.placement,
        "the session is bound to another place",
        error_if_empty if affinity_constraint.is_hard else None,
    )


def _hint_requirements(model: str, routing: RoutingHints, leg: Leg) -> list[_CandidateFilter]:
    requirements = []
    if (pin := pinned_worker_id(routing, leg)) is not None:
        field = _pin_field(routing, leg)
        requirement = f"worker is {pin}, as {field} asks"
        requirements.append(
            _CandidateFilter(
                lambda c: c.placement.worker_id == pin,
                "the request pins another worker",
                lambda: _no_worker_error(model, leg, "PINNED_WORKER_GONE", requirement, field),
            )
        )
    rank_field = "prefill_dp_rank" if leg == "prefill" else "dp_rank"
    rank: int | None = getattr(routing, rank_field)
    if rank is not None:
        requirements.append(
            _CandidateFilter(
                lambda c: c.placement.dp_rank == rank,
                "the request pins another rank",
                lambda: InvalidRequest(
                    f"no eligible worker has the data-parallel rank {rank}",
                    f"{_ROUTING}.{rank_field}",
                    reason="NO_SUCH_RANK",
                ),
            )
        )
    if (allowed := routing.allowed_worker_ids) is not None:
        requirements.append(
            _CandidateFilter(
                lambda c: c.placement.worker_id in allowed,
                "not in allowed_worker_ids",
                lambda: _no_worker_error(
                    model,
                    leg,
                    "NO_ALLOWED_WORKER",
                    "worker of allowed_worker_ids",
                    "allowed_worker_ids",
                ),
            )
        )
    constraints = routing.routing_constraints
    if constraints is not None and constraints.required_taints:
        taints = frozenset(constraints.required_taints)
        requirements.append(
            _CandidateFilter(
                lambda c: taints <= c.instance.taints,
                "lacks a required taint",
                lambda: _no_worker_error(
                    model,
                    leg,
                    "NO_TAINTED_WORKER",
                    f"worker has all of required_taints {sorted(taints)}",
                    "routing_constraints.required_taints",
                ),
            )
        )
    return requirements


def _pin_field(routing: RoutingHints, leg: Leg) -> str:
    """Which of the fields of `pinned_worker_id` pins it."""
    if leg == "prefill":
        return "prefill_worker_id"
    return "decode_worker_id" if routing.backend_instance_id is None else "backend_instance_id"


def _no_worker_error(
    model: str, leg: Leg, reason: str, requirement: str, hint_field: str = ""
) -> Unavailable:
    """asked_by: the field of the routing hints that leaves nobody. One who will do may yet come."""
    role = "" if leg == "whole" else f"{leg} "
    return Unavailable(
        f"nobody can serve {model!r}: no {role}{requirement}",
        RETRY_AFTER_S,
        field=f"{_ROUTING}.{hint_field}" if hint_field else None,
        reason=reason,
        metadata={"model": model, "leg": leg},
    )
