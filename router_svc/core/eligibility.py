"""The candidates that may serve a request: pins, adapters, sessions, busy limits (pure).

Two limits concern load, both as in NVIDIA Dynamo 1.6 and off by default. A rank is prefill-busy if
more than `threshold` batches of prompt tokens wait or run there: requests then wait in the
admission queue. A worker is busy if each of its ranks exceeds one of `BusyLimits`: it then gets no
request, and if no other worker may serve one, the request is rejected with a retry hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from common.errors import InvalidRequest, MeshError, NotFound, Overloaded, Unavailable
from common.registry.instances import Instance
from common.request.placement import REASON_CHARS_MAX, Placement, Query
from common.request.preprocessed import RoutingHints
from router_svc.core.candidate import AffinityConstraint, Candidate, Candidates, Leg, LoadTotals
from router_svc.core.fleet import GONE_MODEL_TTL_S, drop_gone

# required: a request for an adapter runs on workers that have it resident. preferred: there if one
# of them may serve it, else anywhere, since engines may load adapters on demand.
LoraResidency = Literal["required", "preferred"]

_ROUTING = "query.routing"
# Retry hint if no worker can serve a request now: about the time discovery takes to show one.
RETRY_AFTER_S = 1.0
RECENTLY_REMOVED_MAX = 1024
# Tokens per batch of a worker that does not report them: only absurd loads are busy.
BATCH_TOKENS_UNKNOWN = 10_000_000


class Excluded(NamedTuple):
    """A candidate that a filter excluded. A tuple, since one pin excludes many."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, slots=True)
class _CandidateFilter:
    """error_if_empty: the error if no candidate passes; None: a preference, then ignored.
    by_worker: reasons of single workers, in place of `reason`."""

    accepts: Callable[[Candidate], bool]
    reason: str
    error_if_empty: Callable[[], MeshError] | None = None
    by_worker: Mapping[int, str] = field(default_factory=dict)


def pinned_worker_id(routing: RoutingHints | None, leg: Leg = "whole") -> int | None:
    """Returns the worker that a request pins for a leg; None if it pins none. On the prefill leg
    prefill_worker_id counts, else backend_instance_id or decode_worker_id; InvalidRequest if these
    differ.
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
    candidates: Candidates,
    leg: Leg = "whole",
    *,
    affinity_constraint: AffinityConstraint | None = None,
    residency: LoraResidency = "required",
    has_capacity: Callable[[Candidate], bool] | None = None,
) -> tuple[Candidates, list[Excluded]]:
    """Returns the candidates that may serve the query's leg, and the excluded ones with reasons.
    has_capacity: if given, the only preference. Raises Unavailable or InvalidRequest of the filter
    that no candidate passes, with the field of the request that sets it.
    """
    if query.routing is None and not query.excluded_worker_ids and has_capacity is None:
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
            reason, by_worker = candidate_filter.reason, candidate_filter.by_worker
            rejected = (c for c in candidates if not candidate_filter.accepts(c))
            excluded += [
                Excluded(c, by_worker.get(c.placement.worker_id, reason)) for c in rejected
            ]
        candidates = kept
    return candidates, excluded


def all_busy_error(model: str, leg: Leg) -> Overloaded:
    """Returns the error if each eligible worker of the leg is above a busy threshold."""
    role = "" if leg == "whole" else f"{leg} "
    return Overloaded(
        RETRY_AFTER_S,
        f"every eligible {role}worker of {model!r} is above a busy threshold; retry after "
        f"{RETRY_AFTER_S:g} s",
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
    """Returns requirements, in the order that best explains an empty result; then preferences."""
    requirements: list[_CandidateFilter] = []
    preferences: list[_CandidateFilter] = []
    if (routing := query.routing) is not None:
        requirements += _hint_requirements(query.model, routing, leg)
        if routing.lora_name:
            adapter_filter = _adapter_filter(query.model, routing.lora_name, leg, residency)
            (requirements if residency == "required" else preferences).append(adapter_filter)
    if failed_worker_ids := query.excluded_worker_ids:
        # An earlier version sends no reasons; later ones are not for each.
        reasons = zip(sorted(failed_worker_ids), query.exclusion_reasons, strict=False)
        requirements.append(
            _CandidateFilter(
                lambda c: c.placement.worker_id not in failed_worker_ids,
                "excluded by the frontend: it failed this request, or its circuit is open",
                lambda: _no_worker_error(
                    query.model, leg, "ALL_EXCLUDED", "worker is left: all failed it"
                ),
                {
                    worker_id: f"excluded by the frontend: {reason[:REASON_CHARS_MAX]}"
                    for worker_id, reason in reasons
                },
            )
        )
    if affinity_constraint is not None:
        session_filter = _session_filter(query.model, affinity_constraint, leg)
        (requirements if affinity_constraint.is_hard else preferences).append(session_filter)
    if has_capacity is not None:
        preferences = [_CandidateFilter(has_capacity, "no capacity, and others have some")]
    return requirements + preferences


def _adapter_filter(
    model: str, lora_name: str, leg: Leg, residency: LoraResidency
) -> _CandidateFilter:
    requirement = f"worker has the adapter {lora_name!r}"
    error = partial(_no_worker_error, model, leg, "NO_ADAPTER_WORKER", requirement, "lora_name")
    return _CandidateFilter(
        lambda c: lora_name in c.instance.loras,
        "does not have the adapter",
        error if residency == "required" else None,
    )


def _session_filter(model: str, constraint: AffinityConstraint, leg: Leg) -> _CandidateFilter:
    worker_id, rank = constraint.placement
    requirement = f"other worker than {worker_id}, rank {rank}, may serve its session"
    reason, field = "SESSION_WORKER_NOT_ELIGIBLE", "session_control.session_id"
    return _CandidateFilter(
        lambda c: c.placement == constraint.placement,
        "the session has another placement",
        partial(_no_worker_error, model, leg, reason, requirement, field)
        if constraint.is_hard
        else None,
    )


def _hint_requirements(model: str, routing: RoutingHints, leg: Leg) -> list[_CandidateFilter]:
    requirements = []
    no_worker = partial(_no_worker_error, model, leg)
    if (pin := pinned_worker_id(routing, leg)) is not None:
        field = _pin_field(routing, leg)
        requirement = f"worker is {pin}, as {field} requires"
        requirements.append(
            _CandidateFilter(
                lambda c: c.placement.worker_id == pin,
                "the request pins another worker",
                partial(no_worker, "PINNED_WORKER_GONE", requirement, field),
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
        field = "allowed_worker_ids"
        requirements.append(
            _CandidateFilter(
                lambda c: c.placement.worker_id in allowed,
                "not in allowed_worker_ids",
                partial(no_worker, "NO_ALLOWED_WORKER", f"worker is in {field}", field),
            )
        )
    constraints = routing.routing_constraints
    if constraints is not None and constraints.required_taints:
        taints = frozenset(constraints.required_taints)
        requirement = f"worker has all of required_taints {sorted(taints)}"
        field = "routing_constraints.required_taints"
        requirements.append(
            _CandidateFilter(
                lambda c: taints <= c.instance.taints,
                "lacks a required taint",
                partial(no_worker, "NO_TAINTED_WORKER", requirement, field),
            )
        )
    return requirements


def _pin_field(routing: RoutingHints, leg: Leg) -> str:
    """Returns the field that `pinned_worker_id` reads."""
    if leg == "prefill":
        return "prefill_worker_id"
    return "decode_worker_id" if routing.backend_instance_id is None else "backend_instance_id"


def _no_worker_error(
    model: str, leg: Leg, reason: str, requirement: str, hint_field: str = ""
) -> Unavailable:
    """Returns a retryable error, since a suitable worker may join. hint_field: the hint that
    excludes all."""
    role = "" if leg == "whole" else f"{leg} "
    return Unavailable(
        f"no worker can serve {model!r}: no {role}{requirement}",
        RETRY_AFTER_S,
        field=f"{_ROUTING}.{hint_field}" if hint_field else None,
        reason=reason,
        metadata={"model": model, "leg": leg},
    )


class AdapterResidency:
    """The adapters that the models' workers have, or had until recently, never both. An adapter
    that left with its last worker is unavailable (503) for GONE_MODEL_TTL_S, like a model, then
    unknown (404): requests that it served look for another worker just then.
    """

    def __init__(self) -> None:
        self._resident: frozenset[tuple[str, str]] = frozenset()
        # (model, adapter) -> time of removal, seconds; oldest first.
        self._recently_removed: dict[tuple[str, str], float] = {}

    def update(self, workers: Iterable[Instance], now: float) -> None:
        """Applies a fleet change. workers: all present workers."""
        resident = frozenset((worker.model, name) for worker in workers for name in worker.loras)
        for adapter_key in sorted(self._resident - resident):
            self._recently_removed[adapter_key] = now
        for adapter_key in self._recently_removed.keys() & resident:
            del self._recently_removed[adapter_key]
        drop_gone(self._recently_removed, now, RECENTLY_REMOVED_MAX)
        self._resident = resident

    def check(self, query: Query, now: float) -> None:
        """Raises Unavailable if a worker had the query's adapter recently and none has, else
        NotFound.
        """
        adapter_name = query.routing.lora_name if query.routing is not None else None
        if not adapter_name or (query.model, adapter_name) in self._resident:
            return
        metadata = {"model": query.model, "adapter": adapter_name}
        removed_at = self._recently_removed.get((query.model, adapter_name))
        if removed_at is not None and now - removed_at < GONE_MODEL_TTL_S:
            raise Unavailable(
                f"no worker can serve {query.model!r}: the last worker with the adapter "
                f"{adapter_name!r} left",
                RETRY_AFTER_S,
                reason="NO_ADAPTER_WORKER",
                metadata=metadata,
            )
        raise NotFound(
            f"no worker of {query.model!r} has the adapter {adapter_name!r}",
            field="query.routing.lora_name",
            reason="UNKNOWN_ADAPTER",
            metadata=metadata,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLimits:
    """Load above which a rank counts as busy; None: no limit. active_decode_blocks: share of its KV
    blocks in use, 0..1, if it reports their number; not for the prefill leg. active_prefill_tokens:
    prompt tokens to compute; active_prefill_tokens_frac: in batches, if it reports its batch size;
    neither for the decode leg.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None
    active_prefill_tokens_frac: float | None = None

    @property
    def is_disabled(self) -> bool:
        return self is NO_LIMITS or self == NO_LIMITS

    def is_exceeded(self, candidate: Candidate, load: LoadTotals, leg: Leg) -> bool:
        worker, tokens = candidate.instance, load.prefill_tokens
        if leg != "decode":
            if self.active_prefill_tokens is not None and tokens > self.active_prefill_tokens:
                return True
            max_share, batch_tokens = self.active_prefill_tokens_frac, worker.max_num_batched_tokens
            if (
                max_share is not None
                and batch_tokens is not None
                and tokens > max_share * batch_tokens
            ):
                return True
        max_share, blocks = self.active_decode_blocks, worker.total_kv_blocks
        if leg == "prefill" or max_share is None or blocks is None:
            return False
        return load.decode_blocks > max_share * blocks


NO_LIMITS = BusyLimits()


def is_prefill_busy(candidate: Candidate, load: LoadTotals, threshold: float) -> bool:
    """Returns whether prefill_tokens > threshold * max_num_batched_tokens."""
    batch_tokens = candidate.instance.max_num_batched_tokens or BATCH_TOKENS_UNKNOWN
    return load.prefill_tokens > threshold * batch_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundLimits:
    """Load up to which a rank takes background requests, so that it has room for others at once."""

    prefill_share: float = 1 / 128
    """Prompt tokens to compute, of all requests, in batches."""

    load_share: float = 0.9
    """Share of its running requests and of its KV blocks in use, 0..1, if it reports their
    numbers."""

    def is_exceeded(self, candidate: Candidate, load: LoadTotals) -> bool:
        worker = candidate.instance
        sequences, blocks = worker.max_num_seqs, worker.total_kv_blocks
        return (
            is_prefill_busy(candidate, load, self.prefill_share)
            or (sequences is not None and load.requests >= self.load_share * sequences)
            or (blocks is not None and load.decode_blocks >= self.load_share * blocks)
        )


DEFAULT_BACKGROUND = BackgroundLimits()


def busy_worker_ids(
    candidates: Candidates,
    load_of: Callable[[Placement], LoadTotals],
    limits: BusyLimits,
    leg: Leg,
) -> frozenset[int]:
    """Returns ids of the workers that have only busy ranks among `candidates`."""
    if limits.is_disabled:
        return frozenset()
    not_busy = {
        c.placement.worker_id
        for c in candidates
        if not limits.is_exceeded(c, load_of(c.placement), leg)
    }
    return frozenset(c.placement.worker_id for c in candidates) - not_busy
