"""Session records: placement of a session, expiry, and changes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import InvalidRequest, Unavailable, UnknownModel, Unsupported
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import (
    RoutingConstraints,
    RoutingHints,
    SessionAction,
    SessionControl,
)
from router_svc.core.booking import Booking, BookingKey, SessionName
from router_svc.core.decision import DecisionRecord
from router_svc.core.events import RouterEvents
from router_svc.core.policy import Policy
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS
from router_svc.core.sessions import (
    RECORD_OVERHEAD_BYTES,
    SessionAffinity,
    SessionConstraint,
    SessionPlacement,
    SessionRecord,
    SessionUpdate,
)
from tests.kit.instances import snapshot_of, worker

FRONTEND = 7
TTL_S = 60.0
TICK_S = 0.5


FOUR = tuple(worker(n) for n in (1, 2, 3, 4))
PAIRS = (
    worker(1, "prefill"),
    worker(2, "prefill"),
    worker(11, "decode", local_prefill=False),
    worker(12, "decode", local_prefill=False),
)


class Bed:
    """A router with a clock; workers can leave, and every request has an id of its own."""

    def __init__(self, *workers: Instance, selector: str = "least_loaded", **policy: Any) -> None:
        policy = {"session_ttl_s": TTL_S, **policy}
        self.router = Router(SELECTORS[selector](), policy=Policy(**policy))
        self.now = 0.0
        self.number = 0
        self.see(*(workers or FOUR))

    def see(self, *workers: Instance) -> None:
        self.router.update(snapshot_of(*workers), self.now)

    @property
    def key(self) -> BookingKey:
        """The key of the latest request."""
        return BookingKey(FRONTEND, f"r{self.number}", 0)

    def place(
        self,
        session: str = "s",
        action: SessionAction | None = None,
        *,
        excluded: tuple[int, ...] = (),
        seed: int | None = None,
        **hints: Any,
    ) -> DecisionRecord:
        self.number += 1
        routing = RoutingHints(session_control=SessionControl(session, action), **hints)
        query = Query("m", 100, routing=routing, excluded_worker_ids=frozenset(excluded))
        rng = Random(self.number if seed is None else seed)
        return self.router.decide(query, self.key, self.now, rng)

    def one(self, *args: Any, **facts: Any) -> DecisionRecord:
        """Place, serve and end a request."""
        record = self.place(*args, **facts)
        self.end()
        return record

    def end(self) -> None:
        assert self.router.load_tracker.free(self.key)

    def wait(self, seconds: float) -> None:
        """Advance time in ticks, like the app."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + TICK_S)
            self.router.expire(self.now)

    def load(self, worker_id: int, requests: int) -> None:
        """Requests of other clients on a worker."""
        for _ in range(requests):
            self.number += 1
            hints = RoutingHints(backend_instance_id=worker_id)
            self.router.decide(Query("m", 999, routing=hints), self.key, self.now, Random(0))


def other_than(worker_id: int) -> int:
    return worker_id % 4 + 1


def test_a_session_stays_on_its_worker_however_loaded_that_is() -> None:
    bed = Bed()
    first = bed.one()
    assert first.affinity == "bound"
    assert first.decision.reasons[-1] == "session bound"
    bed.load(first.decision.worker.worker_id, 50)
    for _ in range(20):
        again = bed.one()
        assert (again.decision.worker, again.affinity) == (first.decision.worker, "kept")
    assert again.decision.reasons[-1] == "session kept"


def test_a_request_without_session_makes_no_record() -> None:
    bed = Bed()
    record = bed.router.decide(Query("m", 100), bed.key, 0.0, Random(0))
    assert record.affinity == ""
    assert len(bed.router.affinity) == 0


def test_the_second_request_follows_while_the_first_runs() -> None:
    bed = Bed()
    placed = {bed.place().decision.worker for _ in range(10)}
    assert len(placed) == 1


def test_sessions_differ_by_name_and_model() -> None:
    bed = Bed(*FOUR, worker(9, model="other"))
    workers = {bed.place(f"s{n}").decision.worker.worker_id for n in range(4)}
    assert workers == {1, 2, 3, 4}, "each chooses freely"
    hints = RoutingHints(session_control=SessionControl("s0"))
    query = Query("other", 100, routing=hints)
    record = bed.router.decide(query, BookingKey(1, "x", 0), 0.0, Random(0))
    assert (record.decision.worker.worker_id, record.affinity) == (9, "bound")


def test_a_session_of_an_adapter_differs_from_that_of_its_base_model() -> None:
    bed = Bed(worker(1), worker(2, loras=frozenset({"french"})))
    bed.one(backend_instance_id=1)
    assert bed.one(lora_name="french").affinity == "bound", (
        "the worker of the base model does not serve it"
    )
    for _ in range(3):
        assert (bed.one().decision.worker, bed.one().affinity) == (Placement(1, 0), "kept")
        adapted = bed.one(lora_name="french")
        assert (adapted.decision.worker, adapted.affinity) == (Placement(2, 0), "kept")
    bed.one(action=SessionAction.CLOSE)
    assert len(bed.router.affinity) == 1
    assert bed.one(lora_name="french").affinity == "kept"


def test_a_session_is_placed_on_one_rank_of_a_worker() -> None:
    bed = Bed(worker(1, dp_size=8))
    first = bed.one()
    assert {bed.one().decision.worker for _ in range(20)} == {first.decision.worker}


def test_previews_and_unbooked_decisions_follow_a_session_and_make_no_record() -> None:
    bed = Bed()
    hints = RoutingHints(session_control=SessionControl("s"))
    query = Query("m", 100, routing=hints)
    bed.router.preview(query, 0.0, Random(0))
    bed.router.decide(query, None, 0.0, Random(0))
    assert len(bed.router.affinity) == 0
    bound = bed.one().decision.worker
    assert {bed.router.preview(query, 0.0, Random(n)).decision.worker for n in range(20)} == {bound}
    assert {bed.router.decide(query, None, 0.0, Random(n)).decision.worker for n in range(20)} == {
        bound
    }


# Expiry.


def test_an_idle_session_expires_after_its_ttl_and_not_before() -> None:
    bed = Bed()
    bed.one()
    bed.wait(TTL_S - 0.01)
    assert len(bed.router.affinity) == 1
    bed.wait(TICK_S * 2)
    assert len(bed.router.affinity) == 0
    assert bed.one().affinity == "bound"


def test_each_request_restarts_the_ttl() -> None:
    bed = Bed()
    first = bed.one()
    for _ in range(5):
        bed.wait(TTL_S * 0.9)
        assert (bed.one().decision.worker, len(bed.router.affinity)) == (first.decision.worker, 1)


def test_an_expired_session_starts_again_like_a_new_one() -> None:
    bed = Bed()
    bound = bed.one().decision.worker
    bed.wait(0.95 * TTL_S)
    bed.router.load_tracker.open_session(FRONTEND)
    assert bed.place().decision.worker == bound
    bed.wait(0.2 * TTL_S)
    assert len(bed.router.affinity) == 1, "earlier idle time does not count"
    assert bed.place().affinity == "kept"


def test_a_running_request_keeps_its_session_for_any_time() -> None:
    bed = Bed()
    first = bed.place()
    bed.router.load_tracker.open_session(FRONTEND)
    bed.place()  # Owned by a session, so that it is no orphan.
    booking = bed.router.load_tracker.get(bed.key)
    assert booking is not None
    for _ in range(10):
        bed.wait(TTL_S)
        bed.router.load_tracker.reregister(booking, None, bed.now)  # As a live frontend renews it.
    assert (len(bed.router.affinity), bed.router.affinity.active_count) == (1, 1)
    assert bed.place().decision.worker == first.decision.worker


def test_a_session_of_a_dead_frontend_becomes_idle_when_its_orphans_expire() -> None:
    bed = Bed()
    bed.place()  # Without a session of its frontend, it is an orphan for three seconds.
    bed.wait(10.0)
    assert len(bed.router.load_tracker) == 0
    assert (len(bed.router.affinity), bed.router.affinity.active_count) == (1, 0)
    bed.wait(TTL_S)
    assert len(bed.router.affinity) == 0


def test_a_session_is_idle_when_the_last_of_its_bookings_ended() -> None:
    bed = Bed()
    bed.router.load_tracker.open_session(FRONTEND)
    bed.place()
    first = bed.key
    bed.place()
    bed.router.load_tracker.free(first)
    bed.wait(TICK_S)
    assert bed.router.affinity.active_count == 1
    bed.end()
    bed.wait(TICK_S)
    assert (len(bed.router.affinity), bed.router.affinity.active_count) == (1, 0)


# Changes of placement.


def test_a_session_of_a_worker_that_left_moves_and_stays_there() -> None:
    bed = Bed()
    gone = bed.one().decision.worker.worker_id
    bed.see(*(w for w in FOUR if w.id != gone))
    moved = bed.one()
    assert moved.decision.worker.worker_id != gone
    assert moved.affinity == "moved"
    bed.see(*FOUR)
    assert {bed.one().decision.worker for _ in range(10)} == {moved.decision.worker}, (
        "the old worker does not attract it"
    )


def test_a_worker_that_discovery_lost_for_a_moment_keeps_its_sessions() -> None:
    bed = Bed()
    bound = bed.one().decision.worker
    bed.see(*(w for w in FOUR if w.id != bound.worker_id))
    bed.see(*FOUR)
    assert bed.one().decision.worker == bound


def test_a_rank_that_the_worker_no_longer_has_constrains_no_session() -> None:
    bed = Bed(worker(1, dp_size=2))
    bed.place(dp_rank=1)
    bed.see(worker(1, dp_size=1))
    assert bed.one().decision.worker == Placement(1, 0)


def test_a_session_moves_with_the_request_that_its_worker_failed() -> None:
    bed = Bed()
    failed = bed.one().decision.worker.worker_id
    moved = bed.one(excluded=(failed,))
    assert moved.decision.worker.worker_id != failed
    assert {bed.one().decision.worker for _ in range(10)} == {moved.decision.worker}


@pytest.mark.parametrize("pin", ["backend_instance_id", "decode_worker_id"])
def test_a_pin_takes_precedence_and_the_session_follows_it(pin: str) -> None:
    bed = Bed()
    pinned = other_than(bed.one().decision.worker.worker_id)
    record = bed.one(**{pin: pinned})
    assert (record.decision.worker.worker_id, record.affinity) == (pinned, "moved")
    assert bed.one().decision.worker.worker_id == pinned


def test_open_chooses_freely_and_replaces_the_record() -> None:
    bed = Bed()
    old = bed.one().decision.worker.worker_id
    bed.load(old, 5)
    fresh = bed.one(action=SessionAction.OPEN)
    assert fresh.decision.worker.worker_id != old
    assert fresh.affinity == "bound"
    assert bed.one().decision.worker == fresh.decision.worker


def test_close_uses_the_session_placement_and_drops_it() -> None:
    bed = Bed()
    bound = bed.one().decision.worker
    bed.load(bound.worker_id, 5)
    last = bed.one(action=SessionAction.CLOSE)
    assert (last.decision.worker, last.affinity) == (bound, "closed")
    assert len(bed.router.affinity) == 0
    assert bed.one().decision.worker != bound


def test_close_of_an_unknown_session_makes_no_record() -> None:
    bed = Bed()
    assert bed.one(action=SessionAction.CLOSE).affinity == "closed"
    assert len(bed.router.affinity) == 0


# Hard and soft.

AT = {n: worker(n, taints=frozenset({f"t{n}"})) for n in (1, 2, 3, 4)}


def needs(worker_id: int) -> dict[str, Any]:
    taints = frozenset({f"t{worker_id}"})
    return {"routing_constraints": RoutingConstraints(required_taints=taints)}


def test_a_hard_session_is_served_by_its_worker_or_not_at_all() -> None:
    bed = Bed(*AT.values())
    bound = bed.one().decision.worker
    for hints in (
        needs(other_than(bound.worker_id)),
        {"allowed_worker_ids": frozenset({other_than(bound.worker_id)})},
    ):
        with pytest.raises(Unavailable) as refused:
            bed.place(**hints)
        assert refused.value.reason == "SESSION_WORKER_NOT_ELIGIBLE"
        assert refused.value.field == "query.routing.session_control.session_id"
        assert str(bound.worker_id) in refused.value.message
    assert len(bed.router.load_tracker) == 0
    assert bed.one().decision.worker == bound


def test_a_soft_session_goes_to_another_worker_if_its_own_is_not_eligible() -> None:
    bed = Bed(*AT.values(), session_mode="soft")
    bound = bed.one().decision.worker
    bed.load(bound.worker_id, 20)
    assert bed.one().decision.worker == bound, "load does not move a session"
    other = other_than(bound.worker_id)
    moved = bed.one(**needs(other))
    assert (moved.decision.worker.worker_id, moved.affinity) == (other, "moved")


# Pairs.


def test_both_legs_of_a_session_keep_their_workers() -> None:
    bed = Bed(*PAIRS, selector="kv")
    first = bed.one()
    for _ in range(20):
        again = bed.one()
        assert (again.decision.worker, again.decision.prefill) == (
            first.decision.worker,
            first.decision.prefill,
        )
        assert again.affinity == "kept"


def test_a_session_that_lost_one_of_its_workers_is_placed_again() -> None:
    bed = Bed(*PAIRS)
    first = bed.one()
    assert first.decision.prefill is not None
    bed.see(*(w for w in PAIRS if w.id != first.decision.prefill.worker_id))
    second = bed.one()
    assert second.decision.prefill is not None
    assert second.decision.prefill.worker_id == 3 - first.decision.prefill.worker_id
    bed.see(*PAIRS)
    again = bed.one()
    assert (again.decision.worker, again.decision.prefill) == (
        second.decision.worker,
        second.decision.prefill,
    )


def test_a_session_on_an_aggregated_worker_stays_there_when_pairs_join() -> None:
    for mode in ("hard", "soft"):
        bed = Bed(worker(21), session_mode=mode)
        bed.one()
        bed.see(worker(21), *PAIRS)
        assert {bed.one().decision.worker.worker_id for _ in range(5)} == {21}
        assert bed.place("another").decision.prefill is not None


def test_a_soft_session_takes_a_pair_if_its_aggregated_worker_is_not_eligible() -> None:
    bed = Bed(worker(21), session_mode="soft")
    bed.one()
    tainted = [replace(w, taints=frozenset({"t"})) for w in PAIRS]
    bed.see(worker(21), *tainted)
    taints = RoutingConstraints(required_taints=frozenset({"t"}))
    assert bed.one(routing_constraints=taints).decision.prefill is not None


# Refusals and bounds.


def test_a_router_without_session_affinity_refuses_sessions() -> None:
    bed = Bed(session_ttl_s=0.0)
    with pytest.raises(Unsupported) as refused:
        bed.place()
    assert refused.value.field == "query.routing.session_control.session_id"
    assert len(bed.router.load_tracker) == 0


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_an_invalid_session_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Bed().place(name)
    assert refused.value.field == "query.routing.session_control.session_id"


def constraint_of(
    affinity: SessionAffinity, session: str = "s", action: SessionAction | None = None
) -> SessionConstraint:
    hints = RoutingHints(session_control=SessionControl(session, action))
    session_constraint = affinity.session_constraint(Query("m", routing=hints), lambda at: True)
    assert session_constraint is not None
    return session_constraint


def use(
    affinity: SessionAffinity, session: str, worker_id: int, number: int, now: float
) -> Booking:
    """Place a request of the session there, or on the worker of the session."""
    session_constraint = constraint_of(affinity, session)
    at = (
        Placement(worker_id, 0)
        if session_constraint.placement is None
        else session_constraint.placement.worker
    )
    key = BookingKey(1, f"r{number}", 0)
    record = session_constraint.record(at, None, key)
    assert record is not None
    booking = Booking(key, "m", at, session_id=session, session_revision=record.revision)
    affinity.booking_began(booking)
    affinity.record_booking(record, now)
    return booking


def test_records_are_bounded_and_the_one_idle_longest_is_evicted() -> None:
    affinity = SessionAffinity(TTL_S, records_max=3)
    for at, name in enumerate("abc"):
        booking = use(affinity, name, at, at, float(at))
        if name != "a":
            affinity.booking_ended(booking, is_own=True)
            affinity.expire(float(at))
    use(affinity, "d", 9, 9, 6.0)
    bound = {name for name in "abcd" if constraint_of(affinity, name).placement is not None}
    assert bound == {"a", "c", "d"}
    assert (len(affinity), affinity.evicted) == (3, 1)
    for number, name in enumerate("efg"):
        use(affinity, name, 1, 20 + number, 7.0)
    assert len(affinity) == 3, "active ones are evicted too, the oldest first"


def test_closed_sessions_are_evicted_first() -> None:
    affinity = SessionAffinity(TTL_S, records_max=3)
    for number, name in enumerate("abc"):
        affinity.booking_ended(use(affinity, name, 1, number, 0.0), is_own=True)
    affinity.expire(1.0)
    record = constraint_of(affinity, "c", SessionAction.CLOSE).record(Placement(1, 0), None, KEY)
    assert record is not None
    affinity.record_booking(record, 2.0)
    use(affinity, "d", 1, 9, 3.0)
    assert {str(name.session_id) for name in affinity.sessions()} == {"a", "b", "d"}


def test_records_are_bounded_in_bytes() -> None:
    affinity = SessionAffinity(TTL_S, bytes_max=10 * (RECORD_OVERHEAD_BYTES + 1100))
    for number in range(100):
        use(affinity, f"{number:03}" + "\u20ac" * 253, 1, number, 0.0)
    assert affinity.size <= 10 * (RECORD_OVERHEAD_BYTES + 1100)
    assert 9 <= len(affinity) <= 19
    assert affinity.size == sum(record.size for record in affinity._records.values())


def test_many_uses_of_few_sessions_leave_no_state() -> None:
    affinity = SessionAffinity(TTL_S)
    for number in range(2000):
        affinity.booking_ended(use(affinity, f"{number % 3}", 1, number, number / 10), is_own=True)
        affinity.expire(number / 10)
    assert len(affinity._idle_heap) <= 2 * 3 + 64
    affinity.expire(1000.0)
    assert (len(affinity), affinity.size, affinity._live_bookings, affinity._idle_since) == (
        0,
        0,
        {},
        {},
    )


# Between routers.

KEY = BookingKey(1, "r", 0)
NAME = SessionName("m", "s")


def record(revision: int, worker_id: int | None, request: str = "r") -> SessionRecord:
    session_placement = None if worker_id is None else SessionPlacement(Placement(worker_id, 0))
    return SessionRecord(NAME, session_placement, revision, BookingKey(1, request, 0))


BONDS = st.builds(
    record, st.integers(1, 3), st.sampled_from([None, 1, 2]), st.sampled_from(["a", "b"])
)


@settings(max_examples=100, deadline=None)
@given(updates=st.lists(st.tuples(BONDS, st.floats(0.0, TTL_S - 2)), min_size=1), data=st.data())
def test_routers_keep_the_same_record_in_any_order_of_updates(
    updates: list[tuple[SessionRecord, float]], data: st.DataObject
) -> None:
    kept = set[SessionRecord]()
    for _ in range(3):
        affinity = SessionAffinity(TTL_S)
        order = data.draw(st.permutations(updates))
        for each, idle_s in [*order, *order[:2]]:
            affinity.receive(SessionUpdate(each, idle_s), 0.0)
        (what,) = affinity.updates([NAME], 0.0)
        assert what.idle_s == pytest.approx(min(idle_s for _, idle_s in updates))
        kept.add(what.record)
    assert len(kept) == 1
    (best,) = kept
    assert best.revision == max(each.revision for each, _ in updates)


def test_a_router_that_receives_a_losing_record_sends_its_own() -> None:
    events = RouterEvents()
    affinity = SessionAffinity(TTL_S, events=events)
    sent: list[SessionName] = []
    events.session_changed.subscribe(sent.append)
    affinity.receive(SessionUpdate(record(2, 1), 0.0), 0.0)
    affinity.receive(SessionUpdate(record(2, 1), 0.0), 0.0)
    assert sent == [], "the sender sends it to all peers itself"
    affinity.receive(SessionUpdate(record(1, 2), 0.0), 0.0)
    assert sent == [NAME]
    affinity.receive(SessionUpdate(record(3, 2), 0.0), 0.0)
    assert sent == [NAME]


def test_a_use_at_any_router_restarts_the_ttl() -> None:
    affinity = SessionAffinity(TTL_S)
    affinity.receive(SessionUpdate(record(1, 1), 50.0), 0.0)
    affinity.receive(SessionUpdate(record(1, 1), 5.0), 5.0)
    affinity.receive(SessionUpdate(record(1, 1), 40.0), 5.0)
    assert affinity.expire(TTL_S - 0.01) == 0
    assert affinity.expire(TTL_S) == 1


def test_a_record_older_than_the_local_ttl_is_ignored() -> None:
    affinity = SessionAffinity(TTL_S)
    affinity.receive(SessionUpdate(record(1, 1), TTL_S), 0.0)
    assert affinity.sessions() == []
    none_kept = SessionAffinity(0.0)
    none_kept.receive(SessionUpdate(record(1, 1), 0.0), 0.0)
    assert none_kept.sessions() == []


def test_a_closed_session_is_not_restored_by_a_router_without_the_update() -> None:
    affinity = SessionAffinity(TTL_S)
    affinity.receive(SessionUpdate(record(1, 1), 0.0), 0.0)
    affinity.receive(SessionUpdate(record(2, None), 0.0), 1.0)
    assert (len(affinity), len(affinity.sessions())) == (0, 1)
    affinity.receive(SessionUpdate(record(1, 1), 0.0), 2.0)
    assert constraint_of(affinity).placement is None
    again = constraint_of(affinity).record(Placement(3, 0), None, KEY)
    assert again is not None
    assert again.revision == 3, "a new placement supersedes the closing"
    assert constraint_of(affinity).outcome(Placement(3, 0)) == "bound"
    affinity.expire(2.0 + TTL_S)
    assert affinity.sessions() == []


def test_a_new_record_supersedes_one_that_only_peers_still_have() -> None:
    """Regression: its revision restarted at 1, so it lost to the older record (seed 1322)."""
    affinity = SessionAffinity(TTL_S, epoch_s=1000.0)
    first = constraint_of(affinity).record(Placement(1, 0), None, KEY, affinity.revision_min(0.0))
    assert first is not None
    affinity.record_booking(first, 0.0)
    affinity.expire(TTL_S)
    later = BookingKey(1, "z", 0)
    new_record = constraint_of(affinity).record(
        Placement(2, 0), None, later, affinity.revision_min(TTL_S)
    )
    assert new_record is not None
    assert new_record.supersedes(first)
    affinity.record_booking(new_record, TTL_S)
    # A slow clock does not make the record older.
    moved = constraint_of(affinity).record(Placement(3, 0), None, KEY, affinity.revision_min(0.0))
    assert moved is not None
    assert moved.supersedes(new_record)


def test_open_makes_a_new_record_even_on_the_same_worker() -> None:
    """Regression: it kept the old record, which lost to a newer one of a peer (simulation seed
    1789).
    """
    affinity = SessionAffinity(TTL_S)
    affinity.receive(SessionUpdate(record(3, 1), 0.0), 0.0)
    control = SessionControl("s", SessionAction.OPEN)
    query = Query("m", 1, routing=RoutingHints(session_control=control))
    session_constraint = affinity.session_constraint(query, lambda at: True)
    assert session_constraint is not None
    new_record = session_constraint.record(Placement(1, 0), None, KEY)
    assert new_record is not None
    assert (new_record.revision, new_record.placement) == (
        4,
        SessionPlacement(Placement(1, 0)),
    )


def test_reregistered_bookings_restore_session_records() -> None:
    bed = Bed()
    session = bed.router.load_tracker.open_session(FRONTEND)
    held = Booking(bed.key, "m", Placement(3, 0), session_id="s", session_revision=2)
    older = replace(held, key=BookingKey(FRONTEND, "x", 0), worker=Placement(1, 0))
    bed.router.reregister(held, session, 0.0)
    bed.router.reregister(replace(older, session_revision=1), session, 0.0)
    assert bed.one().decision.worker == Placement(3, 0), "the later record counts"
    assert bed.router.affinity.active_count == 1
    bed.router.load_tracker.free(held.key)
    bed.router.load_tracker.free(older.key)
    bed.wait(TTL_S - 1.0)
    assert len(bed.router.affinity) == 1
    bed.wait(2.0)
    assert len(bed.router.affinity) == 0


def test_a_reregistered_booking_of_an_adapter_restores_its_session() -> None:
    bed = Bed(*(worker(n, loras=frozenset({"french"})) for n in (1, 2, 3, 4)))
    held = Booking(bed.key, "m", Placement(3, 0), None, session_id="s", session_revision=2)
    bed.router.reregister(replace(held, lora_name="french"), None, 0.0)
    assert bed.router.affinity.sessions() == [SessionName("m", "s", "french")]
    assert bed.one(lora_name="french").decision.worker == Placement(3, 0)


def test_a_request_that_outlives_its_closed_session_does_not_restore_it() -> None:
    bed = Bed()
    session = bed.router.load_tracker.open_session(FRONTEND)
    bed.place()
    held = bed.router.load_tracker.get(bed.key)
    assert held is not None
    bed.one(action=SessionAction.CLOSE)
    bed.wait(2 * TTL_S)
    bed.router.reregister(held, session, bed.now)  # Frontends do this periodically.
    assert bed.router.affinity.sessions() == []


def test_a_reregistered_booking_without_session_restores_nothing() -> None:
    bed = Bed()
    bed.router.reregister(Booking(bed.key, "m", Placement(3, 0)), None, 0.0)
    assert bed.router.affinity.sessions() == []


def test_a_booking_carries_the_revision_of_its_session_record() -> None:
    bed = Bed()
    assert bed.place().decision.session_revision == 1
    record_booking = bed.router.load_tracker.get(bed.key)
    assert record_booking is not None
    assert (record_booking.session_id, record_booking.session_revision) == ("s", 1)
    assert bed.place().decision.session_revision == 1
    assert bed.place(action=SessionAction.OPEN).decision.session_revision in (1, 2)
    assert bed.place(action=SessionAction.CLOSE).decision.session_revision == 0
    record_booking = bed.router.load_tracker.get(bed.key)
    assert record_booking is not None
    assert record_booking.session_id == "", "the router does not keep a closed session"


class Naive(RuleBasedStateMachine):
    """Session records against a plain list of events."""

    def __init__(self) -> None:
        super().__init__()
        self.affinity = SessionAffinity(10.0)
        self.now = 0.0
        self.live: dict[str, Booking] = {}
        self.at: dict[str, int] = {}
        self.ended_at: dict[str, float] = {}
        self.number = 0

    @rule(session=st.sampled_from("abc"), worker_id=st.integers(1, 3))
    def book(self, session: str, worker_id: int) -> None:
        self.tick(0.0)
        self.number += 1
        booking = use(self.affinity, session, worker_id, self.number, self.now)
        self.live[f"{self.number}"] = booking
        self.at[session] = booking.worker.worker_id
        self.ended_at[session] = self.now

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        booking = self.live.pop(sorted(self.live)[which % len(self.live)])
        self.ended_at[booking.session_id] = self.now
        self.affinity.booking_ended(booking, is_own=True)

    @rule(session=st.sampled_from("abc"))
    def close(self, session: str) -> None:
        self.tick(0.0)
        key = BookingKey(1, "close", 0)
        record = constraint_of(self.affinity, session, SessionAction.CLOSE).record(
            Placement(1, 0), None, key
        )
        if record is not None:
            self.affinity.record_booking(record, self.now)
        self.at.pop(session, None)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0, 9.0, 10.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.affinity.expire(self.now)

    @invariant()
    def a_session_is_bound_while_it_lives_and_ten_seconds_more(self) -> None:
        live = {booking.session_id for booking in self.live.values()}
        for session, worker_id in self.at.items():
            session_placement = constraint_of(self.affinity, session).placement
            if session in live or self.now - self.ended_at[session] < 10.0:
                assert session_placement is not None
            if session_placement is not None:
                assert session_placement.worker.worker_id == worker_id
        assert len(self.affinity) <= len(self.at)
        assert self.affinity.active_count >= len(live & self.at.keys())


TestNaive = pytest.mark.slow(Naive.TestCase)
TestNaive.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


EVENT = st.one_of(
    st.tuples(st.just("place"), st.sampled_from("abc"), st.sets(st.integers(1, 4), max_size=2)),
    st.tuples(st.just("leave"), st.integers(1, 4)),
    st.tuples(st.just("join"), st.integers(1, 4)),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 5.0, TTL_S])),
)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENT, max_size=40))
def test_a_session_leaves_its_worker_only_if_that_is_gone_or_failed(events: list[Any]) -> None:
    bed = Bed()
    present, at, live = {1, 2, 3, 4}, dict[str, int](), list[BookingKey]()
    for event in events:
        match event:
            case "place", session, failed:
                before, names = at.get(session), constraint_of(bed.router.affinity, session)
                try:
                    record = bed.place(session, excluded=tuple(failed))
                except (Unavailable, UnknownModel):
                    assert present <= failed
                    continue
                live.append(bed.key)
                chosen = at[session] = record.decision.worker.worker_id
                if names.placement is not None and before in present - failed:
                    assert (chosen, record.affinity) == (before, "kept")
                assert chosen in present - failed
            case "leave" | "join" as kind, worker_id:
                present = present - {worker_id} if kind == "leave" else present | {worker_id}
                bed.see(*(w for w in FOUR if w.id in present))
            case "end", which if live:
                bed.router.load_tracker.free(live.pop(which % len(live)))
            case "wait", seconds:
                bed.wait(seconds)
    assert len(bed.router.affinity) <= len(at)
