"""The cost of the selector `kv`, and what the router learns about prompts in progress."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.events import Source
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from router_svc.core.booking import Booking, BookingKey
from router_svc.core.candidate import Candidate
from router_svc.core.cost import CostSettings
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.rank_load import PACE_PRIOR_S
from router_svc.core.scoring import View, score_candidates

B = 16
RATE = 1000
NO_MISSES = CostSettings(recent_miss_weight=0.0, decode_active_request_weight=0.0)


class Ranks:
    """Workers 1, 2, …, each with one rank, and their bookings."""

    def __init__(self) -> None:
        self.tracker = LoadTracker()
        self.tracker.open_session(7)
        self.count = 0
        for worker in (1, 2, 3):
            self.tracker.report(worker, 0, Load(), 0.0)

    def book(self, worker: int, tokens: int, now: float, blocks: int = 0) -> BookingKey:
        self.count += 1
        key = BookingKey(7, f"{self.count}", 0)
        self.tracker.expire(now)
        booking = Booking(key, "m", Placement(worker, 0), None, tokens, blocks)
        self.tracker.book(booking, None, now)
        return key

    def done(self, key: BookingKey, now: float) -> None:
        self.tracker.expire(now)
        assert self.tracker.mark_prefill_done(key)

    def compute(self, worker: int, tokens: int, start: float, seconds: float) -> None:
        """A prompt that takes so long; its request ends with its first token."""
        key = self.book(worker, tokens, start)
        self.done(key, start + seconds)
        self.tracker.free(key)

    def work(self, worker: int, now: float) -> tuple[float, float]:
        (work,), (slowness,) = self.tracker.ranks.prefill_work([Placement(worker, 0)], now)
        return work, slowness

    def costs(
        self, blocks: int, held: dict[int, int], now: float, workers: int = 2, **fields: Any
    ) -> list[float]:
        matches = {(n, 0): SourceMatch(Source(n), d, d, d) for n, d in held.items()}
        cost_settings = CostSettings(
            **{"recent_miss_weight": 0.0, "decode_active_request_weight": 0.0, **fields}
        )
        view = View(self.tracker, now, None, matches, "whole", cost_settings)
        candidates = [
            Candidate(
                Placement(n, 0),
                Instance(
                    *(n, "mesh", "worker", "", "127.0.0.1:1"),
                    model="m",
                    block_size=B,
                    kv_index="events",
                ),
            )
            for n in range(1, workers + 1)
        ]
        query = Query("m", blocks * B, bytes(8 * blocks), 1, B)
        return [one.cost for one in score_candidates(query, candidates, view)]


def test_the_cost_is_the_queue_twice_the_uncached_blocks_and_a_fiftieth_of_the_held_ones() -> None:
    ranks = Ranks()
    ranks.book(1, 5 * B, 0.0, blocks=50)
    # Worker 1: 5 queued + 2 x (10 - 4) + (50 + 10) / 50; worker 2: 2 x 10 + 10 / 50.
    assert ranks.costs(10, {1: 4}, 0.0) == pytest.approx([5 + 12 + 1.2, 20 + 0.2])


def test_each_weight_scales_its_own_term() -> None:
    ranks = Ranks()
    ranks.book(1, 5 * B, 0.0, blocks=50)
    assert ranks.costs(10, {1: 4}, 0.0, uncached_block_weight=3.0)[0] == pytest.approx(24.2)
    assert ranks.costs(10, {1: 4}, 0.0, held_block_weight=1.0)[0] == pytest.approx(77)
    assert ranks.costs(10, {1: 4}, 0.0, prefill_load_scale=2.0)[0] == pytest.approx(35.2)
    assert ranks.costs(10, {1: 4}, 0.0, overlap_score_credit=0.0)[0] == pytest.approx(26.2)


def test_a_prompt_in_progress_counts_less_over_time_but_never_below_the_others() -> None:
    ranks = Ranks()
    ranks.compute(1, 10 * RATE, 0.0, 10.0)
    ranks.book(1, 4 * RATE, 10.0)
    ranks.book(1, 2 * RATE, 10.0)
    left = [ranks.work(1, now)[0] for now in (10.0, 11.0, 12.0, 60.0)]
    # At most the mean prompt, 3000 tokens, is taken as done before a report of it.
    assert left == pytest.approx([6000, 5000, 4000, 3000])


def test_the_work_starts_again_at_the_end_of_each_prompt() -> None:
    ranks = Ranks()
    ranks.compute(1, 10 * RATE, 0.0, 10.0)
    first = ranks.book(1, 2 * RATE, 10.0)
    ranks.book(1, 2 * RATE, 11.0)
    ranks.done(first, 12.0)
    assert ranks.work(1, 12.0)[0] == pytest.approx(2000)
    assert ranks.work(1, 13.0)[0] == pytest.approx(1000)


def test_a_fresh_report_of_more_waiting_tokens_counts() -> None:
    ranks = Ranks()
    ranks.book(1, 100, 0.0)
    ranks.tracker.report(1, 0, Load(waiting=3, waiting_tokens=5000), 0.0)
    assert ranks.work(1, 0.0)[0] == 5000
    assert ranks.work(1, 60.0)[0] == 100, "an old report does not count"


def test_a_slow_worker_becomes_expensive_and_an_unknown_one_is_average() -> None:
    ranks = Ranks()
    for n in range(10):
        ranks.compute(1, RATE, 10.0 * n, 1.0)
        ranks.compute(2, RATE, 10.0 * n + 2, 4.0)
    fast, slow, unknown = (ranks.work(n, 200.0)[1] for n in (1, 2, 3))
    assert unknown == 1.0
    assert slow / fast == pytest.approx(4.0, rel=0.25)
    costs = ranks.costs(10, {}, 200.0, workers=3)
    assert costs[0] < costs[2] < costs[1]


def test_a_worker_that_computes_nothing_becomes_slower_with_every_second() -> None:
    ranks = Ranks()
    ranks.compute(1, RATE, 0.0, 1.0)
    ranks.compute(2, RATE, 1.0, 1.0)
    ranks.book(1, 10, 2.0)
    slowness = [ranks.work(1, now)[1] for now in (2.0, 5.0, 30.0)]
    assert slowness[0] == pytest.approx(1.0)
    assert slowness == sorted(slowness)
    assert slowness[-1] == pytest.approx((1 + PACE_PRIOR_S + 28) / (1 + PACE_PRIOR_S))


def test_a_request_that_ends_without_a_token_makes_no_worker_fast() -> None:
    ranks = Ranks()
    ranks.compute(2, RATE, 0.0, 1.0)
    for n in range(20):
        key = ranks.book(1, 10 * RATE, 2.0 + n)
        ranks.tracker.expire(2.5 + n)
        ranks.tracker.free(key)
    assert ranks.work(1, 30.0)[1] > 1.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 5000), st.floats(0, 3), st.booleans()),
        max_size=80,
    )
)
def test_work_is_never_negative_nor_above_the_bookings(
    steps: list[tuple[int, int, float, bool]],
) -> None:
    ranks, now = Ranks(), 0.0
    open_keys: list[BookingKey] = []
    for worker, tokens, seconds, ends in steps:
        now += seconds
        if ends and open_keys:
            ranks.done(open_keys.pop(0), now)
        else:
            open_keys.append(ranks.book(worker, tokens, now))
        for n in (1, 2, 3):
            work, slowness = ranks.work(n, now)
            booked = ranks.tracker.load(Placement(n, 0), now).prefill_tokens
            assert 0 <= work <= booked
            assert slowness > 0
