"""Choosing one candidate: filters first, then a selector (pure).

A selector sees only candidates that may be chosen. It is stateless: what it needs of the past
(the last choice, the loads) stands in the View. Ties are broken uniformly at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Protocol

from common.errors import InvalidRequest, MeshError, Unavailable
from common.instances import Instance
from common.preprocessed import RoutingConstraints, RoutingHints
from router_svc.core.fleet import Candidate, Placement
from router_svc.core.load import LoadBook, Totals
from router_svc.core.query import Query, block_size_of

# Hint to callers whom nobody can serve just now: about the time discovery takes to show a worker.
RETRY_AFTER_S = 1.0

_NO_OVERLAPS: Mapping[Placement, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class View:
    """What a selector may look at.

    last: the placement chosen before for the same model and role, None at first.
    overlaps: blocks of the prompt that a placement holds; those absent hold none.
    """

    book: LoadBook
    now: float
    last: Placement | None = None
    overlaps: Mapping[Placement, int] = field(default_factory=lambda: _NO_OVERLAPS)

    def load(self, placement: Placement) -> Totals:
        """The estimated load of one rank."""
        return self.book.load(placement, self.now)

    def overlap(self, placement: Placement) -> int:
        """Blocks of the prompt that the rank holds."""
        return self.overlaps.get(placement, 0)


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with its cost in the selector's unit; lower is better."""

    candidate: Candidate
    cost: float
    load: Totals


@dataclass(frozen=True, slots=True)
class Choice:
    """What a selector answers: the chosen one, why, and all it has put a price on."""

    candidate: Candidate
    reason: str
    scored: Sequence[Scored] = ()


class WorkerSelector(Protocol):
    """The policy. `name` labels metrics and explanations."""

    @property
    def name(self) -> str: ...

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Choice:
        """One of `candidates`, which are never empty and stand in order of placement.

        May raise a MeshError for queries that it cannot serve.
        """


class RoundRobin:
    """Each candidate in turn."""

    name = "round_robin"

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Choice:
        last = view.last
        if last is None:
            return Choice(candidates[0], "first of the round")
        following = (c for c in candidates if c.placement > last)
        return Choice(next(following, candidates[0]), "next in the round")


class RandomChoice:
    """Each candidate with equal chance."""

    name = "random"

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Choice:
        return Choice(candidates[rng.randrange(len(candidates))], "drawn at random")


class LeastLoaded:
    """The candidate with the least estimated load, in blocks; see `load_cost`."""

    name = "least_loaded"

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Choice:
        scored = [_score(query, candidate, view) for candidate in candidates]
        return cheapest(scored, rng, "least load")


class PowerOfTwo:
    """The less loaded of two candidates drawn at random."""

    name = "power_of_two"

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Choice:
        drawn = rng.sample(candidates, 2) if len(candidates) > 2 else candidates
        scored = [_score(query, candidate, view) for candidate in drawn]
        return cheapest(scored, rng, "less load of two drawn")


class Direct:
    """The worker that the request pins, on the least loaded of its ranks; no pin is an error."""

    name = "direct"

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Choice:
        if pinned_worker(query.routing) is None:
            raise InvalidRequest(
                "this router places by pins only: name a worker in backend_instance_id or "
                "decode_worker_id",
                "query.routing.backend_instance_id",
                reason="PIN_REQUIRED",
            )
        scored = [_score(query, candidate, view) for candidate in candidates]
        return cheapest(scored, rng, "pinned by the request")


SELECTORS: Mapping[str, Callable[[], WorkerSelector]] = MappingProxyType(
    {
        selector.name: selector
        for selector in (RoundRobin, RandomChoice, LeastLoaded, PowerOfTwo, Direct)
    }
)


def load_cost(load: Totals, block_size: int, taint_factor: float) -> float:
    """(1 + prefill_tokens / block_size + decode_blocks + requests) * taint_factor, in blocks.

    A request counts one block besides its own, so that requests of unknown length count too; the
    1 lets a preferred taint decide among the idle.
    """
    work = load.prefill_tokens / block_size + load.decode_blocks + load.requests
    return (1.0 + work) * taint_factor


def preferred_taint_factor(worker: Instance, constraints: RoutingConstraints | None) -> float:
    """exp(-tanh(sum of weights of the preferred taints that the worker has)), in [1/e, e].

    Formula: reference 4.6.
    """
    if constraints is None or not constraints.preferred_taints:
        return 1.0
    weights = constraints.preferred_taints.items()
    return math.exp(-math.tanh(sum(w for taint, w in weights if taint in worker.taints)))


def cheapest(scored: Sequence[Scored], rng: Random, reason: str) -> Choice:
    """The lowest cost; one of several at random."""
    least = min(one.cost for one in scored)
    ties = [one for one in scored if one.cost == least]
    chosen = ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]
    if len(ties) > 1:
        reason = f"{reason}, drawn among {len(ties)} equals"
    return Choice(chosen.candidate, reason, scored)


def _score(query: Query, candidate: Candidate, view: View) -> Scored:
    load = view.load(candidate.placement)
    block_size = block_size_of(query, candidate.instance.block_size)
    constraints = query.routing.routing_constraints if query.routing else None
    factor = preferred_taint_factor(candidate.instance, constraints)
    return Scored(candidate, load_cost(load, block_size, factor), load)


# Filters.


@dataclass(frozen=True, slots=True)
class Excluded:
    """A candidate that a filter took out, and why."""

    candidate: Candidate
    why: str


@dataclass(frozen=True, slots=True)
class _Filter:
    """keeps: whether a candidate may stay. If nobody may, `nobody` is the error."""

    keeps: Callable[[Candidate], bool]
    why: str
    nobody: Callable[[], MeshError]


def pinned_worker(routing: RoutingHints | None) -> int | None:
    """The worker that a request for one worker pins, under either name; InvalidRequest for two."""
    if routing is None:
        return None
    backend, decode = routing.backend_instance_id, routing.decode_worker_id
    if backend is not None and decode is not None and backend != decode:
        raise InvalidRequest(
            f"backend_instance_id {backend} and decode_worker_id {decode} pin different workers",
            "query.routing.decode_worker_id",
        )
    return decode if backend is None else backend


def eligible(
    query: Query, candidates: Sequence[Candidate]
) -> tuple[Sequence[Candidate], list[Excluded]]:
    """The candidates that may serve the query, and the others with the reason.

    Raises Unavailable or InvalidRequest, with a reason that names the filter that left nobody.
    """
    if query.routing is None and not query.excluded_worker_ids:
        return candidates, []
    excluded: list[Excluded] = []
    for rule in _filters(query):
        kept = [c for c in candidates if rule.keeps(c)]
        if len(kept) < len(candidates):
            excluded += [Excluded(c, rule.why) for c in candidates if not rule.keeps(c)]
        if not kept:
            raise rule.nobody()
        candidates = kept
    return candidates, excluded


def _filters(query: Query) -> list[_Filter]:
    """In the order in which an empty result is best explained."""
    rules = []
    if (routing := query.routing) is not None:
        rules += _hint_filters(query.model, routing)
    if left_out := query.excluded_worker_ids:
        rules.append(
            _Filter(
                lambda c: c.placement.worker_id not in left_out,
                "excluded: it failed this request before",
                lambda: _nobody(query.model, "ALL_EXCLUDED", "every worker failed it before"),
            )
        )
    return rules


def _hint_filters(model: str, routing: RoutingHints) -> list[_Filter]:
    rules = []
    if (pin := pinned_worker(routing)) is not None:
        rules.append(
            _Filter(
                lambda c: c.placement.worker_id == pin,
                "the request pins another worker",
                lambda: _nobody(model, "PINNED_WORKER_GONE", f"the pinned worker {pin} is not"),
            )
        )
    if (rank := routing.dp_rank) is not None:
        rules.append(
            _Filter(
                lambda c: c.placement.dp_rank == rank,
                "the request pins another rank",
                lambda: InvalidRequest(
                    f"no eligible worker has the data-parallel rank {rank}",
                    "query.routing.dp_rank",
                    reason="NO_SUCH_RANK",
                ),
            )
        )
    if (allowed := routing.allowed_worker_ids) is not None:
        rules.append(
            _Filter(
                lambda c: c.placement.worker_id in allowed,
                "not in allowed_worker_ids",
                lambda: _nobody(model, "NO_ALLOWED_WORKER", "no worker of allowed_worker_ids is"),
            )
        )
    constraints = routing.routing_constraints
    if constraints is not None and constraints.required_taints:
        taints = frozenset(constraints.required_taints)
        rules.append(
            _Filter(
                lambda c: taints <= c.instance.taints,
                "lacks a required taint",
                lambda: _nobody(
                    model, "NO_TAINTED_WORKER", f"no worker with taints {sorted(taints)} is"
                ),
            )
        )
    return rules


def _nobody(model: str, reason: str, who: str) -> Unavailable:
    why = who if reason == "ALL_EXCLUDED" else f"{who} there"
    return Unavailable(
        f"nobody can serve {model!r}: {why}",
        RETRY_AFTER_S,
        reason=reason,
        metadata={"model": model},
    )
