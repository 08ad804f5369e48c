"""Policies that a replay compares: the router's selectors, and those of other projects.

The rivals are written from their documentation, with its defaults:

- `sglang_cache_aware` (SGLang router): with the loads in balance, the worker with the longest
  prefix in an approximate tree if it covers `cache_threshold` of the prompt, else the worker with
  the smallest tree; else the worker with the fewest requests.
- `llm_d` (llm-d, precise prefix cache scorer): 3, 2 and 2 parts of prefix, free KV share and short
  queue; the highest sum, a random one of equals. The queue is scaled to 0..1 over the workers, the
  prefix over those that have one.
- `dynamo` (NVIDIA Dynamo 1.6): its cost with its defaults.

`kv_approx` is `kv` without KV events: caches are approximated from decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

from common.kv.load import Load
from common.request.placement import Placement, Query
from router_svc.core.approx_index import ApproxLimits
from router_svc.core.candidate import Candidates
from router_svc.core.candidate_costs import ScoredCandidate
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings
from router_svc.core.overlap import EVENT_INDEX_SETTINGS, IndexSettings, derive_index_settings
from router_svc.core.scoring import View
from router_svc.core.selectors import SELECTORS, Selection, WorkerSelector, select_cheapest

Reports = Mapping[Placement, Load]


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """A selector with its settings. make_selector: called once for each router with the newest
    load report of each rank.
    """

    name: str
    make_selector: Callable[[Reports], WorkerSelector]
    cost_settings: CostSettings = DEFAULT_COST_SETTINGS
    index_settings: IndexSettings = EVENT_INDEX_SETTINGS


@dataclass(slots=True)
class CacheAwareSelector:
    """See the module."""

    name: str = "sglang_cache_aware"
    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    _tree_blocks: dict[Placement, int] = field(default_factory=dict)

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        selection = self._select(query, candidates, view, rng)
        at = selection.candidate.placement
        blocks = len(query.prefix_hashes) // 8
        self._tree_blocks[at] = self._tree_blocks.get(at, 0) + blocks - view.overlap(at)
        return selection

    def _select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        loads = [view.load_tracker.ranks.load(c.placement, view.now) for c in candidates]
        requests = [load.requests for load in loads]
        most, least = max(requests), min(requests)
        if most - least > self.balance_abs_threshold and most > self.balance_rel_threshold * least:
            costs: list[float] = [float(count) for count in requests]
            reason = "fewest requests: loads are out of balance"
        else:
            overlaps = [view.overlap(c.placement) for c in candidates]
            prompt_blocks = query.total_tokens / query.block_size
            if max(overlaps) > self.cache_threshold * prompt_blocks:
                costs, reason = [-float(blocks) for blocks in overlaps], "longest prefix"
            else:
                costs = [float(self._tree_blocks.get(c.placement, 0)) for c in candidates]
                reason = "smallest tree"
        scored = [ScoredCandidate(*row) for row in zip(candidates, costs, loads, strict=True)]
        return select_cheapest(scored, rng, reason)


@dataclass(frozen=True, slots=True)
class PreciseScorerSelector:
    """See the module."""

    reports: Reports
    name: str = "llm_d"
    weights: tuple[float, float, float] = (3.0, 2.0, 2.0)

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        loads = [view.load_tracker.ranks.load(c.placement, view.now) for c in candidates]
        reports = [self.reports.get(c.placement, Load()) for c in candidates]
        overlaps = [view.overlap(c.placement) for c in candidates]
        holders = _scaled([float(blocks) for blocks in overlaps if blocks])
        prefixes = [holders.pop(0) if blocks else 0.0 for blocks in overlaps]
        free = [1 - report.kv_used_blocks / (report.kv_total_blocks or 1) for report in reports]
        queues = _scaled([-float(report.waiting) for report in reports])
        a, b, c = self.weights
        scores = [a * x + b * y + c * z for x, y, z in zip(prefixes, free, queues, strict=True)]
        costs = [-score for score in scores]
        scored = [ScoredCandidate(*row) for row in zip(candidates, costs, loads, strict=True)]
        return select_cheapest(scored, rng, "highest score")


def _scaled(values: list[float]) -> list[float]:
    """Returns the values scaled so that the least is 0 and the greatest 1; all 1 if they are
    equal."""
    low = min(values, default=0.0)
    span = max(values, default=0.0) - low
    return [(value - low) / span if span else 1.0 for value in values]


def _built_in(name: str) -> Callable[[Reports], WorkerSelector]:
    return lambda _: SELECTORS[name]()


# As the router's defaults.
_PREDICTED = derive_index_settings(
    overlap_score_credit=1.0, kv_events=True, limits=ApproxLimits(), predicted_ttl_s=5.0
)
_APPROXIMATE = derive_index_settings(
    overlap_score_credit=1.0, kv_events=False, limits=ApproxLimits(), predicted_ttl_s=0.0
)
# Entries of the approximate tree last as long as they fit.
_TREE = ApproxLimits(ttl_s=1e9, blocks_max=1 << 18)

POLICIES: Mapping[str, ReplayPolicy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            ReplayPolicy("kv", _built_in("kv"), index_settings=_PREDICTED),
            ReplayPolicy("kv_approx", _built_in("kv"), index_settings=_APPROXIMATE),
            ReplayPolicy("least_loaded", _built_in("least_loaded")),
            ReplayPolicy("random", _built_in("random")),
            ReplayPolicy("round_robin", _built_in("round_robin")),
            ReplayPolicy("power_of_two", _built_in("power_of_two")),
            ReplayPolicy("dynamo", _built_in("dynamo"), CostSettings(assume_kv_reuse=True)),
            ReplayPolicy("llm_d", PreciseScorerSelector),
            ReplayPolicy(
                "sglang_cache_aware",
                lambda _: CacheAwareSelector(),
                index_settings=derive_index_settings(
                    overlap_score_credit=1.0, kv_events=False, limits=_TREE, predicted_ttl_s=0.0
                ),
            ),
        )
    }
)
