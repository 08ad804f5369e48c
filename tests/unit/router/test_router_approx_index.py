"""Approximate and predicted entries: the index that a router derives from its decisions."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.events import Source
from common.kv.hashing import hashes_to_bytes
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RouterConfigOverride
from router_svc.config import RouterConfig
from router_svc.core.approx_index import ApproxIndex, ApproxLimits
from router_svc.core.booking import BookingKey
from router_svc.core.decision import DecisionRecord
from router_svc.core.overlap import (
    EVENT_INDEX_SETTINGS,
    IndexSettings,
    IndexStatus,
    Overlaps,
    derive_index_settings,
)
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from tests.kit.instances import snapshot_of

B = 16
TTL_S = 120.0


def name_of(path: tuple[int, ...]) -> int:
    """A stand-in for prefix hashes: a name for a whole path."""
    digest = hashlib.blake2b(repr(path).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def prompt(*blocks: int, model: str = "m", block_size: int = B) -> Query:
    """A prompt with these blocks."""
    names = [name_of(blocks[:n]) for n in range(1, len(blocks) + 1)]
    packed = hashes_to_bytes(np.array(names, dtype=np.uint64)) if names else b""
    return Query(model, len(blocks) * block_size, packed, 1, block_size)


def at(worker_id: int, rank: int = 0) -> Placement:
    return Placement(worker_id, rank)


def depths(index: ApproxIndex, query: Query) -> dict[int, int]:
    return {placement.worker_id: depth for placement, depth in index.depths(query)}


def test_a_prompt_and_its_prefixes_match_where_it_was_sent() -> None:
    index = ApproxIndex()
    index.touch(prompt(1, 2, 3, 4), at(1), 0.0)
    assert depths(index, prompt(1, 2, 3, 4)) == {1: 4}
    assert depths(index, prompt(1, 2)) == {1: 2}
    assert depths(index, prompt(1, 2, 3, 9, 9)) == {1: 3}
    assert depths(index, prompt(9)) == {}
    assert depths(index, prompt()) == {}


def test_ranks_of_one_worker_match_separately() -> None:
    index = ApproxIndex()
    index.touch(prompt(1, 2), at(1, 1), 0.0)
    assert index.depths(prompt(1)) == [(at(1, 1), 1)]


@pytest.mark.parametrize("other", [{"model": "other"}, {"block_size": 32}])
def test_models_and_block_sizes_do_not_match_each_other(other: dict[str, Any]) -> None:
    index = ApproxIndex()
    index.touch(prompt(1, 2), at(1), 0.0)
    assert depths(index, prompt(1, 2, **other)) == {}
    assert depths(index, replace(prompt(1, 2), hash_scheme=2)) == {}


@pytest.mark.row("S1-27")
def test_an_entry_expires_after_its_ttl_and_later_if_its_prefix_is_used() -> None:
    index = ApproxIndex()
    index.touch(prompt(1, 2, 3), at(1), 0.0)
    index.touch(prompt(1, 8), at(1), 100.0)
    index.expire(TTL_S - 0.1, 0)
    assert depths(index, prompt(1, 2, 3)) == {1: 3}
    index.expire(TTL_S, 0)
    assert depths(index, prompt(1, 2, 3)) == {1: 1}, "even before entries are dropped"
    assert not index.expire(TTL_S, 100)
    assert index.blocks == 2
    index.expire(100.0 + TTL_S, 100)
    assert (depths(index, prompt(1, 8)), index.blocks) == ({}, 0)


def test_an_earlier_time_restores_no_expired_entry() -> None:
    index = ApproxIndex()
    index.touch(prompt(1), at(1), 0.0)
    index.expire(TTL_S, 0)
    index.touch(prompt(2), at(1), 5.0)
    assert depths(index, prompt(1)) == {}
    assert depths(index, prompt(2)) == {1: 1}


def test_a_full_index_drops_the_ends_of_the_oldest_prompts() -> None:
    index = ApproxIndex(ApproxLimits(blocks_max=6, prune_target_ratio=1.0))
    index.touch(prompt(1, 2, 3), at(1), 0.0)
    index.touch(prompt(7, 8, 9), at(1), 1.0)
    index.touch(prompt(1, 4), at(1), 2.0)
    assert index.blocks == 6
    assert depths(index, prompt(1, 2, 3)) == {1: 2}, (
        "the third was dropped, the first was touched again"
    )
    assert depths(index, prompt(7, 8, 9)) == {1: 3}
    assert depths(index, prompt(1, 4)) == {1: 2}


@pytest.mark.row("S1-27")
def test_a_full_index_is_pruned_to_its_target_in_small_steps() -> None:
    index = ApproxIndex(ApproxLimits(blocks_max=100, prune_target_ratio=0.5))
    for number in range(20):
        index.touch(prompt(number, 1, 2, 3, 4), at(1), float(number))
    assert index.blocks == 100
    index.touch(prompt(20), at(1), 20.0)
    assert index.blocks == 98, "the index drops one, and then twice as many as were added"
    assert index.expire(20.0, 40)
    assert index.blocks == 58
    assert not index.expire(20.0, 40)
    assert index.blocks == 50
    assert depths(index, prompt(0)) == {}
    assert depths(index, prompt(19, 1, 2, 3, 4)) == {1: 5}


def test_of_a_prompt_larger_than_the_index_the_beginning_is_kept() -> None:
    index = ApproxIndex(ApproxLimits(blocks_max=8, prune_target_ratio=1.0))
    index.touch(prompt(*range(50)), at(1), 0.0)
    assert (index.blocks, depths(index, prompt(*range(50)))) == (8, {1: 8})


@pytest.mark.row("S1-52")
def test_a_worker_that_left_matches_on_no_rank_and_its_entries_expire() -> None:
    index = ApproxIndex()
    for rank in range(3):
        index.touch(prompt(1, 2), at(1, rank), 0.0)
    index.touch(prompt(1, 2), at(2), 1.0)
    index.forget(1)
    index.forget(99)
    assert depths(index, prompt(1, 2)) == {2: 2}
    assert index.blocks == 8
    index.expire(TTL_S, 100)
    assert (index.blocks, depths(index, prompt(1, 2))) == (2, {2: 2})
    index.touch(prompt(1, 2), at(1), TTL_S)
    assert depths(index, prompt(1, 2)) == {2: 2, 1: 2}, "if it returns, it starts empty"


def test_expired_entries_leave_no_state() -> None:
    index = ApproxIndex(ApproxLimits(ttl_s=5.0))
    for number in range(200):
        now = float(number)
        index.touch(prompt(number, model=f"m{number}"), at(number), now)
        if number % 3 == 0:
            index.forget(number)
        index.expire(now, 10)
    index.expire(1000.0, 1000)
    assert index.blocks == 0
    assert not index._ranks
    assert not index._runs


# Against a naive list of all touched entries, oldest first.

Entry = tuple[int, int, tuple[int, ...]]  # Worker, its incarnation, path.


class Naive:
    """Every (worker, block) ever touched, in order of its last touch."""

    def __init__(self, limits: ApproxLimits) -> None:
        self.limits = limits
        self.order: list[Entry] = []
        self.touched: dict[Entry, float] = {}
        self.incarnations: Counter[int] = Counter()
        self.now = 0.0

    def touch(self, path: tuple[int, ...], worker: int) -> None:
        for n in range(min(len(path), self.limits.blocks_max), 0, -1):
            entry = (worker, self.incarnations[worker], path[:n])
            if entry in self.touched:
                self.order.remove(entry)
            self.order.append(entry)
            self.touched[entry] = self.now

    def depth(self, path: tuple[int, ...], worker: int, blocks: int) -> int:
        """The matches if only the `blocks` newest entries remain."""
        young = set(self.order[len(self.order) - blocks :])
        held = [
            (entry := (worker, self.incarnations[worker], path[:n])) in young
            and self.touched[entry] > self.now - self.limits.ttl_s
            for n in range(1, len(path) + 1)
        ]
        assert held == sorted(held, reverse=True), (
            "the matchable blocks of a rank are prefix-closed"
        )
        return sum(held)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["touch", "touch", "touch", "expire", "forget"]),
        st.integers(1, 3),
        st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple),
        st.sampled_from([0.0, 0.0, 1.0, 4.0]),
    ),
    max_size=40,
)


@pytest.mark.row("S1-27")
@settings(max_examples=150, deadline=None)
@given(steps=STEPS, blocks_max=st.sampled_from([1, 4, 12, 1000]), ratio=st.sampled_from([0.5, 1.0]))
def test_the_index_equals_a_plain_list_of_its_newest_entries(
    steps: list[tuple[str, int, tuple[int, ...], float]], blocks_max: int, ratio: float
) -> None:
    limits = ApproxLimits(ttl_s=10.0, blocks_max=blocks_max, prune_target_ratio=ratio)
    index, naive = ApproxIndex(limits), Naive(limits)
    for step, worker, path, passed_s in steps:
        naive.now += passed_s
        match step:
            case "touch":
                index.touch(prompt(*path), at(worker), naive.now)
                naive.touch(path, worker)
            case "expire":
                index.expire(naive.now, 3)
            case "forget":
                index.expire(naive.now, 0)
                index.forget(worker)
                naive.incarnations[worker] += 1
        index.expire(naive.now, 0)
        assert index.blocks <= blocks_max
        # The oldest entries were dropped.
        assert index.blocks <= len(naive.order)
        for probe in (path, (*path, 0), (0, 1, 0, 1), (1, 1, 1)):
            held = {w: naive.depth(probe, w, index.blocks) for w in (1, 2, 3)}
            assert depths(index, prompt(*probe)) == {w: d for w, d in held.items() if d}


@pytest.mark.parametrize("seed", range(3))
def test_ten_times_the_capacity_never_exceeds_the_capacity(seed: int) -> None:
    rng = Random(seed)
    index = ApproxIndex(ApproxLimits(blocks_max=200))
    for now in range(100):
        blocks = [rng.randrange(1000) for _ in range(20)]
        index.touch(prompt(*blocks), at(rng.randrange(4)), float(now))
        assert index.blocks <= 200
        ranks = (rank for ranks in index._ranks.values() for rank in ranks.values())
        assert sum(rank.blocks for rank in ranks) == index.blocks
    assert depths(index, prompt(*blocks)) != {}, "the newest is there"


# Choice of the index kind.

LIMITS = ApproxLimits(ttl_s=7.0, blocks_max=99, prune_target_ratio=0.3)


@pytest.mark.row("S1-42", "S1-43", "S1-45", "S1-46")
@pytest.mark.parametrize(
    ("credit", "uses_overlap_elsewhere", "kv_events", "predicted_ttl_s"),
    list(itertools.product([0.0, 0.5, 1.0, 2.0], [False, True], [False, True], [0.0, 5.0])),
)
def test_the_first_rule_that_applies_decides(
    credit: float, uses_overlap_elsewhere: bool, kv_events: bool, predicted_ttl_s: float
) -> None:
    index_settings = derive_index_settings(
        overlap_score_credit=credit,
        uses_overlap_elsewhere=uses_overlap_elsewhere,
        kv_events=kv_events,
        limits=LIMITS,
        predicted_ttl_s=predicted_ttl_s,
    )
    if credit == 0 and not uses_overlap_elsewhere:
        assert index_settings == IndexSettings("none", None, None, "overlap_score_credit is 0")
    elif not kv_events:
        assert index_settings == IndexSettings("approx", LIMITS, None, "kv_events is off")
    elif predicted_ttl_s:
        assert index_settings == IndexSettings(
            "events", LIMITS, replace(LIMITS, ttl_s=5.0), index_settings.reason
        )
    else:
        assert index_settings == IndexSettings("events", LIMITS, None, index_settings.reason)
    assert index_settings.follows_events == ((credit > 0 or uses_overlap_elsewhere) and kv_events)


@pytest.mark.row("S1-43", "S1-98", "S1-99", "S1-100")
def test_the_settings_of_the_configuration_reach_the_index() -> None:
    config = RouterConfig(
        kv_events=False,
        router_ttl_secs=7.0,
        router_max_tree_size=99,
        router_prune_target_ratio=0.3,
    )
    approximate = Overlaps(FakeIndex({}), config.index_settings).approximate
    assert approximate is not None
    assert approximate.limits == LIMITS
    assert RouterConfig().index_settings.predicted == ApproxLimits(ttl_s=5.0)
    without = RouterConfig(router_predicted_ttl_secs=0.0)
    assert without.index_settings == EVENT_INDEX_SETTINGS


# A router with approximate entries.


class FakeIndex:
    """An event index with fixed blocks per worker, for any prompt."""

    def __init__(self, held: dict[int, tuple[int, int, int]]) -> None:
        self.held = held
        self.query_count = 0

    def match(self, query: Query) -> list[SourceMatch]:
        self.query_count += 1
        return [SourceMatch(Source(worker_id), *tiers) for worker_id, tiers in self.held.items()]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact", "", 0.0)


KvIndex = Literal["events", "approx", "none"]


class Bed:
    """A router with workers that advertise the given index kinds."""

    def __init__(
        self,
        *ways: KvIndex,
        reported: dict[int, tuple[int, int, int]] | None = None,
        **cost_settings: Any,
    ) -> None:
        self.index = FakeIndex(reported or {})
        config = RouterConfig(**cost_settings)
        self.router = Router(
            SELECTORS["kv"](),
            index=self.index,
            index_settings=config.index_settings,
            cost_settings=config.cost_settings,
        )
        self.workers = [
            Instance(n, "mesh", "worker", "", "127.0.0.1:1", model="m", block_size=B, kv_index=way)
            for n, way in enumerate(ways, 1)
        ]
        self.count = 0
        self.now = 0.0
        self.see(*self.workers)

    def see(self, *workers: Instance) -> None:
        self.router.update(snapshot_of(*workers), self.now)

    def send(self, query: Query) -> DecisionRecord:
        """Place a request and end it at once."""
        self.count += 1
        key = BookingKey(7, f"r{self.count}", 0)
        record = self.router.decide(query, key, self.now, Random(self.count))
        self.router.load_tracker.free(key)
        return record

    def overlap(self, query: Query) -> dict[int, int]:
        matches = self.router.match(query)
        return {placement[0]: row.device_blocks for placement, row in matches.items()}


@pytest.mark.row("S1-50")
def test_a_router_without_events_remembers_where_it_sent_a_prompt() -> None:
    bed = Bed("events", "approx", "events", kv_events=False, recent_miss_weight=0.0)
    first = bed.send(prompt(1, 2, 3, 4))
    assert first.decision.overlap_blocks == 0
    again = bed.send(prompt(1, 2, 3, 4, 5))
    assert again.decision.worker == first.decision.worker
    assert (again.decision.overlap_blocks, again.decision.predicted_cached_tokens) == (4, 64)
    assert again.decision.reasons[0] == "prefix hit: 4 of 5 blocks, approximate"
    assert bed.index.query_count == 0, "the router has no event index"
    row = next(r for r in again.considered if r.placement == first.decision.worker)
    assert row.index_status.state == "approx"


def test_a_query_without_booking_leaves_no_entry() -> None:
    bed = Bed("approx")
    bed.router.preview(prompt(1, 2), 0.0, Random(0))
    bed.router.decide(prompt(1, 2), None, 0.0, Random(0))
    bed.router.potential_loads(prompt(1, 2), 0.0)
    assert bed.overlap(prompt(1, 2)) == {}


def test_a_worker_without_events_gets_approximate_entries_among_publishers() -> None:
    reported = {1: (2, 2, 2), 2: (9, 9, 9)}
    bed = Bed("events", "approx", reported=reported, router_predicted_ttl_secs=0.0)
    hints = replace(prompt(1, 2, 3, 4), excluded_worker_ids=frozenset({1}))
    bed.send(hints)
    assert bed.overlap(prompt(1, 2, 3, 4)) == {1: 2, 2: 4}, (
        "the reported blocks of worker 2 are ignored"
    )
    assert bed.router.overlaps.predicted is None


def test_entries_of_a_worker_that_left_do_not_return_with_it() -> None:
    bed = Bed("approx", "approx")
    chosen = bed.send(prompt(1, 2)).decision.worker.worker_id
    others = [w for w in bed.workers if w.id != chosen]
    bed.see(*others)
    bed.see(*bed.workers)
    assert bed.overlap(prompt(1, 2)) == {}


def test_of_a_pair_the_prefill_worker_gets_the_entries() -> None:
    bed = Bed("approx", "approx")
    first, second = bed.workers
    bed.see(replace(first, role="prefill"), replace(second, role="decode"))
    record = bed.send(prompt(1, 2))
    assert record.decision.prefill == at(1)
    assert bed.overlap(prompt(1, 2)) == {1: 2}


def test_requests_of_a_burst_meet_on_one_worker_before_any_event_arrives() -> None:
    """Four requests of a family share a long prefix, and all families arrive at once."""

    def beginnings_computed(seed: int, **cost_settings: Any) -> int:
        """No request ends and no event arrives; each family starts once on each worker."""
        bed = Bed("events", "events", "events", "events", **cost_settings)
        rng = Random(seed)
        requests = [(family, n) for family in range(8) for n in range(4)]
        rng.shuffle(requests)
        begun = set()
        for family, n in requests:
            query = prompt(family, *range(100, 130), 1000 * family + n)
            key = BookingKey(7, f"{family}.{n}", 0)
            begun.add((family, bed.router.decide(query, key, 0.0, rng).decision.worker))
        return len(begun)

    blind = sum(beginnings_computed(seed, router_predicted_ttl_secs=0.0) for seed in range(5))
    seeing = sum(beginnings_computed(seed) for seed in range(5))
    assert seeing < 0.9 * blind, (seeing, blind)


def test_the_larger_of_events_and_predictions_counts_on_each_tier() -> None:
    bed = Bed(
        "events",
        "events",
        reported={1: (1, 3, 9), 2: (8, 8, 8)},
        router_predicted_ttl_secs=5.0,
    )
    bed.router.overlaps.record_placement(prompt(*range(4)), at(1), 0.0)
    bed.router.overlaps.record_placement(prompt(*range(4)), at(2), 0.0)
    matches = bed.router.match(prompt(*range(4)))
    assert matches[1, 0][1:] == (4, 4, 9)
    assert matches[2, 0][1:] == (8, 8, 8)
    bed.router.overlaps.expire(5.0, 0)
    assert bed.router.match(prompt(*range(4)))[1, 0][1:] == (1, 3, 9)


# kv_index=none.


def reasons(record: DecisionRecord) -> list[str]:
    return [reason for reason in record.decision.reasons if "kv_index=none" in reason]


@pytest.mark.row("S1-42", "S1-48", "S1-50")
def test_with_a_credit_of_zero_no_index_is_used_and_the_reasons_show_it() -> None:
    bed = Bed("events", "approx", reported={1: (4, 4, 4)}, overlap_score_credit=0.0)
    for _ in range(3):
        record = bed.send(prompt(1, 2, 3, 4))
        assert record.decision.overlap_blocks == 0
        assert reasons(record) == ["kv_index=none: overlap_score_credit is 0"]
    assert bed.index.query_count == 0
    assert (bed.router.overlaps.approximate, bed.router.overlaps.predicted) == (None, None)
    assert bed.router.match(prompt(1)) == {}, "an empty result, never an error"


def test_a_worker_without_prefix_reuse_is_neither_matched_nor_remembered() -> None:
    bed = Bed("none", "none", reported={1: (4, 4, 4)}, router_predicted_ttl_secs=5.0)
    for _ in range(2):
        record = bed.send(prompt(1, 2, 3, 4))
        assert record.decision.overlap_blocks == 0
        assert reasons(record) == ["kv_index=none: no candidate has a cache index"]
    for index in (bed.router.overlaps.approximate, bed.router.overlaps.predicted):
        assert index is not None
        assert index.blocks == 0


@pytest.mark.parametrize("kv_events", [True, False])
def test_a_worker_without_index_is_never_matched(kv_events: bool) -> None:
    bed = Bed("none", kv_events=kv_events)
    assert (
        bed.send(prompt(1, 2)).decision.overlap_blocks
        == bed.send(prompt(1, 2)).decision.overlap_blocks
        == 0
    )


def test_a_request_without_prefix_hashes_matches_nothing_and_leaves_no_entry() -> None:
    """Token ids alone do not identify a prompt with an adapter, a salt or an image."""
    bed = Bed("events", "approx", reported={1: (4, 4, 4)}, router_predicted_ttl_secs=5.0)
    nameless = Query("m", 4 * B)
    for _ in range(4):
        record = bed.send(nameless)
        assert record.decision.overlap_blocks == 0
        assert reasons(record) == ["kv_index=none: the request has no prefix hashes"]
    assert bed.index.query_count == 0
    for index in (bed.router.overlaps.approximate, bed.router.overlaps.predicted):
        assert index is not None
        assert index.blocks == 0


def test_a_prompt_shorter_than_a_block_gets_no_reason() -> None:
    assert reasons(Bed("events").send(Query("m", B - 1))) == []
    assert reasons(Bed("events").send(prompt(1, 2))) == []


def test_a_request_that_ignores_overlap_is_still_remembered() -> None:
    bed = Bed("approx", "approx")
    override = RouterConfigOverride(overlap_score_credit=0.0)
    record = bed.send(replace(prompt(1, 2), config_override=override))
    assert bed.overlap(prompt(1, 2)) == {record.decision.worker.worker_id: 2}
