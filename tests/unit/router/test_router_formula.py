"""Dynamo's formula of a placement, term by term and as properties; see `cost`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.events import Source
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RouterConfigOverride
from router_svc.core.candidate import Candidate
from router_svc.core.candidate_costs import CandidateCosts
from router_svc.core.cost import CostSettings, draw_index
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.scoring import View, score_candidates
from router_svc.core.selectors import DynamoSelector

B = 16
PLAIN = CostSettings(decode_active_request_weight=0.0, recent_miss_weight=0.0)
NO_LOAD = (0, 0, 0)


def priced(
    blocks: int,
    *ranks: tuple[tuple[int, int, int], tuple[int, int, int]],
    leg: Any = "whole",
    **cost_settings: Any,
) -> CandidateCosts:
    """One worker for each (load, held): load is queued tokens, blocks, requests; held are leading
    blocks on the device, on the host and on disk, cumulative.
    """
    load_tracker, matches, members = LoadTracker(), {}, []
    for number, ((tokens, used, requests), held) in enumerate(ranks, 1):
        report = Load(waiting_tokens=tokens, kv_used_blocks=used, running=requests)
        load_tracker.report(number, 0, report, 0.0)
        matches[number, 0] = SourceMatch(Source(number), *held)
        instance = Instance(
            number, "mesh", "worker", "", "127.0.0.1:1", model="m", block_size=B, kv_index="events"
        )
        members.append(Candidate(Placement(number, 0), instance))
    view = View(load_tracker, 0.0, None, matches, leg, replace(PLAIN, **cost_settings))
    query = Query("m", blocks * B, bytes(8 * blocks), 1, B)
    return score_candidates(query, members, view, is_dynamo=True)


def cost(*args: Any, **fields: Any) -> float:
    return priced(*args, **fields)[0].cost


def tokens(blocks: int) -> int:
    return blocks * B


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # W1, W2, W3 of the documented example: prefill 10 - 2 and decode 10; 5 and 5; 2 and 9.
        (((tokens(8), 8, 0), (2, 2, 2)), 18.0),
        (((tokens(3), 3, 0), NO_LOAD), 10.0),
        (((0, 7, 0), NO_LOAD), 11.0),
        # Each tier by its own weight, for blocks that faster tiers lack.
        (((0, 0, 0), (0, 2, 2)), 2 - 0.75 * 2 + 2),
        (((0, 0, 0), (0, 0, 2)), 2 - 0.25 * 2 + 2),
        (((0, 0, 0), (1, 2, 2)), 2 - 1 - 0.75 + 2),
    ],
)
def test_two_blocks_cost_the_documented_value(fields: Any, expected: float) -> None:
    assert cost(2, fields) == expected


@pytest.mark.parametrize(
    ("cost_settings", "expected"),
    [
        ({}, 4.0 + 6 + 8),
        ({"prefill_load_scale": 3.0}, 3 * 4.0 + 6 + 8),
        ({"prefill_load_scale": 0.0}, 6 + 8),
        ({"overlap_score_credit": 0.5}, 7.0 + 6 + 8),
        ({"overlap_score_credit": 0.0}, 10.0 + 6 + 8),
        ({"decode_active_request_weight": 2.0}, 4.0 + 6 + 8 + 2 * (5 + 1)),
        ({"assume_kv_reuse": True}, 4.0 + 6 + 8 - 6),
    ],
)
def test_each_setting_changes_its_own_term(cost_settings: dict[str, Any], expected: float) -> None:
    """8 blocks, of which 6 are held, on a rank with 2 queued blocks, 6 held ones and 5 requests."""
    assert cost(8, ((tokens(2), 6, 5), (6, 6, 6)), **cost_settings) == expected


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0, 4.0])
def test_the_older_weight_gives_the_older_formula(weight: float) -> None:
    """weight * (prefill blocks - overlap) + decode blocks."""
    override = RouterConfigOverride(overlap_score_weight=weight)
    cost_settings = PLAIN.with_override(override)
    fields = {
        "prefill_load_scale": cost_settings.prefill_load_scale,
        "overlap_score_credit": cost_settings.overlap_score_credit,
    }
    assert cost(8, ((tokens(2), 6, 0), (6, 6, 6)), **fields) == weight * (10 - 6) + 14


@pytest.mark.parametrize(
    ("decay", "queued", "credit"),
    [(0.0, 99, 8.0), (1.0, 0, 8.0), (1.0, 8, 4.0), (1.0, 24, 2.0), (3.0, 8, 2.0), (0.5, 16, 4.0)],
)
def test_credit_decays_with_the_queue_above_the_least_loaded_rank(
    decay: float, queued: int, credit: float
) -> None:
    """excess counts requests of this size (8 blocks) above the least loaded of the eligible."""
    least = ((tokens(5), 0, 0), NO_LOAD)
    busy = ((tokens(5 + queued), 0, 0), (8, 8, 8))
    terms = priced(8, busy, least, overlap_score_credit_decay=decay)[0].terms
    assert terms is not None
    assert terms.overlap_credit == credit


@pytest.mark.parametrize(
    ("credit", "used", "expected"), [(0.0, 5, 13.0), (1.0, 5, 5.0), (1.0, 0, 0.0), (2.0, 5, 0.0)]
)
def test_a_decode_leg_with_credit_saves_the_blocks_that_it_holds(
    credit: float, used: int, expected: float
) -> None:
    """max(0, decode blocks - credit); tokens queued for prefill do not count."""
    rank = ((tokens(1000), used, 0), (8, 8, 8))
    assert cost(8, rank, leg="decode", overlap_score_credit=credit) == expected


LOAD = st.tuples(st.integers(0, 9999), st.integers(0, 999), st.integers(0, 50))


@settings(max_examples=80, deadline=None)
@given(
    load=LOAD,
    depth=st.integers(0, 40),
    more=st.integers(0, 9),
    decay=st.floats(0, 3),
    leg=st.sampled_from(["whole", "decode"]),
)
def test_more_cache_never_costs_more_and_more_load_never_less(
    load: tuple[int, int, int], depth: int, more: int, decay: float, leg: str
) -> None:
    cost_settings = {"overlap_score_credit_decay": decay, "decode_active_request_weight": 1.0}
    other = (NO_LOAD, NO_LOAD)
    held = (depth, depth, depth)
    base = cost(40, (load, held), other, leg=leg, **cost_settings)
    warmer = min(40, depth + more)
    assert (
        cost(40, (load, (warmer, warmer, warmer)), other, leg=leg, **cost_settings) <= base + 1e-9
    )
    for term in range(3):
        busier = tuple(value + more * (term == at) for at, value in enumerate(load))
        assert cost(40, (busier, held), other, leg=leg, **cost_settings) >= base - 1e-9


@settings(max_examples=60, deadline=None)
@given(
    held=st.lists(st.integers(0, 40), min_size=3, max_size=3).map(sorted),
    more=st.lists(st.integers(0, 9), min_size=3, max_size=3).map(sorted),
)
def test_more_on_a_faster_tier_never_costs_more(held: list[int], more: list[int]) -> None:
    """Without decay, which only the device's credit has."""
    before = (held[0], held[1], held[2])
    after = tuple(min(40, depth + extra) for depth, extra in zip(held, more, strict=True))
    assert cost(40, (NO_LOAD, after)) <= cost(40, (NO_LOAD, before)) + 1e-9


# The selection.


@pytest.mark.parametrize(
    ("u", "index"),
    [(0.0, 0), (0.5064, 0), (0.5066, 1), (0.6928, 1), (0.6931, 2), (0.9999, 2)],
)
def test_a_draw_is_the_inverse_of_the_softmax_of_normalised_costs(u: float, index: int) -> None:
    """Costs 10, 20, 15 scale to 0, 1, 0.5: weights 1, 1/e, 1/sqrt(e), shares 0.5065, 0.1863, …"""
    assert draw_index([10.0, 20.0, 15.0], 1.0, u) == index


@given(
    costs=st.lists(st.integers(0, 1000), min_size=1, max_size=6),
    shift=st.integers(0, 1000),
    scale=st.sampled_from([0.25, 0.5, 2.0, 8.0]),
    temperature=st.floats(0.05, 10),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_does_not_depend_on_the_unit_of_the_costs(
    costs: list[int], shift: int, scale: float, temperature: float, u: float
) -> None:
    plain = draw_index([float(c) for c in costs], temperature, u)
    assert draw_index([c * scale for c in costs], temperature, u) == plain
    assert draw_index([float(c + shift) for c in costs], temperature, u) == plain


@pytest.mark.parametrize(("u", "index"), [(0.0, 0), (0.249, 0), (0.25, 1), (0.75, 3), (0.999, 3)])
def test_equal_costs_are_drawn_equally(u: float, index: int) -> None:
    assert draw_index([7.0] * 4, 0.001, u) == index


def chosen(seed: int, temperature: float, *used: int) -> int:
    load_tracker, members = LoadTracker(), []
    for number, blocks in enumerate(used, 1):
        load_tracker.report(number, 0, Load(kv_used_blocks=blocks), 0.0)
        instance = Instance(number, "mesh", "worker", "", "127.0.0.1:1", model="m", block_size=B)
        members.append(Candidate(Placement(number, 0), instance))
    view = View(load_tracker, 0.0, cost_settings=replace(PLAIN, router_temperature=temperature))
    choice = DynamoSelector().select(Query("m", B), members, view, Random(seed))
    return choice.candidate.placement.worker_id


def test_without_temperature_only_the_cheapest_are_drawn_equally() -> None:
    drawn = Counter(chosen(seed, 0.0, 3, 3, 4, 3) for seed in range(600))
    assert set(drawn) == {1, 2, 4}
    assert all(150 <= count <= 250 for count in drawn.values()), drawn


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_with_temperature_workers_are_drawn_by_the_softmax(temperature: float) -> None:
    draws = 1500
    drawn = Counter(chosen(seed, temperature, 0, 10, 5) for seed in range(draws))
    weights = {1: 1.0, 2: math.exp(-1 / temperature), 3: math.exp(-0.5 / temperature)}
    for worker_id, weight in weights.items():
        share = weight / sum(weights.values())
        spread = 5 * math.sqrt(draws * share * (1 - share))
        assert abs(drawn[worker_id] - draws * share) < spread, drawn
