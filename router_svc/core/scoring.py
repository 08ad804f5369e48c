"""The costs of candidates, by the formula of `cost.py` or by load alone (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingConstraints
from router_svc.core.candidate import NO_MATCHES, Candidates, Leg, LoadTotals, Matches
from router_svc.core.candidate_costs import CandidateCosts, TermValues
from router_svc.core.cost import (
    DEFAULT_COST_SETTINGS,
    CostSettings,
    RecentPrefill,
)
from router_svc.core.key_affinity import KeyHome
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.overlap import raised_match
from router_svc.core.query import UNKNOWN_PROMPT_TOKENS, block_size_of, bookable_decode_blocks

# Of more candidates, only the costs are stored; the parts are computed when they are read.
PRICED_AT_ONCE_MAX = 8


@dataclass(slots=True)
class View:
    """The inputs of a selector."""

    load_tracker: LoadTracker
    now: float
    last: Placement | None = None
    """The placement chosen before for the same model and leg, None at first."""

    matches: Matches = field(default_factory=lambda: NO_MATCHES)
    """What placements hold of the prompt; absent ones hold nothing."""

    leg: Leg = "whole"
    cost_settings: CostSettings = DEFAULT_COST_SETTINGS
    """Of this request and leg."""

    recent_prefill: RecentPrefill | None = None
    """None: recent prefill work is not counted."""

    key_home: KeyHome | None = None
    """The rank that the affinity key of the request prefers; None: none."""

    def load(self, placement: Placement) -> LoadTotals:
        return self.load_tracker.ranks.load(placement, self.now)

    def overlap(self, placement: Placement) -> int:
        """Returns leading blocks of the prompt that the rank holds on any tier."""
        row = self.matches.get(placement)
        return 0 if row is None else row.disk_blocks


def score_candidates(
    query: Query, candidates: Candidates, view: View, *, is_dynamo: bool = False
) -> CandidateCosts:
    """Returns every candidate with its cost, by a formula of `cost`."""
    now, cost_settings = view.now, view.cost_settings
    ranks = view.load_tracker.ranks
    placements = [c.placement for c in candidates]
    loads = [ranks.load(placement, now) for placement in placements]
    works, slownesses = list[float](), list[float]()
    miss_weight = 0.0
    if not (is_dynamo or view.leg == "decode"):
        works, slownesses = ranks.prefill_work(placements, now)
        miss_weight = cost_settings.uncached_block_weight * cost_settings.recent_miss_weight
    misses = _recent_miss_terms(query, candidates, placements, view, miss_weight)
    factors = _taint_factors(query, candidates)
    prices = _Prices(query, view, is_dynamo, candidates, loads, works, slownesses, misses, factors)
    costs: list[float] = []
    if len(candidates) > PRICED_AT_ONCE_MAX:
        prices.price(range(len(candidates)), costs, None)
        return CandidateCosts(candidates, costs, loads, None, prices.parts)
    parts: list[TermValues] = []
    prices.price(range(len(candidates)), costs, parts)
    return CandidateCosts(candidates, costs, loads, parts)


@dataclass(slots=True, eq=False)
class _Prices:
    """What costs are computed from; the lists have a value for each candidate."""

    query: Query
    view: View
    is_dynamo: bool
    candidates: Candidates
    loads: list[LoadTotals]
    works: list[float]
    slownesses: list[float]
    misses: list[float]
    factors: list[float]

    def parts(self, indexes: Sequence[int]) -> list[TermValues]:
        """Returns the fields of `Terms` of these candidates."""
        parts: list[TermValues] = []
        self.price(indexes, [], parts)
        return parts

    def price(
        self, indexes: Sequence[int], costs: list[float], parts: list[TermValues] | None
    ) -> None:
        """Appends the costs of these candidates, and their parts. Optimized: most of a decision."""
        query, view, is_dynamo = self.query, self.view, self.is_dynamo
        candidates, loads, works = self.candidates, self.loads, self.works
        slownesses, misses, factors = self.slownesses, self.misses, self.factors
        cost_settings, matches = view.cost_settings, view.matches
        is_decode = view.leg == "decode"
        credit_decay = cost_settings.overlap_score_credit_decay
        has_credit_decay = cost_settings.track_prefill_tokens and credit_decay > 0
        least_queued = min([load[0] for load in loads]) if has_credit_decay else 0
        full_credit = cost_settings.overlap_score_credit
        assumes_reuse = cost_settings.assume_kv_reuse
        scale = cost_settings.prefill_load_scale
        uncached_weight = cost_settings.uncached_block_weight
        request_weight = cost_settings.decode_active_request_weight
        held_weight = 1.0 if is_dynamo or is_decode else cost_settings.held_block_weight
        total_tokens, block_size = query.total_tokens, query.block_size
        if (home := view.key_home) is not None:
            known = matches.get(home.placement)
            if known is None or known[1] < home.blocks:
                raised = raised_match(known, home.placement, home.blocks)
                matches = {**matches, home.placement: raised}
            total_tokens = total_tokens or UNKNOWN_PROMPT_TOKENS
        blocks = -(-total_tokens // block_size) if block_size else 0
        for at in indexes:
            candidate, factor = candidates[at], factors[at]
            queued, used_blocks, requests = loads[at]
            if not query.block_size:
                block_size = block_size_of(query, candidate.instance.block_size)
                blocks = -(-total_tokens // block_size)
            credit = 0.0
            if (row := matches.get(candidate.placement)) is not None:
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
                uncached = total_tokens / block_size - credit
                prefill = works[at] / block_size
                if uncached > 0:
                    prefill += uncached_weight * uncached
                prefill *= scale * slownesses[at]
                decode *= held_weight
            elif (work := (queued + total_tokens) / block_size) > credit:
                prefill = scale * (work - credit)
            active, miss = held_weight * request_weight * (requests + 1), misses[at]
            costs.append((prefill + decode + active + miss) * factor)
            if parts is not None:
                parts.append((prefill, decode, active, miss, credit, factor))


def _lower_tier_credit(row: SourceMatch, cost_settings: CostSettings) -> float:
    """Returns the credit of the blocks held on host or disk only."""
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
    """Returns (1 + prefill_tokens / block_size + decode_blocks + requests) * taint_factor, in
    blocks. Requests of unknown length count by their number; the 1 makes a preferred taint
    decide among idle workers.
    """
    work = load.prefill_tokens / block_size + load.decode_blocks + load.requests
    return (1.0 + work) * taint_factor


def preferred_taint_factor(worker: Instance, constraints: RoutingConstraints | None) -> float:
    """Returns exp(-tanh(sum of weights of matching preferred taints)), in [1/e, e]; as in Dynamo
    1.6."""
    if constraints is None or not constraints.preferred_taints:
        return 1.0
    weights = constraints.preferred_taints.items()
    return math.exp(-math.tanh(sum(w for taint, w in weights if taint in worker.taints)))


def load_costs(query: Query, candidates: Candidates, view: View) -> CandidateCosts:
    loads = [view.load(c.placement) for c in candidates]
    block_sizes = [block_size_of(query, c.instance.block_size) for c in candidates]
    costs = list(map(load_cost, loads, block_sizes, _taint_factors(query, candidates)))
    return CandidateCosts(candidates, costs, loads)


def _taint_factors(query: Query, candidates: Candidates) -> list[float]:
    constraints = query.routing.routing_constraints if query.routing else None
    if constraints is None or not constraints.preferred_taints:
        return [1.0] * len(candidates)
    return [preferred_taint_factor(c.instance, constraints) for c in candidates]
