"""Load accounting: fractional weights, output blocks, and bookings without renewal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, Overloaded, Unavailable
from common.kv.events import Source
from common.kv.hashing import (
    PrefixHasher,
    compute_block_hash_for_seq,
    compute_seq_hashes,
    hashes_from_bytes,
    hashes_to_bytes,
)
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import BlockExtraInfo, MmObject, RouterConfigOverride, RoutingHints
from kvmesh.router.v1 import router_pb2
from router_svc.core.admission import QueuedRequest, QueueSettings
from router_svc.core.booking import Booking
from router_svc.core.candidate import LoadTotals
from router_svc.core.cost import CostSettings
from router_svc.core.load_tracker import BOOKING_EXPIRY_S, EXPIRY_SCAN_INTERVAL_S, LoadTracker
from router_svc.core.overlap import IndexStatus
from router_svc.core.policy import Policy
from router_svc.core.query import bookable_decode_blocks, bookable_prefill_tokens
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from router_svc.proto import booking_from_proto, booking_to_proto, decision_to_proto
from tests.kit import bookings
from tests.kit.bookings import FRONTEND, key, tracker_with_session
from tests.kit.instances import snapshot_of

W1, W2 = Placement(1, 0), Placement(2, 0)
booking = partial(bookings.booking, prefill_tokens=0, decode_blocks=4)


@pytest.mark.row("S1-24", "S1-83")
def test_fractions_of_blocks_are_summed_and_then_rounded() -> None:
    load_tracker, session = tracker_with_session()
    for number in range(3):
        load_tracker.book(booking(number, decode_blocks=1), session, 0.0)
        load_tracker.add_output_blocks(key(number), 1, 0.2)
    assert load_tracker.load(W1, 0.0).decode_blocks == 1, (
        "3 * 2 * 0.2 = 1.2; rounding each would give 0"
    )
    load_tracker.add_output_blocks(key(0), 1, 0.25)
    assert load_tracker.load(W1, 0.0).decode_blocks == 2, "0.75 + 2 * 0.4 = 1.55"


def test_a_request_longer_than_expected_has_weight_zero_but_counts_as_a_request() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    load_tracker.add_output_blocks(key(), 3, 0.0)
    assert load_tracker.load(W1, 0.0) == LoadTotals(0, 0, 1)
    load_tracker.add_output_blocks(key(), 1)
    assert load_tracker.load(W1, 0.0) == LoadTotals(0, 0, 1), "the weight stays as reported last"


def test_weighted_blocks_newer_than_a_report_are_added_to_it() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.report(1, 0, Load(kv_used_blocks=10), 0.0)
    load_tracker.book(booking(decode_blocks=4), session, 0.0)
    load_tracker.add_output_blocks(key(), 1, 0.5)
    assert load_tracker.load(W1, 0.0).decode_blocks == 13, "10 + round(5 * 0.5)"


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 9), st.none() | st.floats(0, 1)), max_size=40
    )
)
def test_weights_are_summed_exactly_and_return_to_zero(
    steps: list[tuple[int, int, float | None]],
) -> None:
    load_tracker, session = tracker_with_session()
    blocks: dict[int, int] = {}
    weight: dict[int, float] = {}
    for number, grown, decay in steps:
        if number not in blocks:
            load_tracker.book(booking(number), session, 0.0)
            blocks[number], weight[number] = 4, 1.0
        load_tracker.add_output_blocks(key(number), grown, decay)
        blocks[number] += grown
        weight[number] = weight[number] if decay is None else decay
        total = sum(blocks[n] * weight[n] for n in blocks)
        assert math.floor(total + 0.49) <= load_tracker.load(W1, 0.0).decode_blocks
        assert load_tracker.load(W1, 0.0).decode_blocks <= math.floor(total + 0.51)
    for number in blocks:
        load_tracker.free(key(number))
    assert load_tracker.load(W1, 0.0) == LoadTotals()
    assert len(load_tracker) == 0


def test_a_reregistered_booking_keeps_its_weight() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(decode_blocks=7), session, 0.0)
    load_tracker.add_output_blocks(key(), 1, 0.25)
    held = load_tracker.get(key())
    assert held is not None
    received = booking_from_proto(booking_to_proto(held), FRONTEND, "announced")
    assert received == held
    elsewhere = LoadTracker()
    elsewhere.reregister(received, elsewhere.open_session(FRONTEND), 0.0)
    assert elsewhere.load(W1, 0.0) == LoadTotals(0, 2, 1)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_reregistered_weight_out_of_range_is_rejected_with_its_field(decay: float) -> None:
    message = router_pb2.Booking(
        key=router_pb2.BookingKey(request_id="r"),
        frontend_id=FRONTEND,
        model="m",
        worker=router_pb2.Placement(worker_id=1),
        revision=1,
        decay_fraction=decay,
    )
    with pytest.raises(InvalidRequest) as caught:
        booking_from_proto(message, FRONTEND, "announced")
    assert caught.value.field == "decay_fraction"


# Bookings that are not renewed.


def test_a_booking_that_is_not_renewed_ends_after_five_minutes() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    load_tracker.expire(BOOKING_EXPIRY_S - 1.0)
    assert len(load_tracker) == 1
    load_tracker.expire(BOOKING_EXPIRY_S + EXPIRY_SCAN_INTERVAL_S)
    assert (len(load_tracker), load_tracker.expired) == (0, 1)
    assert load_tracker.load(W1, BOOKING_EXPIRY_S) == LoadTotals()


def test_a_booking_that_is_renewed_does_not_expire() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    now = 0.0
    for _ in range(10):
        now += 100.0
        assert not load_tracker.reregister(booking(), session, now), "it is not new"
        load_tracker.expire(now)
    assert (len(load_tracker), load_tracker.expired) == (1, 0)
    assert load_tracker.load(W1, now) == LoadTotals(0, 4, 1)


def test_a_booking_held_by_a_peer_does_not_expire_here() -> None:
    load_tracker = LoadTracker()
    load_tracker.add_peer(9, {booking().key})
    load_tracker.receive(booking(), 0.0)
    load_tracker.expire(10 * BOOKING_EXPIRY_S)
    assert (len(load_tracker), load_tracker.expired) == (1, 0)


# The booked load of a request.


def router_of(*workers: int, **options: Any) -> Router:
    router = Router(SELECTORS["least_loaded"](), **options)
    instances = [
        Instance(
            at,
            "mesh",
            "worker",
            "",
            "127.0.0.1:1",
            model="m",
            block_size=16,
            max_num_batched_tokens=1000,
            loras=frozenset({f"lora{at}"}),
            kv_index="events",
        )
        for at in workers
    ]
    router.update(snapshot_of(*instances), 0.0)
    return router


@pytest.mark.row("S1-70", "S1-104")
def test_blocks_are_booked_only_if_they_are_tracked() -> None:
    query = Query("m", 100)
    for tracks, blocks in ((True, 7), (False, 0)):
        router = router_of(1, cost_settings=CostSettings(track_active_blocks=tracks))
        router.decide(query, key(), 0.0, Random(0))
        assert router.load_tracker.load(W1, 0.0) == LoadTotals(100, blocks, 1)
    assert bookable_decode_blocks(query, 16, CostSettings(track_active_blocks=False)) == 0


@pytest.mark.row("S1-104")
def test_one_request_can_override_tracking_for_itself_only() -> None:
    router = router_of(1)
    untracked = Query("m", 100, config_override=RouterConfigOverride(track_prefill_tokens=False))
    router.decide(untracked, key(0), 0.0, Random(0))
    assert router.load_tracker.load(W1, 0.0) == LoadTotals(0, 7, 1)
    router.decide(Query("m", 100), key(1), 0.0, Random(0))
    assert router.load_tracker.load(W1, 0.0) == LoadTotals(100, 14, 2)
    reuse = RouterConfigOverride(assume_kv_reuse=True)
    assert CostSettings().with_override(reuse).assume_kv_reuse
    assert (
        not CostSettings(assume_kv_reuse=True)
        .with_override(RouterConfigOverride(assume_kv_reuse=False))
        .assume_kv_reuse
    )


@pytest.mark.row("S1-23", "S1-80")
def test_a_booking_has_request_worker_and_load_and_potential_loads_predict_it() -> None:
    router = router_of(1, 2)
    query = Query("m", 100, routing=RoutingHints(expected_output_tokens=50))
    predicted = router.potential_loads(query, 0.0)
    record = router.decide(query, key(), 0.0, Random(0))
    booked = router.load_tracker.get(key())
    assert booked == Booking(key(), "m", record.decision.worker, None, 100, 7)
    message = decision_to_proto(record.decision, router.fleet)
    assert (message.charged_prefill_tokens, message.charged_decode_blocks) == (100, 7)
    assert (
        router.load_tracker.load(record.decision.worker, 0.0) == predicted[record.decision.worker]
    )
    assert bookable_prefill_tokens(query, 0) == 100


# Query parameters.


@pytest.mark.row("S1-65", "S1-71")
def test_each_query_parameter_has_its_effect() -> None:
    router = router_of(1, 2, 3, policy=Policy(queue=QueueSettings(threshold=0.1)))

    def submit(number: int | None, **hints: Any) -> Placement | QueuedRequest:
        query = Query("m", 200, routing=RoutingHints(**hints))
        if number is None:
            return router.decide(query, None, 0.0, Random(0)).decision.worker
        answer = router.admit(query, key(number), 0.0, Random(0))
        return answer if isinstance(answer, QueuedRequest) else answer.decision.worker

    assert submit(0, allowed_worker_ids=frozenset({2})) == W2
    assert submit(1, lora_name="lora3") == Placement(3, 0)
    assert submit(None) == W1, "1 is idle"
    assert submit(2) == W1, "without a key there is no booking: worker 1 is still idle"
    assert isinstance(submit(3), QueuedRequest)
    assert isinstance(submit(4, priority_jump=9.0), QueuedRequest)
    router.queue.mark_all_dirty()
    head = router.queue.next_dirty()
    assert head is not None
    assert head.key == key(4), "the request is ahead of the other"
    with pytest.raises(Unavailable):
        submit(5, allowed_worker_ids=frozenset({99}))
    free = Query("m", 200, config_override=RouterConfigOverride(track_prefill_tokens=False))
    wild = Query("m", 200, config_override=RouterConfigOverride(router_temperature=-1.0))
    with pytest.raises(InvalidRequest, match="router_temperature"):
        router.admit(wild, key(6), 0.0, Random(0))
    assert isinstance(router.admit(free, key(7), 0.0, Random(0)), QueuedRequest)
    assert len(router.load_tracker) == 3


class Caches:
    """An index of whole prefixes by hash, as publishers of one scheme report them."""

    def __init__(self, scheme: int, held: dict[int, frozenset[int]]) -> None:
        self.scheme = scheme
        self.held = held

    def match(self, query: Query) -> Sequence[SourceMatch]:
        assert query.hash_scheme == self.scheme
        rows = []
        for worker_id, held in self.held.items():
            depth = 0
            for name in hashes_from_bytes(query.prefix_hashes).tolist():
                if name not in held:
                    break
                depth += 1
            rows.append(SourceMatch(Source(worker_id, 0), depth, depth, depth))
        return rows

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact", "", 0.0)


TOKENS = list(range(64))
XXH3 = 2  # Any number for the publishers' hash scheme.


def named(image: int | None = None, lora: str | None = None) -> tuple[int, ...]:
    """The prompt's blocks by the reference's hashes, with an image in the second one."""
    infos = [None, None if image is None else BlockExtraInfo((MmObject(image),))]
    local = compute_block_hash_for_seq(TOKENS, 16, infos, lora)
    return tuple(int(name) for name in compute_seq_hashes(local))


def query_of_names(names: Sequence[int]) -> Query:
    return Query("m", 64, hashes_to_bytes(np.array(names, dtype=np.uint64)), XXH3, 16)


@pytest.mark.row("S1-68")
def test_blocks_are_matched_by_adapter_and_media() -> None:
    held = {1: frozenset(named(image=7)), 2: frozenset(named(image=7, lora="lora2"))}
    router = router_of(1, 2, index=Caches(XXH3, held))
    depth = {
        (image, lora): {at[0]: row[3] for at, row in matches.items()}
        for image in (7, 8)
        for lora in (None, "lora2")
        for matches in [router.match(query_of_names(named(image, lora)))]
    }
    assert depth[7, None] == {1: 4, 2: 0}
    assert depth[7, "lora2"] == {1: 0, 2: 4}
    assert depth[8, None] == {1: 1, 2: 0}, "the block before the image is the same"
    ours = {
        PrefixHasher(mesh_key=b"", model="m", block_size=16, lora_name=lora)
        .prefix_hashes(TOKENS)
        .tobytes()
        for lora in ("", "lora1", "lora2")
    }
    assert len(ours) == 3


@pytest.mark.row("S1-85")
def test_potential_loads_and_overlaps_depend_on_the_media_of_a_prompt() -> None:
    router = router_of(1, 2, index=Caches(XXH3, {1: frozenset(named(image=7))}))
    same = router.potential_loads(query_of_names(named(7)), 0.0)
    other = router.potential_loads(query_of_names(named(8)), 0.0)
    assert same[W1].prefill_tokens == 16, "all but the block of the last token is cached"
    assert other[W1].prefill_tokens == 48
    assert same[W2].prefill_tokens == other[W2].prefill_tokens == 64
    pinned = RoutingHints(backend_instance_id=1)
    for names, overlap in ((named(7), 4), (named(8), 1)):
        query = replace(query_of_names(names), routing=pinned)
        assert router.preview(query, 0.0, Random(0)).decision.overlap_blocks == overlap


@pytest.mark.row("S1-108")
def test_rejections_of_the_queue_are_typed_errors() -> None:
    router = router_of(1, policy=Policy(queue=QueueSettings(threshold=0.0, requests_max=1)))
    router.admit(Query("m", 10), key(0), 0.0, Random(0))
    router.admit(Query("m", 10), key(1), 0.0, Random(0))
    with pytest.raises(Overloaded):
        router.admit(Query("m", 10), key(2), 0.0, Random(0))
