"""Selectors: choose one of the eligible candidates (pure).

A selector is stateless: the View contains what it needs of the past (the last choice, the loads,
recent prefill work). Ties are broken uniformly at random.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from types import MappingProxyType
from typing import NamedTuple, Protocol, overload

from common.errors import InvalidRequest
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.preprocessed import RoutingConstraints
from router_svc.core.cost import (
    DEFAULT_COST_SETTINGS,
    CostSettings,
    RecentPrefill,
    Terms,
    draw_index,
)
from router_svc.core.eligibility import pinned_worker_id
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.query import Query, block_size_of, bookable_decode_blocks
from router_svc.core.rank_load import PrefillWork
from router_svc.core.types import (
    NO_MATCHES,
    Candidate,
    Candidates,
    Leg,
    LoadTotals,
    Matches,
    Placement,
)


@dataclass(slots=True)
class View:
    """The inputs of a selector. last: the placement chosen before for the same model and leg, None
    at first. matches: what placements hold of the prompt; absent ones hold nothing. cost_settings:
    of this request and leg. recent_prefill: None: not counted.
    """

    load_tracker: LoadTracker
    now: float
    last: Placement | None = None
    matches: Matches = field(default_factory=lambda: NO_MATCHES)
    leg: Leg = "whole"
    cost_settings: CostSettings = DEFAULT_COST_SETTINGS
    recent_prefill: RecentPrefill | None = None

    def load(self, placement: Placement) -> LoadTotals:
        return self.load_tracker.ranks.load(placement, self.now)

    def overlap(self, placement: Placement) -> int:
        """Leading blocks of the prompt that the rank holds on any tier."""
        row = self.matches.get(placement)
        return 0 if row is None else row.disk_blocks


class ScoredCandidate(NamedTuple):
    """A candidate and its cost in the selector's unit; lower is better. terms: None if unknown."""

    candidate: Candidate
    cost: float
    load: LoadTotals
    terms: Terms | None = None


# The fields of `Terms`.
_TermValues = tuple[float, float, float, float, float, float]


@dataclass(slots=True, eq=False)
class CandidateCosts(Sequence[ScoredCandidate]):
    """Candidates with costs in columns: few of many are read singly. parts: the fields of `Terms`;
    None: not reported.
    """

    candidates: Candidates
    costs: Sequence[float]
    loads: Sequence[LoadTotals]
    parts: Sequence[_TermValues | None] | None = None

    @classmethod
    def of(cls, scored: Sequence[ScoredCandidate]) -> CandidateCosts:
        if isinstance(scored, CandidateCosts):
            return scored
        candidates, costs, loads, parts = zip(*scored, strict=True) if scored else ((),) * 4
        return cls(candidates, costs, loads, parts)

    def terms(self, at: int) -> Terms | None:
        parts = None if self.parts is None else self.parts[at]
        return None if parts is None else Terms._make(parts)

    def subset(self, indexes: Sequence[int]) -> CandidateCosts:
        candidates, costs, loads, parts = self.candidates, self.costs, self.loads, self.parts
        return CandidateCosts(
            [candidates[at] for at in indexes],
            [costs[at] for at in indexes],
            [loads[at] for at in indexes],
            None if parts is None else [parts[at] for at in indexes],
        )

    def __len__(self) -> int:
        return len(self.costs)

    @overload
    def __getitem__(self, at: int) -> ScoredCandidate: ...

    @overload
    def __getitem__(self, at: slice) -> list[ScoredCandidate]: ...

    def __getitem__(self, at: int | slice) -> ScoredCandidate | list[ScoredCandidate]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        return ScoredCandidate(self.candidates[at], self.costs[at], self.loads[at], self.terms(at))


@dataclass(slots=True)
class Selection:
    """The result of a selector: the chosen candidate, the reason, and all priced candidates."""

    candidate: Candidate
    reason: str
    scored: Sequence[ScoredCandidate] = ()


class WorkerSelector(Protocol):
    """The placement policy. `name` labels metrics and explanations."""

    @property
    def name(self) -> str: ...

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        """One of `candidates`, which are never empty and sorted by placement. May raise a MeshError
        for queries that it cannot serve; any other exception fails the query (SELECTOR_FAILED).
        """


class KvSelector:
    """The least cost, with cache savings; see `cost`. Without KV events, load alone decides."""

    name = "kv"
    is_dynamo = False

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        scored = score_candidates(query, candidates, view, is_dynamo=self.is_dynamo)
        reason = "least cost"
        if not view.matches and not _any_publishes_kv_events(candidates):
            reason = "least cost by load: no worker publishes KV events"
        if view.cost_settings.router_temperature == 0 or len(scored) == 1:
            return select_cheapest(scored, rng, reason)
        temperature = view.cost_settings.router_temperature
        at = draw_index(scored.costs, temperature, rng.random())
        return Selection(candidates[at], f"drawn by cost at temperature {temperature:g}", scored)


class DynamoSelector(KvSelector):
    """The least cost by the formula of NVIDIA Dynamo 1.6; see `cost`."""

    name = "dynamo"
    is_dynamo = True


class RoundRobinSelector:
    """Each candidate in turn."""

    name = "round_robin"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        if view.last is None:
            return Selection(candidates[0], "first of the round")
        after = bisect_right(candidates, view.last, key=attrgetter("placement"))
        return Selection(candidates[after % len(candidates)], "next in the round")


class RandomSelector:
    """Each candidate with equal probability."""

    name = "random"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        return Selection(candidates[rng.randrange(len(candidates))], "drawn at random")


class LeastLoadedSelector:
    """The candidate with the least estimated load, in blocks; see `load_cost`."""

    name = "least_loaded"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        return select_cheapest(_load_costs(query, candidates, view), rng, "least load")


class PowerOfTwoSelector:
    """The less loaded of two candidates drawn at random."""

    name = "power_of_two"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        drawn = rng.sample(candidates, 2) if len(candidates) > 2 else candidates
        return select_cheapest(_load_costs(query, drawn, view), rng, "less load of two drawn")


class DirectSelector:
    """The worker that the request pins, on its least loaded rank; an error without a pin."""

    name = "direct"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        if pinned_worker_id(query.routing, view.leg) is None:
            is_prefill = view.leg == "prefill"
            name = "prefill_worker_id" if is_prefill else "backend_instance_id"
            names = name if is_prefill else f"{name} or decode_worker_id"
            text = f"the selector direct requires a pinned worker: set {names}"
            raise InvalidRequest(text, f"query.routing.{name}", reason="PIN_REQUIRED")
        return select_cheapest(_load_costs(query, candidates, view), rng, "pinned by the request")


SELECTORS: Mapping[str, Callable[[], WorkerSelector]] = MappingProxyType(
    {
        "kv": KvSelector,
        "dynamo": DynamoSelector,
        "round_robin": RoundRobinSelector,
        "random": RandomSelector,
        "least_loaded": LeastLoadedSelector,
        "power_of_two": PowerOfTwoSelector,
        "direct": DirectSelector,
    }
)


# The selectors whose choice depends on CostSettings.
COST_SELECTORS = frozenset((KvSelector.name, DynamoSelector.name))


def _any_publishes_kv_events(candidates: Candidates) -> bool:
    for candidate in candidates:  # noqa: SIM110 -- a generator takes twice as long.
        if candidate.instance.kv_index == "events":
            return True
    return False


def score_candidates(
    query: Query, candidates: Candidates, view: View, *, is_dynamo: bool = False
) -> CandidateCosts:
    """Every candidate with its cost, by a formula of `cost`. Optimized: most of a decision."""
    cost_settings, now, matches = view.cost_settings, view.now, view.matches
    load_of = view.load_tracker.ranks.load
    placements = [c.placement for c in candidates]
    loads = [load_of(placement, now) for placement in placements]
    is_decode = view.leg == "decode"
    credit_decay = cost_settings.overlap_score_credit_decay
    has_credit_decay = cost_settings.track_prefill_tokens and credit_decay > 0
    least_queued = min([load[0] for load in loads]) if has_credit_decay else 0
    full_credit, assumes_reuse = cost_settings.overlap_score_credit, cost_settings.assume_kv_reuse
    scale = cost_settings.prefill_load_scale
    uncached_weight = cost_settings.uncached_block_weight
    request_weight = cost_settings.decode_active_request_weight
    held_weight, miss_weight = 1.0, 0.0
    works: Sequence[PrefillWork] = ()
    if not (is_dynamo or is_decode):
        works = view.load_tracker.ranks.prefill_work(placements, now)
        held_weight = cost_settings.held_block_weight
        miss_weight = uncached_weight * cost_settings.recent_miss_weight
    total_tokens, block_size = query.total_tokens, query.block_size
    blocks = -(-total_tokens // block_size) if block_size else 0
    costs: list[float] = []
    parts: list[_TermValues] = []
    for candidate, placement, load, misses, factor in zip(
        candidates,
        placements,
        loads,
        _recent_miss_terms(query, candidates, placements, view, miss_weight),
        _taint_factors(query, candidates),
        strict=True,
    ):
        queued, used_blocks, requests = load
        if not query.block_size:
            block_size = block_size_of(query, candidate.instance.block_size)
            blocks = -(-total_tokens // block_size)
        credit = 0.0
        if (row := matches.get(placement)) is not None:
            _, on_device, _, on_any_tier = row
            credit = full_credit * on_device
            if has_credit_decay and blocks:
                excess = (queued - least_queued) / block_size / blocks
                credit /= 1.0 + credit_decay * excess
            if on_any_tier > on_device and not is_decode:
                credit += _lower_tier_credit(row, cost_settings)
            if assumes_reuse:
                used_blocks -= min(used_blocks, on_any_tier)
        prefill, decode = 0.0, float(used_blocks + blocks)
        if is_decode:
            decode = decode - credit if decode > credit else 0.0
        elif not is_dynamo:
            to_compute, slowness = works[len(costs)]
            uncached = total_tokens / block_size - credit
            prefill = to_compute / block_size
            if uncached > 0:
                prefill += uncached_weight * uncached
            prefill *= scale * slowness
            decode *= held_weight
        elif (work := (queued + total_tokens) / block_size) > credit:
            prefill = scale * (work - credit)
        active = held_weight * request_weight * (requests + 1)
        costs.append((prefill + decode + active + misses) * factor)
        parts.append((prefill, decode, active, misses, credit, factor))
    return CandidateCosts(candidates, costs, loads, parts)


def _lower_tier_credit(row: SourceMatch, cost_settings: CostSettings) -> float:
    """The credit of the blocks held on host or disk only."""
    host_credit = cost_settings.host_cache_hit_weight * (row.host_blocks - row.device_blocks)
    return host_credit + cost_settings.disk_cache_hit_weight * (row.disk_blocks - row.host_blocks)


def _recent_miss_terms(
    query: Query,
    candidates: Candidates,
    placements: Sequence[Placement],
    view: View,
    weight: float,
) -> list[float]:
    if view.recent_prefill is None or weight == 0 or not query.total_tokens:
        return [0.0] * len(candidates)
    recent_misses = view.recent_prefill.blocks_of(placements, view.now)
    blocks = bookable_decode_blocks(query, block_size_of(query, candidates[0].instance.block_size))
    reference = sum(recent_misses) / len(recent_misses) + blocks
    return [weight * blocks * m / (m + reference) for m in recent_misses]


def load_cost(load: LoadTotals, block_size: int, taint_factor: float) -> float:
    """(1 + prefill_tokens / block_size + decode_blocks + requests) * taint_factor, in blocks.
    Requests of unknown length count by their number; the 1 makes a preferred taint decide among
    idle workers.
    """
    work = load.prefill_tokens / block_size + load.decode_blocks + load.requests
    return (1.0 + work) * taint_factor


def preferred_taint_factor(worker: Instance, constraints: RoutingConstraints | None) -> float:
    """exp(-tanh(sum of weights of matching preferred taints)), in [1/e, e]; as in Dynamo 1.6."""
    if constraints is None or not constraints.preferred_taints:
        return 1.0
    weights = constraints.preferred_taints.items()
    return math.exp(-math.tanh(sum(w for taint, w in weights if taint in worker.taints)))


def select_cheapest(scored: Sequence[ScoredCandidate], rng: Random, reason: str) -> Selection:
    """The candidate with the lowest cost; a random one of several."""
    candidate_costs = CandidateCosts.of(scored)
    costs = candidate_costs.costs
    least = min(costs)
    cheapest = [at for at, cost in enumerate(costs) if cost == least]
    chosen = cheapest[0]
    if len(cheapest) > 1:
        chosen = cheapest[rng.randrange(len(cheapest))]
        reason = f"{reason}, drawn among {len(cheapest)} equals"
    return Selection(candidate_costs.candidates[chosen], reason, candidate_costs)


def _load_costs(query: Query, candidates: Candidates, view: View) -> CandidateCosts:
    loads = [view.load(c.placement) for c in candidates]
    block_sizes = [block_size_of(query, c.instance.block_size) for c in candidates]
    costs = list(map(load_cost, loads, block_sizes, _taint_factors(query, candidates)))
    return CandidateCosts(candidates, costs, loads)


def _taint_factors(query: Query, candidates: Candidates) -> list[float]:
    constraints = query.routing.routing_constraints if query.routing else None
    if constraints is None or not constraints.preferred_taints:
        return [1.0] * len(candidates)
    return [preferred_taint_factor(c.instance, constraints) for c in candidates]
