"""Client sessions at several routers: all routers converge on one placement of each session."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import RoutingHints, SessionAction, SessionControl
from kvmesh.router.v1 import router_pb2 as pb
from router_svc.core.booking import BookingKey, SessionName
from router_svc.core.decision import DecisionRecord
from router_svc.core.policy import Policy
from router_svc.core.replication import BACKLOG_MAX, FRAME_ENTRIES_MAX, OutboundSync, Replica
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from router_svc.core.sessions import (
    AffinityMode,
    SessionAffinity,
    SessionPlacement,
    SessionRecord,
    SessionUpdate,
)
from router_svc.proto import (
    booking_from_proto,
    booking_to_proto,
    frame_from_proto,
    session_record_from_proto,
    session_record_to_proto,
    snapshot_from_proto,
)
from tests.kit.instances import snapshot_of

TTL_S = 60.0
FRONTEND = 7
LORAS = frozenset({"french"})
W1 = Placement(1, 0)
EPOCH_S = 1.7e9
WORKERS = tuple(
    Instance(n, "mesh", "worker", "", "h:1", model="m", block_size=16, loras=LORAS)
    for n in (1, 2, 3, 4)
)


class Peer:
    """A router with a frontend session, and its streams to others."""

    def __init__(self, router_id: int, mode: AffinityMode = "hard") -> None:
        self.id = router_id
        policy = Policy(session_ttl_s=TTL_S, session_mode=mode)
        self.router = Router(SELECTORS["random"](), policy=policy)
        self.replica = Replica(self.router.load_tracker, affinity=self.router.affinity)
        self.see(*WORKERS)
        self.frontend = FRONTEND + router_id
        self.session = self.router.load_tracker.open_session(self.frontend)
        self.out: dict[int, Link] = {}

    def see(self, *workers: Instance) -> None:
        self.router.update(snapshot_of(*workers), 0.0)

    def place(
        self,
        number: int,
        now: float,
        session: str = "s",
        action: SessionAction | None = None,
        lora_name: str | None = None,
    ) -> DecisionRecord:
        control = SessionControl(session, action)
        hints = RoutingHints(session_control=control, lora_name=lora_name)
        query = Query("m", 100, routing=hints)
        return self.router.decide(query, self.key(number), now, Random(number), self.session)

    def key(self, number: int) -> BookingKey:
        return BookingKey(self.frontend, f"r{number}", 0)

    def end(self, number: int) -> None:
        self.router.load_tracker.free(self.key(number))

    def at(self, session: str = "s") -> SessionPlacement | None:
        updates = self.router.affinity.updates([SessionName("m", session)], 0.0)
        return updates[0].record.placement if updates else None

    def session_records(self) -> dict[SessionName, SessionRecord]:
        affinity = self.router.affinity
        updates = affinity.updates(affinity.sessions(), 0.0)
        return {update.record.session: update.record for update in updates}


class Link:
    """One stream."""

    def __init__(self, sender: Peer, receiver: Peer) -> None:
        self.sender, self.receiver = sender, receiver
        self.outbound: OutboundSync = sender.replica.open_outbound()
        self.stream = receiver.replica.stream_opened(sender.id)

    def step(self, now: float, *, is_lost: bool = False) -> None:
        frame = self.outbound.frame(now)
        if not is_lost and self.receiver.replica.apply_frame(
            self.sender.id, self.stream, frame, now
        ):
            self.outbound.request_full_sync()

    def flush(self, now: float) -> bool:
        """Whether there was an update to send."""
        steps = 0
        while self.outbound.seconds_until_due(now) == 0:
            self.step(now)
            steps += 1
            assert steps < 100, "the full sync never ends"
        return steps > 0

    def close(self, now: float) -> None:
        self.sender.replica.close_outbound(self.outbound)
        self.receiver.replica.stream_closed(self.sender.id, self.stream, now)


def mesh(count: int = 2, **facts: Any) -> list[Peer]:
    peers = [Peer(n + 1, **facts) for n in range(count)]
    for one in peers:
        for other in peers:
            if one is not other:
                one.out[other.id] = Link(one, other)
    return peers


def settle(peers: list[Peer], now: float) -> None:
    """Exchange all updates, including those that updates cause."""
    for _ in range(20):
        flushed = [link.flush(now) for peer in peers for link in peer.out.values()]
        if not any(flushed):
            return
    raise AssertionError("the routers never stop sending updates")


def test_a_session_placed_by_one_router_is_known_to_all() -> None:
    one, two = mesh()
    bound = one.place(1, 0.0)
    settle([one, two], 0.0)
    assert {two.place(n, 0.0).decision.worker for n in range(10)} == {bound.decision.worker}
    assert two.place(10, 0.0).affinity == "kept"


def test_two_routers_that_place_a_session_at_once_agree() -> None:
    one, two = mesh()
    placed = {one.place(1, 0.0).decision.worker, two.place(2, 0.0).decision.worker}
    settle([one, two], 0.0)
    assert one.at() == two.at()
    assert {b.worker for b in (one.at(),) if b} <= placed
    assert one.place(3, 0.0).decision.worker == two.place(4, 0.0).decision.worker


def test_a_session_stays_active_while_a_request_runs_through_another_router() -> None:
    one, two = mesh()
    one.place(1, 0.0)
    settle([one, two], 0.0)
    for now in range(0, 600, 50):
        two.router.expire(float(now))
    assert two.router.affinity.active_count == 1
    one.end(1)
    settle([one, two], 600.0)
    two.router.expire(600.0)
    two.router.expire(600.0 + TTL_S - 0.1)
    assert len(two.router.affinity) == 1
    two.router.expire(600.0 + TTL_S)
    assert len(two.router.affinity) == 0


def test_a_request_too_short_to_be_sent_still_counts_as_use() -> None:
    one, two = mesh()
    one.place(1, 0.0)
    one.end(1)
    settle([one, two], 0.0)
    for now in (0.0, 50.0, 100.0, 150.0):
        for peer in (one, two):
            peer.router.expire(now)
        one.place(int(now) + 2, now)
        one.end(int(now) + 2)  # Before any update is exchanged.
        settle([one, two], now)
        assert two.at() is not None


def test_open_close_and_lost_workers_are_replicated() -> None:
    one, two = mesh()
    one.place(1, 0.0)
    settle([one, two], 0.0)
    two.place(2, 0.0, action=SessionAction.OPEN)
    settle([one, two], 0.0)
    assert one.at() == two.at()
    gone = one.at()
    assert gone is not None
    one.see(*(w for w in WORKERS if w.id != gone.worker.worker_id))
    moved = one.place(3, 0.0)
    assert moved.affinity == "moved"
    settle([one, two], 0.0)
    assert two.place(4, 0.0).decision.worker == moved.decision.worker, (
        "although it still has the old worker"
    )
    two.place(5, 0.0, action=SessionAction.CLOSE)
    settle([one, two], 0.0)
    assert (one.at(), two.at()) == (None, None)
    assert one.place(6, 0.0).affinity == "bound"


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_a_router_that_joins_receives_all_sessions_before_it_serves(mode: AffinityMode) -> None:
    one = Peer(1, mode)
    count = 2 * FRAME_ENTRIES_MAX + 5
    for number in range(count):
        one.place(number, 0.0, f"s{number}")
        if number % 2:
            one.end(number)
    one.router.expire(1.0)
    late = Peer(2, mode)
    parts = list(one.replica.snapshot_session_records(31.0))
    assert max(map(len, parts)) == FRAME_ENTRIES_MAX
    for part in parts:
        late.replica.receive_snapshot(1, (), 100.0, part)
    assert late.session_records() == one.session_records()
    assert (
        late.place(9999, 100.0, "s1").decision.worker == one.place(9999, 31.0, "s1").decision.worker
    )
    late.router.expire(100.0 + TTL_S - 30.0)
    assert len(late.router.affinity) < count, "idle time at the other router counts here"


def test_a_new_stream_or_a_lost_frame_causes_a_full_sync() -> None:
    one, two = mesh()
    one.place(1, 0.0)
    settle([one, two], 0.0)
    one.place(2, 0.0, "t")
    one.out[2].step(0.0, is_lost=True)
    one.place(3, 0.0, "u")
    settle([one, two], 0.0)
    assert two.session_records().keys() == one.session_records().keys()
    fresh = Peer(2)
    one.out[2].close(0.0)
    one.out[2] = Link(one, fresh)
    settle([one], 0.0)
    assert fresh.session_records() == one.session_records()


@pytest.mark.slow
def test_a_peer_that_reads_nothing_uses_bounded_memory() -> None:
    one, two = mesh()
    settle([one, two], 0.0)
    outbound = one.out[2].outbound
    for number in range(2 * BACKLOG_MAX + 1):
        outbound.session_changed(SessionName("m", f"{number}"))
    assert outbound.frame(0.0).begins_all
    outbound.session_changed(SessionName("m", "x"))
    assert len(outbound._changed_sessions) <= 1


EVENT = st.one_of(
    st.tuples(st.just("place"), st.integers(0, 2), st.sampled_from("ab")),
    st.tuples(st.just("open"), st.integers(0, 2), st.sampled_from("ab")),
    st.tuples(st.just("close"), st.integers(0, 2), st.sampled_from("ab")),
    st.tuples(st.just("end"), st.integers(0, 2), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(0, 2), st.integers(1, 2)),
    st.tuples(st.just("lose"), st.integers(0, 2), st.integers(1, 2)),
    st.tuples(st.just("relink"), st.integers(0, 2), st.integers(1, 2)),
    st.tuples(st.just("restart"), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 20.0])),
)


@settings(max_examples=80, deadline=None)
@given(events=st.lists(EVENT, max_size=30))
def test_routers_agree_on_every_session_after_all_updates(
    events: list[Any],
) -> None:
    peers, now, number = mesh(3), 0.0, 0
    live: list[tuple[int, int]] = []
    for event in events:
        match event:
            case ("place" | "open" | "close") as what, which, session:
                number += 1
                action = None if what == "place" else SessionAction(what)
                peers[which].place(number, now, session, action)
                live.append((which, number))
            case "end", which, nth:
                mine = [one for one in live if one[0] == which]
                if mine:
                    one = mine[nth % len(mine)]
                    live.remove(one)
                    peers[which].end(one[1])
            case ("step" | "lose" | "relink") as what, which, offset:
                sender, receiver = peers[which], peers[(which + offset) % 3]
                link = sender.out[receiver.id]
                if what == "relink":
                    link.close(now)
                    sender.out[receiver.id] = Link(sender, receiver)
                else:
                    link.step(now, is_lost=what == "lose")
            case "restart", which:
                old = peers[which]
                for peer in peers:
                    if peer is not old:
                        old.out[peer.id].close(now)
                        peer.out[old.id].close(now)
                peers[which] = Peer(old.id)
                live = [one for one in live if one[0] != which]
                for peer in peers:
                    if peer.id != old.id:
                        peer.out[old.id] = Link(peer, peers[which])
                        peers[which].out[peer.id] = Link(peers[which], peer)
            case "wait", seconds:
                now += seconds
        for peer in peers:
            peer.router.expire(now)
    now += 2.0  # A digest is due, and a frame with a sequence number.
    for peer in peers:
        for link in peer.out.values():
            link.step(now)
    settle(peers, now)
    session_records = [peer.session_records() for peer in peers]
    bound = [{n: b for n, b in some.items() if b.placement is not None} for some in session_records]
    # A session that only some routers dropped is idle; one more use restores it at all.
    for name in {name for some in bound for name in some}:
        known = {some[name] for some in bound if name in some}
        assert len(known) == 1, f"two placements of {name}"
        number += 1
        at = next(peer for peer, some in zip(peers, bound, strict=True) if name in some)
        at.place(number, now, name.session_id)
        settle(peers, now)
        assert len({peer.at(name.session_id) for peer in peers}) == 1


# On the wire.


@pytest.mark.parametrize(
    "record",
    [
        SessionRecord(
            SessionName("m", "s"), SessionPlacement(Placement(1, 2)), 3, BookingKey(4, "r", 5)
        ),
        SessionRecord(
            SessionName("m", "\u20ac", "french"),
            SessionPlacement(Placement(1, 2), Placement(6, 0)),
            1,
            BookingKey(4, "r", 0),
        ),
        SessionRecord(SessionName("m", "s"), None, 2, BookingKey(4, "r", 0)),
    ],
    ids=["whole", "pair", "closed"],
)
def test_session_records_survive_the_wire(record: SessionRecord) -> None:
    message = session_record_to_proto(SessionUpdate(record, 1.5))
    again = pb.SessionBinding.FromString(message.SerializeToString())
    assert session_record_from_proto(again, "bindings") == SessionUpdate(record, 1.5)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"model": ""}, "bindings.model"),
        ({"session_id": ""}, "bindings.session_id"),
        ({"session_id": "x" * 257}, "bindings.session_id"),
        ({"revision": 0}, "bindings.revision"),
        ({"revision": 2**64 - 1}, "bindings.revision"),
        ({"bound_by": pb.BookingKey()}, "bindings.bound_by.request_id"),
    ],
)
def test_an_invalid_session_record_is_refused_and_its_field_named(
    wrong: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        session_record_from_proto(session_binding(**wrong), "bindings")
    assert refused.value.field == field


def test_a_bookings_session_survives_the_wire() -> None:
    peer = Peer(1)
    peer.place(1, 0.0, lora_name="french")
    booking = peer.router.load_tracker.get(peer.key(1))
    assert booking is not None
    assert booking.session == ("m", "s", "french")
    message = booking_to_proto(booking)
    assert booking_from_proto(message, peer.frontend, "announced") == booking


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"model": ""}, "announced.model"),
        ({"revision": 0}, "announced.revision"),
        ({"revision": 2**64 - 1}, "announced.revision"),
        ({"prefill_tokens": 2**64 - 1}, "announced.prefill_tokens"),
        ({"decode_blocks": 2**64 - 1}, "announced.decode_blocks"),
        ({"session_revision": 0}, "announced.session_revision"),
        ({"session_revision": 2**64 - 1}, "announced.session_revision"),
    ],
)
def test_an_invalid_booking_is_refused_and_its_field_named(
    wrong: dict[str, Any], field: str
) -> None:
    """Peers would reject such a booking or its later states, and end the stream."""
    with pytest.raises(InvalidRequest) as refused:
        booking_from_proto(reregistered(**wrong), FRONTEND, "announced")
    assert refused.value.field == field


def reregistered(**facts: Any) -> pb.Booking:
    given: dict[str, Any] = {
        "key": pb.BookingKey(request_id="r"),
        "frontend_id": FRONTEND,
        "model": "m",
        "worker": pb.Placement(worker_id=1),
        "revision": 1,
        "session_id": "s",
        "session_revision": 1,
        **facts,
    }
    return pb.Booking(**given)


def session_binding(**facts: Any) -> pb.SessionBinding:
    given: dict[str, Any] = {
        "model": "m",
        "session_id": "s",
        "revision": 1,
        "bound_by": pb.BookingKey(request_id="r"),
        "frontend_id": 1,
        "worker": pb.Placement(worker_id=1),
        **facts,
    }
    return pb.SessionBinding(**given)


def test_invalid_entries_of_a_peer_are_refused_and_the_rest_is_applied() -> None:
    nameless = pb.Booking(frontend_id=FRONTEND)
    good, other = reregistered(), reregistered(key=pb.BookingKey(request_id="other"))
    peer = Peer(2)
    stream = peer.replica.stream_opened(1)
    first = frame_from_proto(
        pb.SyncRequest(
            sequence=1,
            begins_all=True,
            ends_all=True,
            upserts=[reregistered(frontend_id=0), good, reregistered(model=""), other],
            removals=[nameless],
            released=[nameless],
            bindings=[
                session_binding(model=""),
                session_binding(revision=2**64 - 1),
                session_binding(),
            ],
        )
    )
    assert [error.field for error in first.refused] == [
        "upserts.frontend_id",
        "upserts.model",
        "removals.key.request_id",
        "released.key.request_id",
    ]
    assert [error.field for error in first.refused_uncounted] == [
        "bindings.model",
        "bindings.revision",
    ]
    assert not peer.replica.apply_frame(1, stream, first, 0.0)
    assert {booking.key.request_id for booking in peer.router.load_tracker} == {"r", "other"}
    assert peer.at() == SessionPlacement(Placement(1, 0))
    assert peer.replica.refused == 6
    # The peer's digest includes the refused entry; a full sync each second would not help.
    later = pb.SyncRequest(sequence=2, removals=[good], digest=1)
    assert not peer.replica.apply_frame(1, stream, frame_from_proto(later), 1.0)
    assert {booking.key.request_id for booking in peer.router.load_tracker} == {"other"}
    full_sync = pb.SyncRequest(
        sequence=3, begins_all=True, ends_all=True, upserts=[other], digest=1
    )
    assert peer.replica.apply_frame(1, stream, frame_from_proto(full_sync), 2.0), (
        "no entry was refused since"
    )


def test_invalid_entries_of_a_snapshot_are_refused_and_the_rest_is_applied() -> None:
    message = pb.SyncResponse(
        snapshot=[reregistered(model=""), reregistered()],
        snapshot_bindings=[session_binding(session_id=""), session_binding()],
    )
    bookings, session_records, refused = snapshot_from_proto(message)
    assert [booking.key.request_id for booking in bookings] == ["r"]
    assert [update.record.session for update in session_records] == [SessionName("m", "s")]
    assert [error.field for error in refused] == ["snapshot.model", "snapshot_bindings.session_id"]


def test_a_refused_session_record_does_not_change_the_booking_digest() -> None:
    peer = Peer(2)
    stream = peer.replica.stream_opened(1)
    request = pb.SyncRequest(
        sequence=1, begins_all=True, ends_all=True, bindings=[session_binding(revision=2**64 - 1)]
    )
    frame = frame_from_proto(request)
    assert [error.field for error in frame.refused_uncounted] == ["bindings.revision"]
    peer.replica.apply_frame(1, stream, frame, 0.0)
    assert peer.replica.refused == 1
    assert peer.replica.apply_frame(
        1, stream, frame_from_proto(pb.SyncRequest(sequence=2, digest=1)), 1.0
    )


def test_a_later_record_supersedes_one_made_by_a_wrong_clock() -> None:
    wrong_clock = SessionAffinity(TTL_S, epoch_s=EPOCH_S + 40 * 365 * 86_400.0)
    record = session_binding(revision=wrong_clock.revision_min(0.0))
    one, two = mesh()
    for peer in one, two:
        frame = frame_from_proto(pb.SyncRequest(sequence=1, begins_all=True, bindings=[record]))
        peer.replica.apply_frame(9, peer.replica.stream_opened(9), frame, 0.0)
        assert peer.at() == SessionPlacement(Placement(1, 0))
    for peer in one, two:
        peer.see(*(worker for worker in WORKERS if worker.id != 1))
    moved = one.place(1, 0.0)
    settle([one, two], 0.0)
    assert two.place(2, 0.0).decision.worker == moved.decision.worker
    assert two.at() == SessionPlacement(moved.decision.worker)
