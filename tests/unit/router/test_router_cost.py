"""The costs of a placement: Dynamo's formula and ours, their settings, the draw by temperature."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.kv.events import Source
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RouterConfigOverride, RoutingConstraints, RoutingHints
from router_svc.core.candidate import Candidate, Leg, Matches
from router_svc.core.candidate_costs import CandidateCosts
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings, RecentPrefill, draw_index
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.query import predicted_cached_tokens
from router_svc.core.scoring import View, score_candidates
from router_svc.core.selectors import DynamoSelector

B = 16
PLAIN = CostSettings(decode_active_request_weight=0.0, recent_miss_weight=0.0)


def candidate(worker_id: int, **facts: Any) -> Candidate:
    given: dict[str, Any] = {"model": "m", "block_size": B, "kv_index": "events", **facts}
    instance = Instance(worker_id, "mesh", "worker", "", "127.0.0.1:1", **given)
    return Candidate(Placement(worker_id, 0), instance)


def loaded(*loads: tuple[int, int, int]) -> LoadTracker:
    """A tracker with reports of workers 1, 2, …: (queued tokens, blocks, requests)."""
    load_tracker = LoadTracker()
    for worker_id, (tokens, blocks, requests) in enumerate(loads, 1):
        load = Load(waiting_tokens=tokens, kv_used_blocks=blocks, running=requests)
        load_tracker.report(worker_id, 0, load, 0.0)
    return load_tracker


def holding(**depths: int) -> Matches:
    """w1=3: worker 1 holds three leading blocks on its device."""
    return {
        Placement(int(name[1:]), 0): SourceMatch(Source(int(name[1:])), depth, depth, depth)
        for name, depth in depths.items()
    }


def prices(
    blocks: int,
    load_tracker: LoadTracker,
    *,
    workers: int,
    matches: Matches | None = None,
    cost_settings: CostSettings = PLAIN,
    leg: Leg = "whole",
    recent_prefill: RecentPrefill | None = None,
    routing: RoutingHints | None = None,
    is_dynamo: bool = True,
) -> CandidateCosts:
    query = Query("m", blocks * B, bytes(8 * blocks), 1, B, routing=routing)
    view = View(load_tracker, 0.0, None, matches or {}, leg, cost_settings, recent_prefill)
    candidates = [candidate(n) for n in range(1, workers + 1)]
    return score_candidates(query, candidates, view, is_dynamo=is_dynamo)


def costs(*args: Any, **facts: Any) -> list[float]:
    return [one.cost for one in prices(*args, **facts)]


def test_the_documented_example_of_three_workers_is_reproduced() -> None:
    load_tracker = loaded((8 * B, 8, 0), (3 * B, 3, 0), (0, 7, 0))
    assert costs(2, load_tracker, workers=3, matches=holding(w1=2)) == [18.0, 10.0, 11.0]


def test_ten_cached_blocks_are_worth_ten_blocks_of_decode() -> None:
    for more, sign in ((9, -1), (10, 0), (11, 1)):
        holder, other = costs(
            20, loaded((0, more, 0), (0, 0, 0)), workers=2, matches=holding(w1=10)
        )
        assert math.copysign(1, holder - other) * (holder != other) == sign


def test_the_credit_never_exceeds_the_work() -> None:
    cost_settings = CostSettings(
        overlap_score_credit=5.0, decode_active_request_weight=0.0, recent_miss_weight=0.0
    )
    (one,) = prices(
        4, loaded((0, 0, 0)), workers=1, matches=holding(w1=4), cost_settings=cost_settings
    )
    assert one.terms is not None
    assert (one.terms.prefill, one.terms.overlap_credit, one.cost) == (0.0, 20.0, 4.0)


def test_a_decay_of_one_halves_the_credit_at_one_request_of_excess() -> None:
    cost_settings = CostSettings(
        overlap_score_credit_decay=1.0, decode_active_request_weight=0.0, recent_miss_weight=0.0
    )
    load_tracker = loaded((8 * B, 0, 0), (0, 0, 0))
    busy, _ = prices(8, load_tracker, workers=2, matches=holding(w1=8), cost_settings=cost_settings)
    assert busy.terms is not None
    assert busy.terms.overlap_credit == 4.0
    untracked = CostSettings(overlap_score_credit_decay=1.0, track_prefill_tokens=False)
    busy, _ = prices(8, load_tracker, workers=2, matches=holding(w1=8), cost_settings=untracked)
    assert busy.terms is not None
    assert busy.terms.overlap_credit == 8.0


def test_lower_tiers_get_their_own_credit_for_blocks_missing_on_the_device() -> None:
    matches: Matches = {Placement(1, 0): SourceMatch(Source(1), 4, 6, 10)}
    (one,) = prices(16, loaded((0, 0, 0)), workers=1, matches=matches)
    assert one.terms is not None
    assert one.terms.overlap_credit == 4 + 0.75 * 2 + 0.25 * 4


def test_requests_count_by_the_configured_weight_and_taints_multiply() -> None:
    cost_settings = CostSettings(decode_active_request_weight=2.0, recent_miss_weight=0.0)
    likes = RoutingConstraints(required_taints=frozenset(), preferred_taints={"fast": 1.0})
    query = Query("m", 4 * B, routing=RoutingHints(routing_constraints=likes))
    view = View(loaded((0, 0, 3), (0, 0, 3)), 0.0, cost_settings=cost_settings)
    candidates = [candidate(1), candidate(2, taints=frozenset({"fast"}))]
    plain, fast = score_candidates(query, candidates, view, is_dynamo=True)
    assert plain.cost == 4 + 4 + 2 * 4
    assert fast.cost == pytest.approx(plain.cost * math.exp(-math.tanh(1.0)))


def test_the_cost_of_a_decode_leg_is_load_only() -> None:
    cost_settings = DEFAULT_COST_SETTINGS.for_decode_leg()
    load_tracker = loaded((500 * B, 0, 0), (0, 5, 1))
    missed = RecentPrefill(60.0)
    missed.add(Placement(1, 0), 100, 0.0)
    first, second = costs(
        8,
        load_tracker,
        workers=2,
        matches=holding(w2=8),
        cost_settings=cost_settings,
        leg="decode",
        recent_prefill=missed,
    )
    assert (first, second) == (8 + 1, 8 + 5 + 2)


def test_kv_reuse_subtracts_cached_blocks_up_to_the_blocks_in_use() -> None:
    cost_settings = CostSettings(
        assume_kv_reuse=True, decode_active_request_weight=0.0, recent_miss_weight=0.0
    )
    load_tracker = loaded((0, 3, 0), (0, 100, 0))
    idle, busy = prices(
        8, load_tracker, workers=2, matches=holding(w1=8, w2=8), cost_settings=cost_settings
    )
    assert idle.terms is not None
    assert busy.terms is not None
    assert (idle.terms.decode, busy.terms.decode) == (8.0, 100.0)


def test_recent_misses_cost_at_most_as_much_as_the_request() -> None:
    missed = RecentPrefill(60.0)
    missed.add(Placement(1, 0), 1.0, 0.0)
    missed.add(Placement(2, 0), 1e6, 0.0)
    cost_settings = CostSettings(decode_active_request_weight=0.0)
    one, two, none = prices(
        100,
        loaded((0, 0, 0)),
        workers=3,
        cost_settings=cost_settings,
        recent_prefill=missed,
        is_dynamo=False,
    )
    assert one.terms is not None
    assert two.terms is not None
    assert none.terms is not None
    assert 0 < one.terms.misses < 2.0
    assert 140 < two.terms.misses < 200
    assert none.terms.misses == 0


LOADS = st.tuples(st.integers(0, 50_000), st.integers(0, 5_000), st.integers(0, 50))


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(0, 64),
    loads=st.lists(LOADS, min_size=1, max_size=5),
    depths=st.lists(st.integers(0, 64), min_size=5, max_size=5),
    credit=st.floats(0, 3),
    decay=st.floats(0, 3),
    scale=st.floats(0, 3),
    weight=st.floats(0, 3),
    leg=st.sampled_from(["whole", "prefill", "decode"]),
)
def test_costs_equal_the_formula_and_the_sum_of_their_terms(
    blocks: int,
    loads: list[tuple[int, int, int]],
    depths: list[int],
    credit: float,
    decay: float,
    scale: float,
    weight: float,
    leg: Leg,
) -> None:
    cost_settings = CostSettings(
        overlap_score_credit=credit,
        overlap_score_credit_decay=decay,
        prefill_load_scale=scale,
        decode_active_request_weight=weight,
        recent_miss_weight=0.0,
    )
    held = [min(depth, blocks) for depth in depths[: len(loads)]]
    matches = holding(**{f"w{n}": depth for n, depth in enumerate(held, 1) if depth})
    got = prices(
        blocks,
        loaded(*loads),
        workers=len(loads),
        matches=matches,
        cost_settings=cost_settings,
        leg=leg,
    )
    least = min(tokens for tokens, _, _ in loads)
    for one, (tokens, used, requests), depth in zip(got, loads, held, strict=True):
        excess = (tokens - least) / B / blocks if blocks else 0.0
        earned = credit / (1 + decay * excess) * depth
        if leg == "decode":
            work = max(0.0, used + blocks - earned)
        else:
            work = scale * max(0.0, (tokens + blocks * B) / B - earned) + used + blocks
        assert one.cost == pytest.approx(work + weight * (requests + 1))
        assert one.terms is not None
        assert one.terms.total == one.cost
        assert one.cost >= 0


# Settings of one request.


def test_a_request_overrides_the_settings_it_names() -> None:
    override = RouterConfigOverride(
        overlap_score_credit=0.5,
        prefill_load_scale=2.0,
        router_temperature=0.25,
        assume_kv_reuse=True,
        track_prefill_tokens=False,
    )
    cost_settings = CostSettings(decode_active_request_weight=3.0).with_override(override)
    assert cost_settings == CostSettings(
        overlap_score_credit=0.5,
        prefill_load_scale=2.0,
        router_temperature=0.25,
        assume_kv_reuse=True,
        track_prefill_tokens=False,
        decode_active_request_weight=3.0,
    )
    assert DEFAULT_COST_SETTINGS.with_override(None) is DEFAULT_COST_SETTINGS


def test_overlap_score_weight_sets_the_scale_and_its_zero_clears_the_credit() -> None:
    legacy = DEFAULT_COST_SETTINGS.with_override(RouterConfigOverride(overlap_score_weight=2.0))
    assert (legacy.prefill_load_scale, legacy.overlap_score_credit) == (2.0, 1.0)
    zero = DEFAULT_COST_SETTINGS.with_override(RouterConfigOverride(overlap_score_weight=0.0))
    assert (zero.prefill_load_scale, zero.overlap_score_credit) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        (RouterConfigOverride(overlap_score_credit=-1.0), "overlap_score_credit"),
        (RouterConfigOverride(prefill_load_scale=math.nan), "prefill_load_scale"),
        (RouterConfigOverride(router_temperature=math.inf), "router_temperature"),
        (RouterConfigOverride(shared_cache_multiplier=1.5), "shared_cache_multiplier"),
        (
            RouterConfigOverride(overlap_score_weight=1.0, prefill_load_scale=2.0),
            "overlap_score_weight",
        ),
    ],
)
def test_an_override_out_of_range_is_refused_and_named(
    override: RouterConfigOverride, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        DEFAULT_COST_SETTINGS.with_override(override)
    assert refused.value.field == f"query.config_override.{field}"


# Temperature.


@given(
    given_costs=st.lists(st.floats(0, 1e6), min_size=1, max_size=8),
    temperature=st.floats(0.01, 10),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_a_valid_index(given_costs: list[float], temperature: float, u: float) -> None:
    assert 0 <= draw_index(given_costs, temperature, u) < len(given_costs)


def test_a_lower_temperature_prefers_cheap_candidates_more() -> None:
    rng = Random(1)
    warm = Counter(draw_index([0.0, 5.0, 10.0], 1.0, rng.random()) for _ in range(2000))
    assert warm[0] > warm[1] > warm[2] > 200
    cold = Counter(draw_index([0.0, 5.0, 10.0], 0.05, rng.random()) for _ in range(2000))
    assert cold[0] > 1990
    even = Counter(draw_index([3.0, 3.0], 0.05, rng.random()) for _ in range(2000))
    assert 900 < even[0] < 1100


def test_a_temperature_makes_the_selector_draw() -> None:
    cost_settings = CostSettings(router_temperature=1.0, recent_miss_weight=0.0)
    view = View(loaded((0, 10, 0), (0, 0, 0)), 0.0, cost_settings=cost_settings)
    candidates = [candidate(1), candidate(2)]
    query, select = Query("m", B), DynamoSelector().select
    choices = [select(query, candidates, view, Random(seed)) for seed in range(200)]
    drawn = Counter(choice.candidate.placement.worker_id for choice in choices)
    assert drawn[2] > drawn[1] > 20
    assert "temperature" in choices[0].reason


# Predictions.


@given(total=st.integers(0, 2000), overlap=st.integers(0, 130), size=st.integers(1, 64))
def test_a_prediction_is_whole_blocks_and_never_the_last_token(
    total: int, overlap: int, size: int
) -> None:
    cached = predicted_cached_tokens(Query("m", total), overlap, size)
    assert cached == max(0, min(overlap * size, (total - 1) // size * size))
    assert cached % size == 0
    assert cached < max(total, 1)


# Recent prefill work.


def test_recent_prefill_halves_in_each_half_life_and_adds_up() -> None:
    missed = RecentPrefill(10.0)
    one, two, other = Placement(1, 0), Placement(2, 0), Placement(3, 0)
    assert missed.blocks_of([one], 0.0) == [0.0]
    missed.add(one, 8.0, 0.0)
    missed.add(two, 1.0, 10.0)
    missed.add(one, 1.0, 20.0)
    assert missed.blocks_of([one, two, other], 20.0) == pytest.approx([3.0, 0.5, 0.0])
    missed.forget(1)
    assert len(missed) == 1


@given(gaps=st.lists(st.floats(0, 1e5), min_size=1, max_size=20))
def test_recent_prefill_stays_exact_over_any_time(gaps: list[float]) -> None:
    missed, at, plain, now = RecentPrefill(10.0), Placement(1, 0), 0.0, 0.0
    for gap in gaps:
        now += gap
        plain = plain * 2.0 ** -(gap / 10.0) + 5.0
        missed.add(at, 5.0, now)
        assert missed.blocks_of([at], now) == pytest.approx([plain], rel=1e-6)
    assert missed.blocks_of([at], now + 1e9) == pytest.approx([0.0], abs=1e-9)
