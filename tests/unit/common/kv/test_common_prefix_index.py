"""The prefix index: matches, tiers, retirement, logs; against plain sets."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.events import EMPTY_HASHES, SNAPSHOT_CHUNK_BLOCKS, Source, Tier
from common.kv.prefix_index import (
    LARGE_BATCH_BLOCKS,
    LOG_SLACK_ENTRIES,
    SHARD_COUNT,
    AdvertisedBlocks,
    PrefixIndex,
    SourceMatch,
)
from tests.kit.kv_events import array

A, B, C = Source(1), Source(2), Source(2, 1)


def shown(
    index: PrefixIndex, source: Source, *keys: int, tier: Tier = Tier.DEVICE
) -> AdvertisedBlocks:
    advertised = index.add_source(source)
    index.store(advertised, array(keys), tier)
    index.set_visible(advertised, True)
    return advertised


def rows(index: PrefixIndex, *chain: int) -> list[tuple[Source, int]]:
    return [(row.source, row.device_blocks) for row in index.match(array(chain))]


def listed(
    index: PrefixIndex, advertised: AdvertisedBlocks, size: int = SNAPSHOT_CHUNK_BLOCKS
) -> list[int]:
    return [key for _, part in index.chunks(advertised, size) for key in part.tolist()]


def sweep(index: PrefixIndex) -> None:
    while index.sweep(1000):
        pass


def test_each_source_matches_to_its_own_depth_deepest_first() -> None:
    index = PrefixIndex()
    shown(index, A, 10, 20)
    shown(index, B, 10, 20, 30, 40)
    shown(index, C, 11)
    assert rows(index, 10, 20, 30, 40, 50) == [(B, 4), (A, 2)]
    assert rows(index, 10) == [(A, 1), (B, 1)] or rows(index, 10) == [(B, 1), (A, 1)]
    assert rows(index, 99) == []
    assert index.match(EMPTY_HASHES) == []


def test_nothing_matches_without_the_first_block() -> None:
    index = PrefixIndex()
    shown(index, A, 10, 20, 30)
    assert rows(index, 9, 20, 30) == []


@pytest.mark.parametrize("depth", [1, 2, 3, 31, 32, 33, 511, 512])
def test_bisection_finds_every_depth(depth: int) -> None:
    index, chain = PrefixIndex(), list(range(1, 513))
    shown(index, A, *chain[:depth])
    shown(index, B, *chain)
    expected = [(B, 512), (A, depth)]
    assert sorted(rows(index, *chain)) == sorted(expected)


def test_the_smallest_and_largest_64_bit_hashes_work() -> None:
    index, edges = PrefixIndex(), (0, 2**64 - 1, 2**63)
    advertised = shown(index, A, *edges)
    assert rows(index, *edges) == [(A, 3)]
    assert sorted(listed(index, advertised)) == sorted(edges)
    index.remove(advertised, array(edges))
    assert len(index) == 0


def test_read_only_hashes_from_the_wire_work() -> None:
    index = PrefixIndex()
    wire = np.frombuffer(array([5, 6]).tobytes(), dtype="<u8")
    advertised = index.add_source(A)
    index.store(advertised, wire)
    index.set_visible(advertised, True)
    assert index.match(wire) == [SourceMatch(A, 2, 2, 2)]


def test_hidden_blocks_match_nothing_and_all_match_when_visible_again() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, 1, 2)
    index.set_visible(advertised, False)
    assert rows(index, 1, 2) == []
    index.store(advertised, array([3]))
    index.set_visible(advertised, True)
    assert rows(index, 1, 2, 3) == [(A, 3)]


def test_storing_and_removing_twice_counts_once() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, 1, 2)
    index.store(advertised, array([1, 2, 3]))
    assert (advertised.blocks, index.blocks, len(index)) == (3, 3, 3)
    index.remove(advertised, array([3, 3, 77]))
    assert (advertised.blocks, index.blocks, len(index)) == (2, 2, 2)


def test_a_block_of_two_sources_remains_when_one_is_retired() -> None:
    index = PrefixIndex()
    first, second = shown(index, A, 1, 2), shown(index, B, 1, 2)
    assert (index.blocks, len(index)) == (4, 2)
    index.retire(first)
    assert rows(index, 1, 2) == [(B, 2)]
    sweep(index)
    assert rows(index, 1, 2) == [(B, 2)]
    assert listed(index, second) == [1, 2]
    assert (index.blocks, len(index)) == (2, 2)


def test_retiring_is_immediate_and_freed_in_slices() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, *range(1, 5001))
    index.retire(advertised)
    assert rows(index, 1, 2) == []
    assert index.blocks == 0
    assert len(index) == 5000, "no block is removed yet"
    assert index.sweep(1000)
    assert 3500 <= len(index) <= 4500
    sweep(index)
    assert (len(index), index.used_bytes) == (0, 0)


def test_a_bit_is_reused_only_after_its_sweep() -> None:
    index = PrefixIndex()
    for number in range(50):
        advertised = shown(index, Source(number + 1), number, number + 1)
        newer = shown(index, Source(99), 7)
        index.retire(advertised)
        assert rows(index, number, number + 1) in ([], [(Source(99), 1)])
        index.retire(newer)
        if number % 5 == 0:
            sweep(index)
            assert len(index) == 0
    sweep(index)
    assert index._bit_count <= 2 * 5 + 2, "masks stay narrow under churn"


def test_a_retired_handle_stores_nothing() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, 1)
    index.retire(advertised)
    for forbidden in (index.store, index.remove):
        with pytest.raises(AssertionError):
            forbidden(advertised, array([2]))
    with pytest.raises(AssertionError):
        index.retire(advertised)


# Tiers.


def test_tiers_have_separate_sets_and_matches_are_cumulative() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, 1, 2)
    index.store(advertised, array([1, 2, 3, 4]), Tier.HOST)
    index.store(advertised, array([1, 2, 3, 4, 5]), Tier.DISK)
    shown(index, B, 1, 2, 3)
    assert index.match(array(range(1, 9))) == [SourceMatch(A, 2, 4, 5), SourceMatch(B, 3, 3, 3)]
    index.remove(advertised, array([2, 1]))
    assert index.match(array(range(1, 9)))[0] == SourceMatch(A, 0, 4, 5)
    assert advertised.blocks_on(Tier.HOST) == 4


def test_a_publisher_need_not_repeat_its_device_in_a_lower_tier() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, 1, 2, 3)
    index.store(advertised, array([1]), Tier.HOST)
    assert index.match(array([1, 2, 3])) == [SourceMatch(A, 3, 3, 3)]


def test_a_tier_first_used_while_visible_matches() -> None:
    index = PrefixIndex()
    advertised = index.add_source(A)
    index.set_visible(advertised, True)
    index.store(advertised, array([1]), Tier.DISK)
    assert index.match(array([1])) == [SourceMatch(A, 0, 0, 1)]
    index.retire(advertised)
    sweep(index)
    shown(index, B, 1)
    assert index.match(array([1])) == [SourceMatch(B, 1, 1, 1)]


# Listing.


def test_chunks_have_at_most_their_size_and_name_their_tier() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, *range(1, 11))
    index.store(advertised, array([1, 2]), Tier.HOST)
    parts = [(tier, len(part)) for tier, part in index.chunks(advertised, 4)]
    assert parts == [(Tier.DEVICE, 4), (Tier.DEVICE, 4), (Tier.DEVICE, 2), (Tier.HOST, 2)]


def test_unchanged_blocks_are_listed_while_others_change() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, *range(1000))
    seen: set[int] = set()
    for number, (_, part) in enumerate(index.chunks(advertised, 10)):
        seen.update(part.tolist())
        index.remove(advertised, array([3 * number]))
        index.store(advertised, array([10_000 + number]))
        sweep(index)
    assert {key for key in range(1000) if key % 3 or key >= 300} <= seen


def test_listing_ends_when_the_handle_is_retired() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, *range(100))
    parts = index.chunks(advertised, 10)
    next(parts)
    index.retire(advertised)
    assert list(parts) == []


def test_churn_does_not_grow_the_log_above_its_slack() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, *range(100))
    rng = Random(1)
    for start in range(0, 200_000, 100):
        keys = array(rng.randrange(1000, 10**9) for _ in range(100))
        index.store(advertised, keys)
        index.remove(advertised, keys[::-1])
        index.sweep(256)
        assert len(advertised._logs[0]) <= 4 * LOG_SLACK_ENTRIES, start
    sweep(index)
    assert sorted(set(listed(index, advertised))) == list(range(100))
    assert index._log_entries == len(advertised._logs[0])


def test_compaction_keeps_what_is_stored_while_it_runs() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, *range(20_000))
    index.remove(advertised, array(range(19_000)))
    assert index.needs_sweep
    for key in range(50_000, 50_060):
        index.sweep(256)
        index.store(advertised, array([key]))
    sweep(index)
    expected = {*range(19_000, 20_000), *range(50_000, 50_060)}
    assert set(listed(index, advertised)) == expected
    assert len(advertised._logs[0]) < 2000


def test_retiring_during_a_compaction_leaves_nothing() -> None:
    index = PrefixIndex()
    advertised = shown(index, A, *range(20_000))
    index.remove(advertised, array(range(19_000)))
    index.sweep(256)
    index.retire(advertised)
    sweep(index)
    assert (len(index), index.used_bytes) == (0, 0)


# Against plain sets.

operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "retire", "show", "hide", "sweep"]),
        st.integers(0, 3),
        st.integers(0, 2),
        st.lists(st.integers(1, 4 * SHARD_COUNT), max_size=8, unique=True),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, database=None)
@given(operations)
def test_the_index_holds_what_plain_sets_hold(
    steps: list[tuple[str, int, int, list[int]]],
) -> None:
    index = PrefixIndex()
    handles = [index.add_source(Source(n + 1)) for n in range(4)]
    held: list[list[set[int]]] = [[set(), set(), set()] for _ in range(4)]
    visible = [False] * 4
    for what, number, tier, keys in steps:
        advertised = handles[number]
        match what:
            case "store":
                index.store(advertised, array(keys), Tier(tier))
                held[number][tier].update(keys)
            case "remove":
                index.remove(advertised, array(keys), Tier(tier))
                held[number][tier].difference_update(keys)
            case "retire":
                index.retire(advertised)
                handles[number] = index.add_source(advertised.source)
                held[number], visible[number] = [set(), set(), set()], False
            case "show" | "hide":
                index.set_visible(advertised, what == "show")
                visible[number] = what == "show"
            case _:
                index.sweep(256)
    sweep(index)
    assert len(index) == len(set().union(*(tier for tiers in held for tier in tiers)))
    assert index.blocks == sum(len(tier) for tiers in held for tier in tiers)
    for number, advertised in enumerate(handles):
        found: list[set[int]] = [set(), set(), set()]
        for tier, part in index.chunks(advertised, 3):
            found[tier].update(part.tolist())
        assert found == held[number]
    for key in range(1, 4 * SHARD_COUNT, 7):
        matched = {row.source.worker_id - 1 for row in index.match(array([key]))}
        assert matched == {w for w in range(4) if visible[w] and key in set().union(*held[w])}


@pytest.mark.parametrize("seed", range(5))
def test_large_batches_of_known_and_new_blocks_give_the_sets_of_their_sources(seed: int) -> None:
    rng, index = Random(seed), PrefixIndex()
    keys = [rng.getrandbits(64) for _ in range(4 * LARGE_BATCH_BLOCKS)]
    held: dict[Source, set[int]] = {A: set(), B: set(), C: set()}
    handles = {source: shown(index, source) for source in held}
    for _ in range(12):
        source = rng.choice(list(held))
        batch = rng.sample(keys, rng.randint(LARGE_BATCH_BLOCKS // 2, 2 * LARGE_BATCH_BLOCKS))
        if rng.random() < 0.7:
            index.store(handles[source], array(batch))
            held[source] |= set(batch)
        else:
            index.remove(handles[source], array(batch))
            held[source] -= set(batch)
        for one, handle in handles.items():
            assert handle.blocks == len(held[one])
            assert set(listed(index, handle)) == held[one]
        assert len(index) == len(set().union(*held.values()))
        assert index.blocks == sum(map(len, held.values()))
    for key in keys:
        assert {row.source for row in index.match(array([key]))} == {
            source for source, blocks in held.items() if key in blocks
        }


def test_a_reused_bit_names_its_new_source() -> None:
    index = PrefixIndex()
    old = shown(index, A, 1)
    assert rows(index, 1) == [(A, 1)]
    index.retire(old)
    sweep(index)
    shown(index, B, 1)
    assert rows(index, 1) == [(B, 1)]
