"""The load tracker: sums, owners, orphans and load reports."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import InvalidRequest, Overloaded
from common.kv.load import LOAD_MAX_AGE_S, Load
from common.request.placement import Placement
from router_svc.core.booking import Booking, BookingKey
from router_svc.core.candidate import LoadTotals
from router_svc.core.load_tracker import ORPHAN_S, LoadTracker
from tests.kit.bookings import FRONTEND, booking, key, tracker_with_session

W1, W2 = Placement(1, 0), Placement(2, 0)


@pytest.mark.row("S1-79")
def test_a_booking_loads_only_its_worker_and_rank() -> None:
    load_tracker, session = tracker_with_session()
    assert load_tracker.book(booking(), session, 0.0)
    assert load_tracker.load(W1, 0.0) == LoadTotals(100, 7, 1)
    assert load_tracker.load(Placement(1, 1), 0.0) == LoadTotals()
    assert load_tracker.load(W2, 0.0) == LoadTotals()


def test_the_same_key_is_booked_once() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    assert not load_tracker.book(booking(worker=W2), session, 0.0)
    assert len(load_tracker) == 1
    assert load_tracker.load(W1, 0.0) == LoadTotals(100, 7, 1)


def test_attempts_and_frontends_have_separate_bookings() -> None:
    load_tracker, session = tracker_with_session()
    for one in (key(), key(attempt=1), key(frontend_id=8)):
        assert load_tracker.book(replace(booking(), key=one), None, 0.0)
    assert load_tracker.load(W1, 0.0).requests == 3
    assert session


@pytest.mark.row("S1-81")
def test_prefill_done_removes_its_tokens_exactly_once() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking("a"), session, 0.0)
    load_tracker.book(booking("b"), session, 0.0)
    assert load_tracker.mark_prefill_done(key("a"))
    assert load_tracker.mark_prefill_done(key("a"))
    assert load_tracker.load(W1, 0.0) == LoadTotals(100, 14, 2)
    held = load_tracker.get(key("a"))
    assert held is not None
    assert (held.prefill_tokens, held.revision) == (0, 2)
    assert not load_tracker.mark_prefill_done(key("unknown"))


@pytest.mark.row("S1-82", "S1-92")
def test_free_removes_all_load_and_a_second_free_returns_false() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    assert load_tracker.free(key())
    assert not load_tracker.free(key())
    assert load_tracker.load(W1, 0.0) == LoadTotals()
    assert len(load_tracker) == 0


@pytest.mark.row("S1-83")
def test_output_blocks_add_up_and_decay_scales_the_load_of_the_booking() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(prefill_tokens=0, decode_blocks=6), session, 0.0)
    load_tracker.add_output_blocks(key(), 1)
    assert load_tracker.load(W1, 0.0).decode_blocks == 7
    load_tracker.add_output_blocks(key(), 1, 0.5)
    assert load_tracker.load(W1, 0.0).decode_blocks == 4, (
        "8 blocks at half weight, as the reference"
    )
    held = load_tracker.get(key())
    assert held is not None
    assert (held.decode_blocks, held.revision) == (8, 3)
    load_tracker.free(key())
    assert load_tracker.load(W1, 0.0) == LoadTotals()
    assert not load_tracker.add_output_blocks(key(), 1)


def test_capacity_freed_is_published_once_per_decrease_and_never_else() -> None:
    load_tracker, session = tracker_with_session()
    freed: list[Placement] = []
    load_tracker.events.capacity_freed.subscribe(freed.append)
    split = replace(booking(), prefill=W2)
    load_tracker.book(split, session, 0.0)
    load_tracker.add_output_blocks(key(), 3)
    assert freed == []
    load_tracker.mark_prefill_done(key())
    load_tracker.mark_prefill_done(key())
    assert freed == [W2], "the prefill worker"
    load_tracker.add_output_blocks(key(), 1, 0.5)
    load_tracker.add_output_blocks(key(), 1, 0.5)
    assert freed == [W2, W1], "the weight falls once, then stays"
    load_tracker.reregister(replace(split, revision=9), session, 0.0)
    load_tracker.free(key())
    assert set(freed[2:]) == {W1, W2}


@pytest.mark.parametrize(("blocks", "decay"), [(0, None), (1, -0.1), (1, 1.1), (1, float("nan"))])
def test_invalid_output_reports_are_refused(blocks: int, decay: float | None) -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    with pytest.raises(InvalidRequest):
        load_tracker.add_output_blocks(key(), blocks, decay)
    assert load_tracker.load(W1, 0.0) == LoadTotals(100, 7, 1)


def test_a_split_request_loads_both_ranks_until_prefill_is_done() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(replace(booking(), prefill=W2), session, 0.0)
    assert load_tracker.load(W1, 0.0) == LoadTotals(0, 7, 1)
    assert load_tracker.load(W2, 0.0) == LoadTotals(100, 0, 1)
    load_tracker.mark_prefill_done(key())
    assert load_tracker.load(W2, 0.0) == LoadTotals()
    load_tracker.free(key())
    assert load_tracker.load(W1, 0.0) == LoadTotals()


def test_the_highest_revision_wins_when_bookings_are_registered_again() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    assert not load_tracker.reregister(booking(worker=W2), session, 0.0), "the same version"
    assert load_tracker.reregister(booking(worker=W2, prefill_tokens=0, revision=2), session, 0.0)
    assert load_tracker.load(W1, 0.0) == LoadTotals()
    assert load_tracker.load(W2, 0.0) == LoadTotals(0, 7, 1)
    assert not load_tracker.reregister(booking(revision=1), session, 0.0)
    assert load_tracker.load(W2, 0.0) == LoadTotals(0, 7, 1)


def test_a_reregistered_booking_without_prefill_tokens_has_finished_prefill() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.reregister(replace(booking(prefill_tokens=0), prefill=W2), session, 0.0)
    assert load_tracker.load(W2, 0.0) == LoadTotals()
    load_tracker.mark_prefill_done(key())
    held = load_tracker.get(key())
    assert held is not None
    assert held.revision == 1, "there is no change"


def test_bookings_of_an_ended_session_count_for_three_more_seconds() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking("a"), session, 0.0)
    load_tracker.book(booking("b"), session, 0.0)
    assert load_tracker.end_session(session, 10.0) == 2
    assert load_tracker.orphan_count == 2
    assert load_tracker.expire(10.0 + ORPHAN_S - 0.01) == 0
    assert load_tracker.load(W1, 12.0).requests == 2
    assert load_tracker.expire(10.0 + ORPHAN_S) == 2
    assert load_tracker.load(W1, 13.0) == LoadTotals()
    assert (len(load_tracker), load_tracker.orphan_count) == (0, 0)


def test_a_reregistration_adopts_an_orphan() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking("a"), session, 0.0)
    load_tracker.book(booking("b"), session, 0.0)
    load_tracker.end_session(session, 10.0)
    load_tracker.reregister(booking("a"), load_tracker.open_session(FRONTEND), 10.2)
    assert load_tracker.orphan_count == 1
    assert load_tracker.expire(20.0) == 1
    assert [b.key for b in load_tracker] == [key("a")]


def test_a_repeated_new_adopts_an_orphan_too() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    load_tracker.end_session(session, 10.0)
    assert not load_tracker.book(booking(), load_tracker.open_session(FRONTEND), 10.2)
    assert load_tracker.expire(20.0) == 0
    assert len(load_tracker) == 1


def test_the_end_of_an_older_session_keeps_bookings_adopted_by_a_newer_one() -> None:
    load_tracker, old = tracker_with_session()
    load_tracker.book(booking("a"), old, 0.0)
    load_tracker.book(booking("b"), old, 0.0)
    new = load_tracker.open_session(FRONTEND)
    load_tracker.reregister(booking("a"), new, 1.0)
    assert load_tracker.end_session(old, 1.5) == 1
    load_tracker.expire(10.0)
    assert [b.key for b in load_tracker] == [key("a")]


def test_an_orphan_adopted_and_orphaned_again_gets_a_new_deadline() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    load_tracker.end_session(session, 10.0)
    again = load_tracker.open_session(FRONTEND)
    load_tracker.reregister(booking(), again, 11.0)
    load_tracker.end_session(again, 12.0)
    assert load_tracker.expire(13.5) == 0
    assert load_tracker.expire(15.0) == 1


def test_a_frontend_gone_from_discovery_frees_its_orphans_at_once() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    load_tracker.end_session(session, 1.0)
    assert load_tracker.frontend_left(FRONTEND) == 1
    assert load_tracker.load(W1, 1.0) == LoadTotals()


def test_bookings_of_a_frontend_gone_from_discovery_are_freed_when_its_session_ends() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    assert load_tracker.frontend_left(FRONTEND) == 0, "the stream is more reliable evidence"
    assert load_tracker.load(W1, 1.0).requests == 1
    load_tracker.end_session(session, 2.0)
    assert load_tracker.load(W1, 2.0) == LoadTotals()


def test_a_frontend_that_returned_keeps_its_orphans() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    load_tracker.frontend_left(FRONTEND)
    load_tracker.frontend_joined(FRONTEND)
    load_tracker.end_session(session, 2.0)
    assert load_tracker.load(W1, 2.0).requests == 1


def test_a_booking_without_session_belongs_to_the_newest_one_or_is_an_orphan() -> None:
    load_tracker = LoadTracker()
    load_tracker.book(booking("a"), None, 0.0)
    assert load_tracker.orphan_count == 1
    session = load_tracker.open_session(FRONTEND)
    load_tracker.book(booking("b"), None, 0.0)
    assert load_tracker.orphan_count == 1
    assert load_tracker.expire(ORPHAN_S) == 1
    assert load_tracker.end_session(session, 5.0) == 1


def test_a_full_tracker_refuses_and_changes_nothing() -> None:
    load_tracker = LoadTracker(bookings_max=1)
    session = load_tracker.open_session(FRONTEND)
    load_tracker.book(booking("a"), session, 0.0)
    with pytest.raises(Overloaded) as refused:
        load_tracker.book(booking("b"), session, 0.0)
    assert refused.value.reason == "BOOK_FULL"
    with pytest.raises(Overloaded):
        load_tracker.reregister(booking("b"), session, 0.0)
    assert not load_tracker.book(booking("a"), session, 0.0), "existing bookings are still found"
    assert load_tracker.load(W1, 0.0).requests == 1


@pytest.mark.parametrize("facts", [{"prefill_tokens": -1}, {"decode_blocks": -1}, {"revision": 0}])
def test_an_invalid_booking_is_refused_and_its_field_named(facts: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Booking(key(), "m", W1, **facts)  # type: ignore[arg-type]  # mypy: the names are of ints.
    assert refused.value.field == next(iter(facts))


def test_a_report_counts_together_with_newer_bookings() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking("old"), session, 0.0)
    load_tracker.report(
        1, 0, Load(running=3, waiting=1, waiting_tokens=500, kv_used_blocks=50), 1.0
    )
    assert load_tracker.load(W1, 1.0) == LoadTotals(500, 50, 4)
    load_tracker.book(booking("new"), session, 1.0)
    assert load_tracker.load(W1, 1.1) == LoadTotals(600, 57, 5)
    load_tracker.free(key("old"))
    assert load_tracker.load(W1, 1.1) == LoadTotals(600, 57, 5), (
        "load in the report is not subtracted"
    )
    load_tracker.free(key("new"))
    assert load_tracker.load(W1, 1.1) == LoadTotals(500, 50, 4)


def test_the_estimate_is_never_below_the_bookings() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    load_tracker.report(1, 0, Load(), 1.0)
    assert load_tracker.load(W1, 1.0) == LoadTotals(100, 7, 1)


def test_a_dropped_report_leaves_the_bookings() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.report(1, 0, Load(running=9, waiting_tokens=900, kv_used_blocks=90), 1.0)
    load_tracker.book(booking(), session, 1.0)
    load_tracker.report(1, 0, None, 1.0)
    assert load_tracker.load(W1, 1.0) == LoadTotals(100, 7, 1)
    assert load_tracker.ranks.report_age_s(W1, 1.0) is None


def test_an_old_report_is_ignored() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.report(1, 0, Load(running=9, waiting_tokens=900, kv_used_blocks=90), 1.0)
    load_tracker.book(booking(), session, 1.0)
    assert load_tracker.load(W1, 1.0 + LOAD_MAX_AGE_S).requests == 10
    assert load_tracker.load(W1, 1.01 + LOAD_MAX_AGE_S) == LoadTotals(100, 7, 1)
    assert load_tracker.ranks.report_age_s(W1, 2.0) == 1.0
    assert load_tracker.ranks.report_age_s(W2, 2.0) is None


def test_reports_of_a_worker_that_left_are_discarded() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.report(1, 0, Load(running=9), 1.0)
    load_tracker.report(2, 0, Load(running=9), 1.0)
    load_tracker.book(booking(worker=W2), session, 1.0)
    load_tracker.ranks.worker_left(1)
    load_tracker.ranks.worker_left(2)
    assert load_tracker.load(W1, 1.0) == LoadTotals()
    assert load_tracker.load(W2, 1.0) == LoadTotals(100, 7, 1)
    load_tracker.free(key())
    assert load_tracker.load(W2, 1.0) == LoadTotals()


def test_a_booking_of_a_worker_missing_for_a_moment_still_counts() -> None:
    load_tracker, session = tracker_with_session()
    load_tracker.book(booking(), session, 0.0)
    load_tracker.ranks.worker_left(1)
    assert load_tracker.load(W1, 1.0) == LoadTotals(100, 7, 1)


KEYS = [BookingKey(frontend, name, 0) for frontend in (7, 8) for name in "abc"]
PLACES = [W1, W2, Placement(2, 1)]


class LoadTrackerMachine(RuleBasedStateMachine):
    """Any order of events; the sums are those of the live bookings, recomputed from scratch."""

    def __init__(self) -> None:
        super().__init__()
        self.load_tracker = LoadTracker()
        self.now = 0.0
        self.sessions: dict[int, int] = {}

    def session_of(self, frontend_id: int) -> int | None:
        mine = [s for s, frontend in self.sessions.items() if frontend == frontend_id]
        return mine[-1] if mine else None

    @rule(frontend=st.sampled_from([7, 8]))
    def connect(self, frontend: int) -> None:
        self.sessions[self.load_tracker.open_session(frontend)] = frontend

    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        if self.sessions:
            session = data.draw(st.sampled_from(sorted(self.sessions)))
            del self.sessions[session]
            self.load_tracker.end_session(session, self.now)

    @rule(
        key=st.sampled_from(KEYS),
        worker=st.sampled_from(PLACES),
        prefill=st.none() | st.sampled_from(PLACES),
        tokens=st.integers(0, 50),
        blocks=st.integers(0, 9),
        revision=st.integers(1, 4),
        is_reregistration=st.booleans(),
    )
    def place(
        self,
        key: BookingKey,
        worker: Placement,
        prefill: Placement | None,
        tokens: int,
        blocks: int,
        revision: int,
        is_reregistration: bool,
    ) -> None:
        booking = Booking(key, "m", worker, prefill, tokens, blocks, revision)
        add = self.load_tracker.reregister if is_reregistration else self.load_tracker.book
        before = self.load_tracker.get(key)
        new = add(booking, self.session_of(key.frontend_id), self.now)
        assert self.load_tracker.get(key) == (booking if new else before)

    @rule(key=st.sampled_from(KEYS))
    def prefill_done(self, key: BookingKey) -> None:
        assert self.load_tracker.mark_prefill_done(key) == (self.load_tracker.get(key) is not None)

    @rule(key=st.sampled_from(KEYS), blocks=st.integers(1, 5))
    def output(self, key: BookingKey, blocks: int) -> None:
        self.load_tracker.add_output_blocks(key, blocks)

    @rule(key=st.sampled_from(KEYS))
    def free(self, key: BookingKey) -> None:
        was_there = self.load_tracker.get(key) is not None
        assert self.load_tracker.free(key) == was_there
        assert self.load_tracker.get(key) is None

    @rule(place=st.sampled_from(PLACES), running=st.integers(0, 5))
    def report(self, place: Placement, running: int) -> None:
        self.load_tracker.report(*place, Load(running=running), self.now)

    @rule(seconds=st.floats(0.1, 2.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.load_tracker.expire(self.now)

    @rule(frontend=st.sampled_from([7, 8]))
    def lose_frontend(self, frontend: int) -> None:
        self.load_tracker.frontend_left(frontend)

    @rule(worker=st.sampled_from([1, 2]))
    def lose_worker(self, worker: int) -> None:
        self.load_tracker.ranks.worker_left(worker)

    @invariant()
    def sums_are_those_of_the_bookings(self) -> None:
        # Long after the last report, only bookings count.
        late = self.now + 100
        for place in PLACES:
            load = self.load_tracker.load(place, late)
            blocks = sum(b.decode_blocks for b in self.load_tracker if b.worker == place)
            tokens = sum(
                b.prefill_tokens for b in self.load_tracker if (b.prefill or b.worker) == place
            )
            assert (load.prefill_tokens, load.decode_blocks) == (tokens, blocks)
            fresh = self.load_tracker.load(place, self.now)
            assert fresh.requests >= load.requests >= 0

    @invariant()
    def orphans_are_those_without_a_session(self) -> None:
        assert 0 <= self.load_tracker.orphan_count <= len(self.load_tracker)
        if not self.sessions:
            assert self.load_tracker.orphan_count == len(self.load_tracker)

    def teardown(self) -> None:
        for booking_key in KEYS:
            self.load_tracker.free(booking_key)
        assert len(self.load_tracker) == self.load_tracker.orphan_count == 0
        for place in PLACES:
            assert self.load_tracker.load(place, self.now + 100) == LoadTotals()


TestLoadTrackerMachine = pytest.mark.slow(LoadTrackerMachine.TestCase)
TestLoadTrackerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_scrape_in_another_thread_counts_stale_reports_while_ranks_are_added() -> None:
    ranks = LoadTracker().ranks
    for worker_id in range(2000):
        ranks.report(Placement(worker_id, 0), Load(), 0.0)
    with ThreadPoolExecutor() as pool:
        scrapes = pool.submit(lambda: [ranks.stale_report_count(100.0) for _ in range(100)])
        for worker_id in takewhile(lambda _: not scrapes.done(), range(2000, 100_000)):
            ranks.report(Placement(worker_id, 0), Load(), 0.0)
        assert min(scrapes.result()) >= 2000
