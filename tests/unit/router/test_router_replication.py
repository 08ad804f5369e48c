"""Replication of bookings: updates, digests, full syncs and orphans."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from common.errors import Overloaded
from common.kv.hashing import hashes_from_bytes, hashes_to_bytes
from common.request.placement import Placement, Query
from router_svc.core.booking import Booking, BookingKey
from router_svc.core.candidate import LoadTotals
from router_svc.core.load_tracker import ORPHAN_S, LoadTracker
from router_svc.core.replication import (
    BACKLOG_BLOCKS_MAX,
    BACKLOG_MAX,
    DIGEST_S,
    FRAME_BLOCKS_MAX,
    FRAME_ENTRIES_MAX,
    Digest,
    Frame,
    OutboundSync,
    Replica,
    fingerprint,
)
from tests.kit import bookings
from tests.kit.bookings import FRONTEND, key

W1, W2 = Placement(1, 0), Placement(2, 0)
booking = partial(bookings.booking, decode_blocks=0)


class Peer:
    """A router's tracker and replica; `links` are its streams to other routers, by their id."""

    def __init__(self, router_id: int) -> None:
        self.id = router_id
        self.load_tracker = LoadTracker()
        self.replica = Replica(self.load_tracker)
        self.links: dict[int, Link] = {}
        self.is_alive = True

    def held(self) -> dict[BookingKey, Booking]:
        return {b.key: b for b in self.load_tracker}


class Link:
    """One stream, sent and applied in lockstep. A lost frame is not applied."""

    def __init__(self, sender: Peer, receiver: Peer) -> None:
        self.sender, self.receiver = sender, receiver
        self.outbound: OutboundSync = sender.replica.open_outbound()
        self.stream = receiver.replica.stream_opened(sender.id)

    def step(self, now: float, *, is_lost: bool = False) -> Frame:
        frame = self.outbound.frame(now)
        if not is_lost:
            self.sender.replica.peer_responded(self.receiver.id, now)
        if not is_lost and self.receiver.replica.apply_frame(
            self.sender.id, self.stream, frame, now
        ):
            self.outbound.request_full_sync()
        return frame

    def flush(self, now: float) -> None:
        for _ in range(1000):
            self.step(now)
            if self.outbound.seconds_until_due(now) > 0:
                return
        raise AssertionError("the full sync never ends")

    def close(self, now: float) -> None:
        self.sender.replica.close_outbound(self.outbound)
        self.sender.replica.peer_stream_ended(self.receiver.id)
        self.receiver.replica.stream_closed(self.sender.id, self.stream, now)


def pair() -> tuple[Peer, Peer, Link]:
    one, two = Peer(1), Peer(2)
    return one, two, Link(one, two)


def test_a_peer_counts_bookings_of_another_router() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking("a"), session, 0.0)
    link.step(0.0)
    one.load_tracker.book(booking("b", W2), session, 0.0)
    link.step(0.0)
    assert two.held() == one.held()
    assert two.load_tracker.load(W1, 0.0) == LoadTotals(100, 0, 1)
    assert two.load_tracker.orphan_count == 0
    one.load_tracker.mark_prefill_done(key("a"))
    one.load_tracker.add_output_blocks(key("a"), 3)
    one.load_tracker.free(key("b"))
    link.step(0.0)
    assert two.held() == one.held()
    assert two.load_tracker.load(W1, 0.0) == LoadTotals(0, 3, 1)
    assert two.load_tracker.load(W2, 0.0) == LoadTotals()


def test_a_full_sync_that_was_lost_is_requested_again() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking("a"), session, 0.0)
    link.step(0.0, is_lost=True)
    one.load_tracker.book(booking("b"), session, 0.0)
    link.step(0.0)  # Two requests a full sync: the first frame is missing.
    link.step(0.0, is_lost=True)
    link.flush(DIGEST_S)
    link.flush(2 * DIGEST_S)
    assert two.held() == one.held()
    assert two.replica.resends == 2


def test_only_own_bookings_are_sent() -> None:
    one, two, link = pair()
    three = Peer(3)
    one.load_tracker.book(booking(), one.load_tracker.open_session(FRONTEND), 0.0)
    link.flush(0.0)
    onward = Link(two, three)
    onward.flush(0.0)
    assert key() in two.held()
    assert three.held() == {}


def test_changes_between_two_frames_are_sent_once_with_their_present_state() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    link.flush(0.0)
    one.load_tracker.book(booking("a"), session, 0.1)
    one.load_tracker.mark_prefill_done(key("a"))
    one.load_tracker.book(booking("b"), session, 0.1)
    one.load_tracker.free(key("b"))
    frame = link.step(0.1)
    assert [b.key for b in frame.upserts] == [key("a")]
    assert frame.upserts[0].revision == 2
    assert frame.removals == (key("b"),)
    assert two.held() == one.held()


def test_a_full_sync_uses_frames_of_bounded_size_and_includes_new_changes() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    for n in range(2 * FRAME_ENTRIES_MAX):
        one.load_tracker.book(booking(f"{n}"), session, 0.0)
    first = link.step(0.0)
    assert (first.begins_all, first.ends_all, first.digest) == (True, False, 0)
    one.load_tracker.free(key("0"))
    one.load_tracker.free(key(f"{FRAME_ENTRIES_MAX}"))
    one.load_tracker.book(booking("new"), session, 0.0)
    frames = [first]
    while link.outbound.seconds_until_due(0.0) == 0:
        frames.append(link.step(0.0))
    assert max(len(f.upserts) + len(f.removals) for f in frames) == FRAME_ENTRIES_MAX
    assert [f.ends_all for f in frames].count(True) == 1
    assert [f.sequence for f in frames] == list(range(1, len(frames) + 1))
    assert two.held() == one.held()
    assert two.replica.resends == 0


def test_a_digest_each_second_detects_lost_updates_and_causes_a_full_sync() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    for name in "abc":
        one.load_tracker.book(booking(name), session, 0.0)
    link.flush(0.0)
    # As if a bug had lost an upsert and a removal: no sequence gap shows that.
    two.replica._peer_states[1].digest.discard(key("a"))
    del two.replica._peer_states[1].bookings[key("a")]
    two.load_tracker.booking_ended(key("a"))
    one.load_tracker.free(key("b"))
    link.outbound._changed_bookings.clear()
    assert link.step(0.5).digest == 0, "not due yet"
    assert two.held().keys() == {key("b"), key("c")}
    assert link.step(DIGEST_S).digest != 0
    assert two.replica.resends == 1
    link.flush(DIGEST_S)
    assert two.held() == one.held()
    link.step(2 * DIGEST_S)
    assert two.replica.resends == 1, "the states are equal now"


def test_a_lost_frame_is_detected_at_once_and_repaired() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking("a"), session, 0.0)
    link.flush(0.0)
    one.load_tracker.free(key("a"))
    link.step(0.1, is_lost=True)
    one.load_tracker.book(booking("b"), session, 0.1)
    link.step(0.1)
    assert two.replica.resends == 1
    link.flush(0.1)
    assert two.held() == one.held()


def test_a_frame_lost_during_a_full_sync_ends_no_booking() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    for n in range(3 * FRAME_ENTRIES_MAX):
        one.load_tracker.book(booking(f"{n}"), session, 0.0)
    link.flush(0.0)
    link.outbound.request_full_sync()
    link.step(0.1)
    link.step(0.1, is_lost=True)
    link.step(0.1)
    assert two.held() == one.held()
    link.flush(0.1)
    assert two.held() == one.held()


def test_a_duplicate_frame_is_ignored() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking(), session, 0.0)
    duplicate = link.step(0.0)
    one.load_tracker.free(key())
    link.step(0.1)
    assert not two.replica.apply_frame(1, link.stream, duplicate, 0.2)
    assert two.held() == {}


def test_a_peer_that_reads_nothing_uses_bounded_memory() -> None:
    one, _, link = pair()
    link.flush(0.0)
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking("last"), session, 0.0)
    for n in range(BACKLOG_MAX + 1):
        link.outbound.changed(key(f"{n}"))
    assert len(link.outbound._changed_bookings) <= BACKLOG_MAX
    for n in range(BACKLOG_MAX + 1):
        link.outbound.changed(key(f"{n}"))
    assert len(link.outbound._changed_bookings) <= BACKLOG_MAX
    frame = link.step(0.0)
    assert frame.begins_all
    assert [b.key for b in frame.upserts] == [key("last")]


def test_bookings_of_a_lost_peer_count_for_three_more_seconds() -> None:
    one, two, link = pair()
    one.load_tracker.book(booking(), one.load_tracker.open_session(FRONTEND), 0.0)
    link.flush(0.0)
    link.close(10.0)
    assert two.load_tracker.orphan_count == 1
    assert two.load_tracker.load(W1, 10.0).requests == 1
    assert two.load_tracker.expire(10.0 + ORPHAN_S - 0.01) == 0
    assert two.load_tracker.expire(10.0 + ORPHAN_S) == 1
    assert two.load_tracker.load(W1, 14.0) == LoadTotals()


def test_a_peer_that_returns_in_time_owns_its_bookings_again() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking("a"), session, 0.0)
    one.load_tracker.book(booking("b"), session, 0.0)
    link.flush(0.0)
    link.close(10.0)
    one.load_tracker.free(key("b"))
    Link(one, two).flush(10.2)
    assert two.load_tracker.orphan_count == 1, "an ended booking is not sent again"
    two.load_tracker.expire(20.0)
    assert two.held() == one.held()


def test_bookings_registered_again_at_another_router_move_there() -> None:
    one, two, link = pair()
    back = Link(two, one)
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking(), session, 0.0)
    link.flush(0.0)
    back.flush(0.0)
    one.load_tracker.end_session(session, 1.0)
    assert (
        two.load_tracker.reregister(booking(), two.load_tracker.open_session(FRONTEND), 1.1)
        is False
    )
    assert two.load_tracker.get_own(key()) is not None
    back.step(1.1)
    assert one.load_tracker.orphan_count == 0
    assert one.load_tracker.get_own(key()) is None
    assert link.step(1.1).released == (key(),)
    assert two.held() == one.held() == {key(): booking()}
    two.load_tracker.free(key())
    back.step(1.2)
    assert two.held() == one.held() == {}


def test_the_end_of_a_session_hands_over_bookings_that_a_peer_owns() -> None:
    one, two, link = pair()
    back = Link(two, one)
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking(), session, 0.0)
    link.flush(0.0)
    two.load_tracker.reregister(booking(), two.load_tracker.open_session(FRONTEND), 1.0)
    back.flush(1.0)
    assert one.load_tracker.get_own(key()) is not None, "its session is still open"
    one.load_tracker.end_session(session, 1.1)
    assert one.load_tracker.get_own(key()) is None
    assert one.load_tracker.orphan_count == 0


def test_a_free_at_one_router_ends_the_orphan_of_another() -> None:
    one, two, link = pair()
    back = Link(two, one)
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking(), session, 0.0)
    link.flush(0.0)
    back.flush(0.0)
    one.load_tracker.end_session(session, 1.0)
    two.load_tracker.free(key())
    back.step(1.1)
    assert one.held() == two.held() == {}


def test_the_highest_revision_wins_between_routers() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking(), session, 0.0)
    two.load_tracker.reregister(
        booking(worker=W2, revision=3), two.load_tracker.open_session(FRONTEND), 0.0
    )
    link.flush(0.0)
    assert two.load_tracker.get(key()) == booking(worker=W2, revision=3)
    Link(two, one).flush(0.0)
    assert one.load_tracker.get(key()) == booking(worker=W2, revision=3)
    assert one.load_tracker.load(W1, 0.0) == LoadTotals()


def test_a_booking_reported_by_two_peers_stays_until_neither_reports_it() -> None:
    one, two, link = pair()
    three = Peer(3)
    one.load_tracker.book(booking(), one.load_tracker.open_session(FRONTEND), 0.0)
    three.load_tracker.reregister(booking(), three.load_tracker.open_session(FRONTEND), 0.0)
    link.flush(0.0)
    other = Link(three, two)
    other.flush(0.0)
    link.close(1.0)
    assert two.load_tracker.orphan_count == 0
    assert key() in two.held()
    three.load_tracker.free(key())
    other.step(1.1)
    assert two.held() == {}


@pytest.mark.parametrize("is_full_sync", [False, True], ids=["changes", "everything"])
def test_a_third_router_counts_a_released_booking_before_it_learns_the_owner(
    is_full_sync: bool,
) -> None:
    one, three, to_three = pair()
    one.load_tracker.book(booking(), one.load_tracker.open_session(FRONTEND, 1), 0.0)
    to_three.flush(0.0)
    two = Peer(2)
    two.load_tracker.reregister(booking(), two.load_tracker.open_session(FRONTEND, 2), 1.0)
    Link(two, one).flush(1.0)
    assert one.load_tracker.get_own(key()) is None
    if is_full_sync:
        to_three.outbound.request_full_sync()
    to_three.flush(1.0)
    assert three.held().keys() == {key()}
    assert three.load_tracker.orphan_count == 1
    Link(two, three).flush(1.1)
    assert three.load_tracker.orphan_count == 0


def test_a_removal_is_sent_even_if_a_peer_reports_the_booking_again_first() -> None:
    one, two, to_two = pair()
    two.load_tracker.book(booking(), session := two.load_tracker.open_session(FRONTEND, 1), 0.0)
    to_one = Link(two, one)
    two.load_tracker.end_session(session, 0.9)
    to_two.flush(0.9)
    one.load_tracker.reregister(booking(), one.load_tracker.open_session(FRONTEND, 2), 0.95)
    one.load_tracker.free(key())
    to_one.step(0.96)
    frame = to_two.step(0.97)
    assert (frame.removals, frame.released) == ((key(),), ())
    to_one.flush(0.98)
    assert one.held() == two.held() == {}


def test_a_newer_stream_replaces_an_older_one_and_survives_its_end() -> None:
    one, two, link = pair()
    one.load_tracker.book(booking(), one.load_tracker.open_session(FRONTEND), 0.0)
    link.flush(0.0)
    newer = Link(one, two)
    assert not two.replica.is_current(1, link.stream)
    newer.flush(0.1)
    link.close(0.2)
    assert two.load_tracker.orphan_count == 0
    assert two.held() == one.held()


def test_a_snapshot_counts_as_orphans_until_the_peer_sends_a_full_sync() -> None:
    one, two = Peer(1), Peer(2)
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking("a"), session, 0.0)
    one.load_tracker.book(booking("b"), session, 0.0)
    for part in one.replica.snapshot():
        two.replica.receive_snapshot(1, part, 0.0)
    assert two.held() == one.held()
    assert two.load_tracker.orphan_count == 2
    assert not any(map(two.load_tracker.get_own, two.load_tracker.keys()))
    one.load_tracker.free(key("b"))
    Link(one, two).flush(0.2)
    assert two.load_tracker.orphan_count == 1
    two.load_tracker.expire(ORPHAN_S)
    assert two.held() == one.held()


def started(router_id: int, *peers: Peer, now: float) -> Peer:
    """A router that has received the snapshots of its peers."""
    starting = Peer(router_id)
    for peer in peers:
        for part in peer.replica.snapshot():
            starting.replica.receive_snapshot(peer.id, part, now)
    return starting


def test_a_starting_router_counts_the_orphans_of_a_router_that_died_before() -> None:
    dead, survivor, link = pair()
    dead.load_tracker.book(booking("replicated"), dead.load_tracker.open_session(FRONTEND), 0.0)
    link.flush(0.0)
    survivor.load_tracker.book(
        booking("own", W2), survivor.load_tracker.open_session(FRONTEND + 1), 0.0
    )
    unaware = started(3, survivor, now=1.0)
    assert unaware.held() == survivor.held(), "also before the loss is detected"
    link.close(1.0)
    starting = started(4, survivor, now=1.1)
    assert starting.held() == survivor.held()
    assert starting.held().keys() == {key("replicated"), key("own")}
    survivor.load_tracker.reregister(
        booking("replicated"), survivor.load_tracker.open_session(FRONTEND), 1.2
    )
    Link(survivor, starting).flush(1.2)
    starting.load_tracker.expire(1.1 + ORPHAN_S)
    assert starting.held().keys() == {key("replicated"), key("own")}
    assert starting.load_tracker.orphan_count == 0


def test_snapshot_orphans_last_until_a_slow_peer_sends_a_full_sync() -> None:
    slow = Peer(1)
    session = slow.load_tracker.open_session(FRONTEND)
    for name in "abc":
        slow.load_tracker.book(booking(name), session, 0.0)
    starting = started(2, slow, now=0.0)
    to_slow = Link(starting, slow)
    for tenths in range(100):  # Discovery shows the starting router only after ten seconds.
        to_slow.step(tenths / 10)
        starting.load_tracker.expire(tenths / 10)
        assert starting.held() == slow.held()
    slow.load_tracker.free(key("a"))
    from_slow = Link(slow, starting)
    from_slow.flush(10.0)
    for tenths in range(100, 100 + round(10 * ORPHAN_S)):
        to_slow.step(tenths / 10)
        starting.load_tracker.expire(tenths / 10)
    assert starting.held() == slow.held()
    assert starting.held().keys() == {key("b"), key("c")}
    assert starting.load_tracker.orphan_count == 0


def test_snapshot_orphans_end_three_seconds_after_the_peer_became_silent() -> None:
    silent = Peer(1)
    silent.load_tracker.book(booking(), silent.load_tracker.open_session(FRONTEND), 0.0)
    starting = started(2, silent, now=0.0)
    to_silent = Link(starting, silent)
    to_silent.step(2.0)
    to_silent.close(2.5)
    assert starting.load_tracker.expire(2.0 + ORPHAN_S - 0.1) == 0
    assert starting.load_tracker.expire(2.0 + ORPHAN_S) == 1


def test_a_snapshot_after_a_full_sync_extends_no_orphan() -> None:
    one, two, link = pair()
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking(), session, 0.0)
    link.flush(0.0)
    gone = booking("gone")
    two.replica.receive_snapshot(1, [gone], 0.0)
    back = Link(two, one)
    for second in range(1 + round(ORPHAN_S)):
        back.step(float(second))
        two.load_tracker.expire(float(second))
    assert two.held() == one.held()


def test_own_orphans_expire_even_if_a_snapshot_contained_them() -> None:
    peer = Peer(1)
    peer.load_tracker.book(booking(), peer.load_tracker.open_session(FRONTEND), 0.0)
    starting = started(2, peer, now=0.0)
    to_peer = Link(starting, peer)
    session = starting.load_tracker.open_session(FRONTEND)
    starting.load_tracker.reregister(booking(), session, 0.5)
    starting.load_tracker.end_session(session, 1.0)
    for tenths in range(10, 50):
        to_peer.step(tenths / 10)
        starting.load_tracker.expire(tenths / 10)
    assert starting.held() == {}


def test_output_blocks_and_decay_give_the_same_load_at_every_router() -> None:
    one, two, link = pair()
    back = Link(two, one)
    session = one.load_tracker.open_session(FRONTEND)
    one.load_tracker.book(booking(prefill_tokens=0, decode_blocks=4), session, 0.0)
    for fraction, weight in ((None, 6), (0.5, 4), (0.125, 1)):
        assert one.load_tracker.add_output_blocks(key(), 2, fraction)
        link.step(0.1)
        assert two.held() == one.held()
        assert (
            two.load_tracker.load(W1, 0.1)
            == one.load_tracker.load(W1, 0.1)
            == LoadTotals(0, weight, 1)
        )
    # Also for the next owner of the booking, and for a starting router.
    held = one.load_tracker.get(key())
    assert held is not None
    assert (held.decode_blocks, held.decay, held.revision) == (10, 0.125, 4)
    two.load_tracker.reregister(held, two.load_tracker.open_session(FRONTEND), 0.2)
    one.load_tracker.end_session(session, 0.2)
    back.flush(0.2)
    assert two.load_tracker.add_output_blocks(key(), 6, 0.0625)
    back.step(0.3)
    three = started(3, one, now=0.3)
    loads = [each.load_tracker.load(W1, 0.3) for each in (one, two, three)]
    assert loads == [LoadTotals(0, 1, 1)] * 3
    assert one.held() == two.held() == three.held()


def test_a_booking_requested_at_two_routers_is_owned_by_the_last_one() -> None:
    one, two, three = Peer(1), Peer(2), Peer(3)
    peers = (one, two, three)
    links = [Link(a, b) for a in peers for b in peers if a is not b]
    first = one.load_tracker.open_session(FRONTEND, generation=1)
    one.load_tracker.book(booking(worker=W1), first, 0.0)
    next(x for x in links if (x.sender, x.receiver) == (one, three)).flush(0.0)
    # No response came; the update from one to two is in flight.
    two.load_tracker.book(
        booking(worker=W2), two.load_tracker.open_session(FRONTEND, generation=2), 0.0
    )
    for link in links * 2:
        link.flush(0.1)
    assert [peer.held() for peer in peers] == [two.held()] * 3
    assert [b.worker for b in two.load_tracker] == [W2]
    # Router one has not detected the move; its updates do not count.
    assert not one.load_tracker.book(booking(worker=W1), first, 0.2)
    two.load_tracker.free(key())
    for link in links:
        link.flush(0.2)
    assert [peer.held() for peer in peers] == [{}] * 3


def test_a_session_is_superseded_at_once_if_a_later_one_is_known() -> None:
    one, two, link = pair()
    over: list[int] = []
    two.load_tracker.events.frontend_session_superseded.subscribe(over.append)
    known = two.load_tracker.open_session(FRONTEND, generation=1)
    one.load_tracker.open_session(FRONTEND, generation=3)
    for second in range(3):
        link.flush(float(second))
    assert over == [known], "sent each second, but published once"
    late = two.load_tracker.open_session(FRONTEND, generation=2)
    assert two.load_tracker.is_superseded(late)
    two.load_tracker.reregister(booking(), late, 3.0)
    assert two.load_tracker.orphan_count == 1, "the owner of the later session may not have it yet"
    for session in (known, late):
        two.load_tracker.end_session(session, 3.0)
    assert not two.load_tracker.is_superseded(two.load_tracker.open_session(FRONTEND, generation=1))


def test_a_later_reregistration_wins_at_the_same_revision() -> None:
    one, two, link = pair()
    one.load_tracker.book(
        booking(worker=W1), one.load_tracker.open_session(FRONTEND, generation=1), 0.0
    )
    link.flush(0.0)
    session = two.load_tracker.open_session(FRONTEND, generation=2)
    assert two.load_tracker.reregister(booking(worker=W2), session, 0.1)
    assert [b.worker for b in two.load_tracker] == [W2]
    # Late frames of an ended session.
    older = two.load_tracker.open_session(FRONTEND, generation=1)
    assert not two.load_tracker.reregister(booking(worker=W1), older, 0.2)
    two.load_tracker.end_session(older, 0.3)
    assert two.load_tracker.orphan_count == 0


def test_a_booking_released_by_two_routers_at_once_is_kept_by_both() -> None:
    one, two, link = pair()
    back = Link(two, one)
    link.flush(0.0)
    back.flush(0.0)
    sessions = [
        (peer, peer.load_tracker.open_session(FRONTEND, generation))
        for generation, peer in enumerate((one, two), 1)
    ]
    for peer, session in sessions:  # The frontend repeated the request, and left both.
        peer.load_tracker.book(booking(), session, 0.0)
        peer.load_tracker.end_session(session, 0.1)
    crossing = link.outbound.frame(0.1), back.outbound.frame(0.1)
    two.replica.apply_frame(1, link.stream, crossing[0], 0.1)
    one.replica.apply_frame(2, back.stream, crossing[1], 0.1)
    link.step(0.2)
    back.step(0.2)
    assert one.held().keys() == two.held().keys() == {key()}
    assert (one.load_tracker.orphan_count, two.load_tracker.orphan_count) == (1, 1)
    for peer in (one, two):
        assert peer.load_tracker.expire(0.1 + ORPHAN_S - 0.01) == 0
        peer.load_tracker.expire(0.2 + ORPHAN_S)
    link.step(4.0)
    back.step(4.0)
    assert one.held() == two.held() == {}


def test_a_third_router_counts_a_booking_that_moves_between_two_others() -> None:
    one, two, three = Peer(1), Peer(2), Peer(3)
    first, back, late = Link(one, three), Link(two, one), Link(two, three)
    session = one.load_tracker.open_session(FRONTEND, generation=1)
    one.load_tracker.book(booking(), session, 0.0)
    first.flush(0.0)
    one.load_tracker.end_session(session, 0.1)
    again = two.load_tracker.open_session(FRONTEND, generation=2)
    two.load_tracker.reregister(booking(), again, 0.1)
    back.flush(0.1)
    assert one.load_tracker.get_own(key()) is None
    first.flush(0.1)
    assert three.held().keys() == {key()}
    late.flush(0.2)
    assert three.load_tracker.orphan_count == 0
    two.load_tracker.free(key())
    for link in (back, late):
        link.flush(0.3)
    assert one.held() == three.held() == {}


def test_progress_of_a_frontend_that_moved_away_changes_nothing() -> None:
    one, two, link = pair()
    back = Link(two, one)
    one.load_tracker.book(booking(), one.load_tracker.open_session(FRONTEND, generation=1), 0.0)
    link.flush(0.0)
    progressed = booking(
        prefill_tokens=0, decode_blocks=3, revision=3
    )  # Progress that router one has not received.
    two.load_tracker.reregister(
        progressed, two.load_tracker.open_session(FRONTEND, generation=2), 0.1
    )
    back.flush(0.1)
    assert not one.load_tracker.mark_prefill_done(key())
    assert not one.load_tracker.add_output_blocks(key(), 3)
    assert two.load_tracker.add_output_blocks(key(), 1)
    back.flush(0.2)
    assert one.held() == two.held()


def test_a_full_tracker_refuses_bookings_of_peers_and_counts_them() -> None:
    one, two = Peer(1), Peer(2)
    two.load_tracker = LoadTracker(bookings_max=1)
    two.replica = Replica(two.load_tracker)
    session = one.load_tracker.open_session(FRONTEND)
    for name in "abc":
        one.load_tracker.book(booking(name), session, 0.0)
    link = Link(one, two)
    link.flush(0.0)
    assert (len(two.load_tracker), two.replica.refused, two.replica.resends) == (1, 2, 0)
    with pytest.raises(Overloaded):
        two.load_tracker.receive(booking("d"), 0.0)
    for name in "abc":
        one.load_tracker.free(key(name))
    link.step(0.1)
    assert len(two.load_tracker) == 0


def prompt(first: int, blocks: int, model: str = "m") -> Query:
    hashes = np.arange(first, first + blocks, dtype=np.uint64)
    return Query(model, blocks * 16, hashes_to_bytes(hashes), 1, 16)


def test_prompts_are_sent_once_in_frames_of_bounded_size() -> None:
    one, two, link = pair()
    link.flush(0.0)
    queries = [prompt(1 << 20 * n, FRAME_BLOCKS_MAX // 2) for n in range(1, 4)]
    for query in queries:
        one.load_tracker.events.prompt_entered(query, W1)
    assert link.outbound.is_frame_full
    sent = [link.step(0.1).prompts for _ in range(3)]
    assert [len(prompts) for prompts in sent] == [2, 1, 0]
    assert [p.query.prefix_hashes for part in sent for p in part] == [
        query.prefix_hashes for query in queries
    ]
    link.outbound.request_full_sync()
    assert not link.step(0.2).prompts, "a full sync does not repeat them"
    assert two.replica.refused == 0, "a router without such entries ignores them"


def test_prompts_for_a_peer_that_reads_nothing_use_bounded_memory() -> None:
    one, _, link = pair()
    blocks = BACKLOG_BLOCKS_MAX // 4
    for n in range(1, 7):
        one.load_tracker.events.prompt_entered(prompt(n << 20, blocks), W1)
    firsts = []
    while prompts := link.outbound.frame(0.0).prompts:
        firsts += [int(hashes_from_bytes(p.query.prefix_hashes)[0]) >> 20 for p in prompts]
    assert firsts == [3, 4, 5, 6], "the oldest are not sent"


def test_a_digest_does_not_depend_on_order() -> None:
    some = [booking(name, revision=n + 1) for n, name in enumerate("abc")]
    one, two = Digest(), Digest()
    assert one.value == two.value != 0
    for each in some:
        one.put(each)
    for each in reversed(some):
        two.put(replace(each, revision=9))
        two.put(each)
    two.put(booking("d"))
    assert one.value != two.value
    two.discard(key("d"))
    two.discard(key("never"))
    assert one.value == two.value
    assert len({fingerprint(b) for b in some} | {fingerprint(booking("a", revision=2))}) == 4


# Any order of events.

NAMES = "abcd"
FRONTENDS = (7, 8)
IDS = (1, 2, 3)


class Client:
    """A frontend: its bookings, its session, and its requests without a response.

    forgotten: sessions that it left without notice to the router.
    """

    def __init__(self, frontend_id: int) -> None:
        self.id = frontend_id
        self.held: dict[BookingKey, Booking] = {}
        self.requested: list[BookingKey] = []
        self.router: Peer | None = None
        self.session = self.generation = 0
        self.forgotten: list[tuple[Peer, int]] = []


class RoutersMachine(RuleBasedStateMachine):
    """Routers die and return, frames get lost, frontends move: in the end all trackers are correct.

    The frontends' bookings are the reference. If the only router with a booking dies before it
    sends it, no router has it for a while; its frontend registers it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.routers = {n: Peer(n) for n in IDS}
        self.clients = {n: Client(n) for n in FRONTENDS}
        self.last_id = max(IDS)
        self.last_name = 0
        self.connect_all()

    def living(self) -> list[Peer]:
        return [router for router in self.routers.values() if router.is_alive]

    def connect_all(self) -> None:
        for one in self.living():
            for two in self.living():
                if one is not two and two.id not in one.links:
                    one.links[two.id] = Link(one, two)

    def attach(
        self, client: Client, router: Peer, *, is_seen: bool = True, worker: Placement = W1
    ) -> None:
        if client.router is not None and client.router.is_alive:
            if is_seen:
                client.router.load_tracker.end_session(client.session, self.now)
            else:
                client.forgotten.append((client.router, client.session))
        client.generation += 1
        session = router.load_tracker.open_session(client.id, client.generation, self.now)
        client.router, client.session = router, session
        for held in client.held.values():
            router.load_tracker.reregister(held, client.session, self.now)
        for one in client.requested:
            router.load_tracker.book(
                Booking(one, "m", worker, None, 10, 2), client.session, self.now
            )

    @rule(
        frontend=st.sampled_from(FRONTENDS),
        data=st.data(),
        is_seen=st.booleans(),
        worker=st.sampled_from([W1, W2]),
    )
    def move(self, frontend: int, data: st.DataObject, is_seen: bool, worker: Placement) -> None:
        router = data.draw(st.sampled_from(self.living()))
        self.attach(self.clients[frontend], router, is_seen=is_seen, worker=worker)

    @rule(frontend=st.sampled_from(FRONTENDS))
    def a_router_sees_that_it_was_left(self, frontend: int) -> None:
        client = self.clients[frontend]
        if client.forgotten:
            router, session = client.forgotten.pop()
            if router.is_alive:
                router.load_tracker.end_session(session, self.now)

    @rule(frontend=st.sampled_from(FRONTENDS), worker=st.sampled_from([W1, W2]))
    def request_placement(self, frontend: int, worker: Placement) -> None:
        client = self.clients[frontend]
        if client.router is not None and client.router.is_alive:
            self.last_name += 1
            new = Booking(key(f"{self.last_name}", frontend_id=frontend), "m", worker, None, 10, 2)
            client.router.load_tracker.book(new, client.session, self.now)
            client.requested.append(new.key)

    @rule(frontend=st.sampled_from(FRONTENDS))
    def receive_response(self, frontend: int) -> None:
        client = self.clients[frontend]
        if client.requested and client.router is not None and client.router.is_alive:
            one = client.requested.pop()
            booked = client.router.load_tracker.get(one)
            assert booked is not None, "only its frontend may end it"
            client.held[one] = replace(booked, generation=0)

    @rule(frontend=st.sampled_from(FRONTENDS), worker=st.sampled_from([W1, W2]))
    def place(self, frontend: int, worker: Placement) -> None:
        client = self.clients[frontend]
        if client.router is not None and client.router.is_alive:
            self.last_name += 1
            new = Booking(key(f"{self.last_name}", frontend_id=frontend), "m", worker, None, 10, 2)
            client.router.load_tracker.book(new, client.session, self.now)
            client.held[new.key] = new

    @rule(frontend=st.sampled_from(FRONTENDS), data=st.data())
    def prefill_done(self, frontend: int, data: st.DataObject) -> None:
        client = self.clients[frontend]
        if client.held:
            one = data.draw(st.sampled_from(sorted(client.held)))
            held = client.held[one]
            if held.prefill_tokens:
                client.held[one] = replace(held, prefill_tokens=0, revision=held.revision + 1)
                if client.router is not None and client.router.is_alive:
                    client.router.load_tracker.mark_prefill_done(one)

    @rule(frontend=st.sampled_from(FRONTENDS), data=st.data())
    def free(self, frontend: int, data: st.DataObject) -> None:
        client = self.clients[frontend]
        if client.held:
            one = data.draw(st.sampled_from(sorted(client.held)))
            del client.held[one]
            if client.router is not None and client.router.is_alive:
                client.router.load_tracker.free(one)

    @rule(data=st.data(), is_lost=st.booleans())
    def exchange(self, data: st.DataObject, is_lost: bool) -> None:
        links = [link for router in self.living() for link in router.links.values()]
        if links:
            self.step(data.draw(st.sampled_from(links)), is_lost=is_lost)

    @rule(data=st.data())
    def all_exchange(self, data: st.DataObject) -> None:
        links = [link for router in self.living() for link in router.links.values()]
        for link in data.draw(st.permutations(links)):
            self.step(link)

    def step(self, link: Link, *, is_lost: bool = False) -> None:
        counted = link.receiver.held().keys() & link.sender.held().keys()
        link.step(self.now, is_lost=is_lost)
        assert counted <= link.receiver.held().keys(), (
            "an update ends no booking that the sender counts"
        )

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        links = [link for router in self.living() for link in router.links.values()]
        if links:
            link = data.draw(st.sampled_from(links))
            del link.sender.links[link.receiver.id]
            link.close(self.now)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if len(self.living()) > 1:
            victim = data.draw(st.sampled_from(self.living()))
            victim.is_alive = False
            for link in victim.links.values():
                link.close(self.now)
            for router in self.living():
                if victim.id in router.links:
                    router.links.pop(victim.id).close(self.now)

    @rule()
    def one_returns(self) -> None:
        if len(self.living()) < len(IDS):
            self.last_id += 1
            peers = self.living()
            starting = self.routers[self.last_id] = started(self.last_id, *peers, now=self.now)
            counted = {one for peer in peers for one in peer.held()}
            assert starting.held().keys() == counted, (
                "the router starts with the bookings of all peers"
            )
            self.connect_all()

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for router in self.living():
            router.load_tracker.expire(self.now)

    @rule()
    def rest(self) -> None:
        """Faults stop: within an orphan period and a digest all states are correct."""
        self.connect_all()
        for client in self.clients.values():
            if client.router is None or not client.router.is_alive:
                self.attach(client, self.living()[0])
        # A digest, an orphan period, and one for the orphans made by that.
        for _ in range(5):
            self.now += DIGEST_S
            for router in self.living():
                router.load_tracker.expire(self.now)
            for _ in range(2):
                for router in self.living():
                    for link in router.links.values():
                        link.flush(self.now)
        for client in self.clients.values():
            while client.requested:
                self.receive_response(client.id)
        truth = {one: held for client in self.clients.values() for one, held in client.held.items()}
        for router in self.living():
            held = {one: replace(b, generation=0) for one, b in router.held().items()}
            assert held == truth
            assert router.load_tracker.orphan_count == 0

    def teardown(self) -> None:
        self.rest()
        for client in self.clients.values():
            for one in list(client.held):
                del client.held[one]
                assert client.router is not None
                client.router.load_tracker.free(one)
        self.rest()
        for router in self.living():
            assert router.load_tracker.load(W1, self.now) == LoadTotals()


TestRouters = pytest.mark.slow(RoutersMachine.TestCase)
TestRouters.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
