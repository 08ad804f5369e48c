"""Selectors: choose one of the eligible candidates (pure).

A selector is stateless: the View contains what it needs of the past (the last choice, the loads,
recent prefill work). Ties are broken uniformly at random.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from types import MappingProxyType
from typing import Protocol

from mypy_extensions import mypyc_attr

from common.errors import InvalidRequest
from common.request.placement import Query
from router_svc.core.candidate import Candidate, Candidates
from router_svc.core.candidate_costs import CandidateCosts, Scored
from router_svc.core.cost import (
    draw_index,
)
from router_svc.core.eligibility import pinned_worker_id
from router_svc.core.scoring import View, load_costs, score_candidates


@dataclass(slots=True)
class Selection:
    """The result of a selector: the chosen candidate, the reason, and all priced candidates."""

    candidate: Candidate
    reason: str
    scored: Scored = ()


class WorkerSelector(Protocol):
    """The placement policy. `name` labels metrics and explanations."""

    @property
    def name(self) -> str: ...

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        """Returns one of `candidates`, which are never empty and sorted by placement. May raise a
        MeshError for queries that it cannot serve; any other exception fails the query
        (SELECTOR_FAILED).
        """


@mypyc_attr(allow_interpreted_subclasses=True)
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


@mypyc_attr(allow_interpreted_subclasses=True)
class DynamoSelector(KvSelector):
    """The least cost by the formula of NVIDIA Dynamo 1.6; see `cost`."""

    name = "dynamo"
    is_dynamo = True


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundRobinSelector:
    """Each candidate in turn."""

    name = "round_robin"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        if view.last is None:
            return Selection(candidates[0], "first of the round")
        after = bisect_right(candidates, view.last, key=attrgetter("placement"))
        return Selection(candidates[after % len(candidates)], "next in the round")


@mypyc_attr(allow_interpreted_subclasses=True)
class RandomSelector:
    """Each candidate with equal probability."""

    name = "random"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        return Selection(candidates[rng.randrange(len(candidates))], "drawn at random")


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastLoadedSelector:
    """The candidate with the least estimated load, in blocks; see `load_cost`."""

    name = "least_loaded"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        return select_cheapest(load_costs(query, candidates, view), rng, "least load")


@mypyc_attr(allow_interpreted_subclasses=True)
class PowerOfTwoSelector:
    """The less loaded of two candidates drawn at random."""

    name = "power_of_two"

    def select(self, query: Query, candidates: Candidates, view: View, rng: Random) -> Selection:
        drawn = rng.sample(candidates, 2) if len(candidates) > 2 else candidates
        return select_cheapest(load_costs(query, drawn, view), rng, "less load of two drawn")


@mypyc_attr(allow_interpreted_subclasses=True)
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
        return select_cheapest(load_costs(query, candidates, view), rng, "pinned by the request")


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


# The selectors that use CostSettings.
COST_SELECTORS = frozenset(("kv", "dynamo"))


def _any_publishes_kv_events(candidates: Candidates) -> bool:
    for candidate in candidates:  # noqa: SIM110 -- a generator takes twice as long.
        if candidate.instance.kv_index == "events":
            return True
    return False


def select_cheapest(scored: Scored, rng: Random, reason: str) -> Selection:
    """Returns the candidate with the lowest cost; a random one of several."""
    candidate_costs = CandidateCosts.of(scored)
    costs = candidate_costs.costs
    least = min(costs)
    cheapest = [at for at, cost in enumerate(costs) if cost == least]
    chosen = cheapest[0]
    if len(cheapest) > 1:
        chosen = cheapest[rng.randrange(len(cheapest))]
        reason = f"{reason}, drawn among {len(cheapest)} equals"
    return Selection(candidate_costs.candidates[chosen], reason, candidate_costs)
