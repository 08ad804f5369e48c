"""Client sessions known to several routers: whatever happens, they come to agree on each."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.registry.instances import Instance, Snapshot
from common.request.preprocessed import RoutingHints, SessionAction, SessionControl
from kvmesh.router.v1 import router_pb2 as pb
from router_svc.core.decision import Decision
from router_svc.core.policy import Policy
from router_svc.core.query import Query
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
from router_svc.core.types import BookingKey, Placement, SessionName
from router_svc.proto import (
    booking_from_proto,
    booking_to_proto,
    frame_from_proto,
    session_record_from_proto,
    session_record_to_proto,
    snapshot_from_proto,
)

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
    """A router with a session of its frontend, and its streams to others."""

    def __init__(self, router_id: int, mode: AffinityMode = "hard") -> None:
        self.id = router_id
        policy = Policy(session_ttl_s=TTL_S, session_mode=mode)
        self.router = Router(SELECTORS["random"](), policy=policy)
        self.replica = Replica(self.router.book, affinity=self.router.affinity)
        self.see(*WORKERS)
        self.frontend = FRONTEND + router_id
        self.session = self.router.book.open_session(self.frontend)
        self.out: dict[int, Link] = {}

    def see(self, *workers: Instance) -> None:
        self.router.update(Snapshot(1, {w.id: w for w in workers}), 0.0)

    def place(
        self,
        number: int,
        now: float,
        session: str = "s",
        action: SessionAction | None = None,
        lora_name: str | None = None,
    ) -> Decision:
        control = SessionControl(session, action)
        hints = RoutingHints(session_control=control, lora_name=lora_name)
        query = Query("m", 100, routing=hints)
        return self.router.decide(query, self.key(number), now, Random(number), self.session)

    def key(self, number: int) -> BookingKey:
        return BookingKey(self.frontend, f"r{number}", 0)

    def end(self, number: int) -> None:
        self.router.book.free(self.key(number))

    def at(self, session: str = "s") -> SessionPlacement | None:
        told = self.router.affinity.told(SessionName("m", session), 0.0)
        return None if told is None else told.record.session_placement

    def session_records(self) -> dict[SessionName, SessionRecord]:
        affinity = self.router.affinity
        told = (affinity.told(name, 0.0) for name in affinity.sessions())
        return {one.record.session: one.record for one in told if one is not None}


class Link:
    """One stream."""

    def __init__(self, sender: Peer, hearer: Peer) -> None:
        self.sender, self.hearer = sender, hearer
        self.outbound: OutboundSync = sender.replica.open_outbound()
        self.stream = hearer.replica.stream_opened(sender.id)

    def step(self, now: float, *, is_lost: bool = False) -> None:
        frame = self.outbound.frame(now)
        if not is_lost and self.hearer.replica.apply_frame(self.sender.id, self.stream, frame, now):
            self.outbound.request_full_sync()

    def flush(self, now: float) -> bool:
        """Whether there was anything to tell."""
        steps = 0
        while self.outbound.seconds_until_due(now) == 0:
            self.step(now)
            steps += 1
            assert steps < 100, "it never has told everything"
        return steps > 0

    def close(self, now: float) -> None:
        self.sender.replica.told(self.outbound)
        self.hearer.replica.stream_closed(self.sender.id, self.stream, now)


def mesh(count: int = 2, **facts: Any) -> list[Peer]:
    peers = [Peer(n + 1, **facts) for n in range(count)]
    for one in peers:
        for other in peers:
            if one is not other:
                one.out[other.id] = Link(one, other)
    return peers


def settle(peers: list[Peer], now: float) -> None:
    """All is told, also in answer to what was told."""
    for _ in range(20):
        flushed = [link.flush(now) for peer in peers for link in peer.out.values()]
        if not any(flushed):
            return
    raise AssertionError("they never stop telling each other")


def test_a_session_that_one_router_bound_is_bound_at_all() -> None:
    one, two = mesh()
    bound = one.place(1, 0.0)
    settle([one, two], 0.0)
    assert {two.place(n, 0.0).worker for n in range(10)} == {bound.worker}
    assert two.place(10, 0.0).affinity == "kept"


def test_two_that_bind_at_once_agree_on_one_of_them() -> None:
    one, two = mesh()
    placed = {one.place(1, 0.0).worker, two.place(2, 0.0).worker}
    settle([one, two], 0.0)
    assert one.at() == two.at()
    assert {b.worker for b in (one.at(),) if b} <= placed
    assert one.place(3, 0.0).worker == two.place(4, 0.0).worker


def test_a_session_lives_while_a_request_runs_through_another_router() -> None:
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


def test_a_request_too_short_to_be_told_of_is_a_use_all_the_same() -> None:
    one, two = mesh()
    one.place(1, 0.0)
    one.end(1)
    settle([one, two], 0.0)
    for now in (0.0, 50.0, 100.0, 150.0):
        for peer in (one, two):
            peer.router.expire(now)
        one.place(int(now) + 2, now)
        one.end(int(now) + 2)  # Before any stream had its turn.
        settle([one, two], now)
        assert two.at() is not None


def test_open_and_close_and_workers_that_go_are_told() -> None:
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
    assert two.place(4, 0.0).worker == moved.worker, "though it still sees the old one"
    two.place(5, 0.0, action=SessionAction.CLOSE)
    settle([one, two], 0.0)
    assert (one.at(), two.at()) == (None, None)
    assert one.place(6, 0.0).affinity == "bound"


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_a_router_that_joins_hears_of_all_sessions_before_it_serves(mode: AffinityMode) -> None:
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
    assert late.place(9999, 100.0, "s1").worker == one.place(9999, 31.0, "s1").worker
    late.router.expire(100.0 + TTL_S - 30.0)
    assert len(late.router.affinity) < count, "what was idle there counts here"


def test_everything_is_told_again_when_a_stream_is_opened_anew_or_a_frame_was_lost() -> None:
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
def test_a_peer_that_does_not_listen_costs_bounded_memory() -> None:
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
def test_whatever_happens_routers_agree_where_each_session_is_once_all_is_told(
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
                sender, hearer = peers[which], peers[(which + offset) % 3]
                link = sender.out[hearer.id]
                if what == "relink":
                    link.close(now)
                    sender.out[hearer.id] = Link(sender, hearer)
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
    now += 2.0  # A digest is due, and with it a sequence number.
    for peer in peers:
        for link in peer.out.values():
            link.step(now)
    settle(peers, now)
    session_records = [peer.session_records() for peer in peers]
    bound = [
        {n: b for n, b in some.items() if b.session_placement is not None}
        for some in session_records
    ]
    # What only some have forgotten by now is idle; used once more, it is known to all.
    for name in {name for some in bound for name in some}:
        known = {some[name] for some in bound if name in some}
        assert len(known) == 1, f"two opinions on {name}"
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
def test_bonds_survive_the_wire(record: SessionRecord) -> None:
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
def test_a_bond_that_cannot_be_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        session_record_from_proto(bound(**wrong), "bindings")
    assert refused.value.field == field


def test_a_bookings_session_survives_the_wire() -> None:
    peer = Peer(1)
    peer.place(1, 0.0, lora_name="french")
    booking = peer.router.book.get(peer.key(1))
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
def test_a_booking_that_cannot_be_is_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    """Peers could not be told of it, or of what grows from it, and their streams would break."""
    with pytest.raises(InvalidRequest) as refused:
        booking_from_proto(announced(**wrong), FRONTEND, "announced")
    assert refused.value.field == field


def announced(**facts: Any) -> pb.Booking:
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


def bound(**facts: Any) -> pb.SessionBinding:
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


def test_what_cannot_be_of_what_a_peer_says_is_refused_by_name_and_the_rest_is_taken() -> None:
    nameless = pb.Booking(frontend_id=FRONTEND)
    good, other = announced(), announced(key=pb.BookingKey(request_id="other"))
    peer = Peer(2)
    stream = peer.replica.stream_opened(1)
    first = frame_from_proto(
        pb.SyncRequest(
            sequence=1,
            begins_all=True,
            ends_all=True,
            upserts=[announced(frontend_id=0), good, announced(model=""), other],
            removals=[nameless],
            released=[nameless],
            bindings=[bound(model=""), bound(revision=2**64 - 1), bound()],
        )
    )
    assert [error.field for error in first.refused] == [
        "upserts.frontend_id",
        "upserts.model",
        "removals.key.request_id",
        "released.key.request_id",
    ]
    assert [error.field for error in first.refused_session_records] == [
        "bindings.model",
        "bindings.revision",
    ]
    assert not peer.replica.apply_frame(1, stream, first, 0.0)
    assert {booking.key.request_id for booking in peer.router.book} == {"r", "other"}
    assert peer.at() == SessionPlacement(Placement(1, 0))
    assert peer.replica.refused == 6
    # Its digest has what was refused; to tell that again each second is of no use.
    later = pb.SyncRequest(sequence=2, removals=[good], digest=1)
    assert not peer.replica.apply_frame(1, stream, frame_from_proto(later), 1.0)
    assert {booking.key.request_id for booking in peer.router.book} == {"other"}
    anew = pb.SyncRequest(sequence=3, begins_all=True, ends_all=True, upserts=[other], digest=1)
    assert peer.replica.apply_frame(1, stream, frame_from_proto(anew), 2.0), (
        "nothing was refused since"
    )


def test_what_cannot_be_of_a_snapshot_is_refused_by_name_and_the_rest_is_taken() -> None:
    message = pb.SyncResponse(
        snapshot=[announced(model=""), announced()],
        snapshot_bindings=[bound(session_id=""), bound()],
    )
    bookings, session_records, refused = snapshot_from_proto(message)
    assert [booking.key.request_id for booking in bookings] == ["r"]
    assert [told.record.session for told in session_records] == [SessionName("m", "s")]
    assert [error.field for error in refused] == ["snapshot.model", "snapshot_bindings.session_id"]


def test_a_refused_bond_leaves_the_digest_of_the_bookings_as_it_is() -> None:
    peer = Peer(2)
    stream = peer.replica.stream_opened(1)
    told = pb.SyncRequest(
        sequence=1, begins_all=True, ends_all=True, bindings=[bound(revision=2**64 - 1)]
    )
    frame = frame_from_proto(told)
    assert [error.field for error in frame.refused_session_records] == ["bindings.revision"]
    peer.replica.apply_frame(1, stream, frame, 0.0)
    assert peer.replica.refused == 1
    assert peer.replica.apply_frame(
        1, stream, frame_from_proto(pb.SyncRequest(sequence=2, digest=1)), 1.0
    )


def test_what_a_clock_gone_mad_bound_is_outgrown_by_who_knows_of_it() -> None:
    mad = SessionAffinity(TTL_S, epoch_s=EPOCH_S + 40 * 365 * 86_400.0)
    told = bound(revision=mad.revision_min(0.0))
    one, two = mesh()
    for peer in one, two:
        frame = frame_from_proto(pb.SyncRequest(sequence=1, begins_all=True, bindings=[told]))
        peer.replica.apply_frame(9, peer.replica.stream_opened(9), frame, 0.0)
        assert peer.at() == SessionPlacement(Placement(1, 0))
    for peer in one, two:
        peer.see(*(worker for worker in WORKERS if worker.id != 1))
    moved = one.place(1, 0.0)
    settle([one, two], 0.0)
    assert two.place(2, 0.0).worker == moved.worker
    assert two.at() == SessionPlacement(moved.worker)
