"""The admission queue: who is parked, who goes first, and what ends a wait."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import InternalError, InvalidRequest, MeshError, Overloaded, Unavailable
from common.kv.events import Source
from common.kv.load import Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance, Snapshot
from common.request.preprocessed import (
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
    SessionControl,
)
from router_svc.core.admission import (
    AdmissionQueue,
    Blockers,
    QueuedRequest,
    QueuePolicy,
    QueueSettings,
    constraint_class_of,
    queue_timeout_error,
)
from router_svc.core.busy import BusyLimits
from router_svc.core.load_tracker import ORPHAN_S
from router_svc.core.overlap import IndexStatus
from router_svc.core.pairing import NO_BYPASS, Bypass
from router_svc.core.policy import Policy
from router_svc.core.query import Query
from router_svc.core.rank_load import REPORT_MAX_AGE_S
from router_svc.core.router import AdmissionResult, Decision, Router
from router_svc.core.selectors import SELECTORS, Selection, View, WorkerSelector
from router_svc.core.types import (
    BookingKey,
    Candidate,
    LoadTotals,
    Placement,
    RankCapacity,
    SessionName,
)

FRONTEND = 7
BATCH = 1000
NOBODY = Blockers(0, frozenset())


def worker(worker_id: int, **facts: Any) -> Instance:
    given: dict[str, Any] = {
        "model": "m",
        "block_size": 16,
        "max_num_batched_tokens": BATCH,
        **facts,
    }
    return Instance(worker_id, "mesh", "worker", "", "127.0.0.1:1", **given)


def seen(*instances: Instance) -> Snapshot:
    return Snapshot(1, {i.id: i for i in instances})


def key(name: str) -> BookingKey:
    return BookingKey(FRONTEND, name, 0)


class Bed:
    """A router whose workers count as busy above one batch of prompt tokens; `now` is set by hand.

    answers: of those who waited, in the order in which they were told.
    """

    def __init__(
        self,
        *workers: Instance,
        selector: WorkerSelector | None = None,
        busy: BusyLimits | None = None,
        bypass: Bypass = NO_BYPASS,
        index: Any = None,
        more_rules: Mapping[str, Any] = MappingProxyType({}),
        **queue: Any,
    ) -> None:
        given = {"threshold": 1.0, **queue}
        policy = Policy(
            queue=QueueSettings(**given), busy=busy or BusyLimits(), bypass=bypass, **more_rules
        )
        self.router = Router(selector or SELECTORS["least_loaded"](), policy=policy, index=index)
        self.now = 100.0
        self.answers: dict[str, Decision | MeshError] = {}
        self.see(*(workers or (worker(1),)))
        self.session = self.router.book.open_session(FRONTEND)

    def see(self, *workers: Instance) -> None:
        self.router.update(seen(*workers), self.now)

    def admit(
        self, name: str, tokens: int = 2 * BATCH, *, level: int = 0, **hints: Any
    ) -> Decision | QueuedRequest:
        """Ask for a placement; `tokens` alone make a worker busy unless told otherwise."""
        routing = RoutingHints(**hints) if hints else None
        query = Query("m", tokens, routing=routing, strict_priority=level)
        return self.ask(name, query)

    def ask(self, name: str, query: Query) -> Decision | QueuedRequest:
        return self.router.admit(query, key(name), self.now, Random(0), self.session)

    def free(self, name: str) -> None:
        assert self.router.book.free(key(name))

    def serve(self) -> list[str]:
        """Let those in who need not wait; their names, in that order."""
        names = []
        for queued, outcome in self.router.rescan(self.now, Random(0)):
            if outcome is None:
                continue
            names.append(queued.key.request_id)
            self.answers[queued.key.request_id] = outcome
        return names

    def relieve(self, *worker_ids: int) -> list[str]:
        """Let those in who profit from the relief of these; their names, in that order."""
        names = []
        for worker_id in worker_ids:
            for queued, outcome in self.router.capacity_freed(
                Placement(worker_id, 0), self.now, Random(0)
            ):
                if outcome is not None:
                    names.append(queued.key.request_id)
                    self.answers[queued.key.request_id] = outcome
        return names

    def rebound_requests(self, control: SessionControl) -> list[AdmissionResult]:
        """What becomes of those who wait where the session is bound no more."""
        session = SessionName("m", control.session_id)
        return list(self.router.rebound_requests(session, self.now, Random(0)))

    def load(self, worker_id: int = 1) -> LoadTotals:
        return self.router.book.load(Placement(worker_id, 0), self.now)

    @property
    def waiting(self) -> int:
        return len(self.router.queue)


def placed(answer: Decision | QueuedRequest | MeshError) -> Decision:
    assert isinstance(answer, Decision), answer
    return answer


def queued(answer: Decision | QueuedRequest) -> QueuedRequest:
    assert isinstance(answer, QueuedRequest), "it was placed at once"
    return answer


# Who is parked.


def test_without_a_threshold_nobody_ever_waits() -> None:
    bed = Bed(threshold=None)
    for number in range(5):
        placed(bed.admit(f"r{number}"))
    assert bed.waiting == 0


@pytest.mark.row("S1-21")
def test_a_request_waits_while_all_its_workers_are_busy_and_books_nothing_meanwhile() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    placed(bed.admit("b", backend_instance_id=2))
    before = (bed.load(1), bed.load(2))
    queued(bed.admit("c", 300))
    assert (bed.load(1), bed.load(2)) == before
    assert (bed.waiting, bed.router.queue.tokens, len(bed.router.book)) == (1, 300, 2)
    assert bed.serve() == [], "nothing has changed"
    bed.free("b")
    bed.now += 1.5
    assert bed.serve() == ["c"]
    decision = placed(bed.answers["c"])
    assert (decision.worker, decision.queued_s) == (Placement(2, 0), 1.5)
    assert decision.reasons[-1] == "queued for 1500 ms"
    assert bed.load(2) == LoadTotals(300, 19, 1)
    assert (bed.waiting, bed.router.queue.tokens) == (0, 0)


def test_a_worker_is_busy_above_the_threshold_and_not_at_it() -> None:
    bed = Bed()
    placed(bed.admit("a", BATCH))
    placed(bed.admit("b", 1))
    queued(bed.admit("c", 1))


def test_a_worker_that_does_not_say_its_batch_is_never_busy_in_practice() -> None:
    bed = Bed(worker(1, max_num_batched_tokens=None))
    for number in range(5):
        placed(bed.admit(f"r{number}", 2_000_000))
    placed(bed.admit("the one that crosses", 1))
    queued(bed.admit("the next", 1))


@pytest.mark.row("S1-21")
def test_who_may_wait_for_the_same_workers_waits_behind_those_who_do() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("b", 10))
    bed.free("a")  # A worker has room, but nobody was let in yet.
    queued(bed.admit("c", 10))
    assert bed.serve() == ["b", "c"]


def test_the_end_of_prefill_makes_room_long_before_the_answer_ends() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    bed.router.book.mark_prefill_done(key("a"))
    assert bed.serve() == ["b"]
    assert bed.load().requests == 2


def test_a_new_worker_makes_room() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    bed.see(worker(1), worker(2))
    assert bed.serve() == ["b"]
    assert placed(bed.answers["b"]).worker == Placement(2, 0)


def test_a_report_that_a_worker_is_busy_holds_requests_and_a_later_one_lets_them_in() -> None:
    bed = Bed()
    bed.router.book.report(1, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    assert bed.serve() == []
    bed.router.book.report(1, 0, Load(), bed.now)
    assert bed.serve() == ["a"]


def test_a_report_that_grew_old_holds_nobody() -> None:
    bed = Bed()
    bed.router.book.report(1, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    bed.now += 0.6
    assert bed.serve() == ["a"]


def test_whoever_waits_for_load_to_go_down_is_told_when_it_does() -> None:
    bed = Bed()
    told: list[Placement] = []
    fleets: list[int] = []
    bed.router.events.capacity_freed.subscribe(told.append)
    bed.router.events.fleet_changed.subscribe(lambda: fleets.append(1))
    placed(bed.admit("a"))
    assert told == [], "a booking is no relief"
    bed.router.book.mark_prefill_done(key("a"))
    bed.free("a")
    bed.router.book.report(1, 0, Load(), bed.now)
    assert told == [Placement(1, 0)] * 3
    bed.see(worker(1), worker(2))
    assert len(fleets) == 1
    placed(bed.admit("b"))
    bed.router.book.end_session(bed.session, bed.now)
    before = len(told)
    bed.router.expire(bed.now + 10.0)
    assert len(told) > before, "orphans end by time"


def test_a_pair_waits_for_whom_computes_the_prompt_only() -> None:
    group = {"transfer_group": "g", "local_prefill": False}
    bed = Bed(worker(1, role="prefill", **group), worker(2, role="decode", **group))
    first = placed(bed.admit("a"))
    assert (first.prefill, first.worker) == (Placement(1, 0), Placement(2, 0))
    queued(bed.admit("b"))
    bed.router.book.mark_prefill_done(key("a"))
    assert bed.serve() == ["b"], "decode was not asked"


def test_a_worker_that_was_above_a_busy_threshold_lets_in_who_waited_for_others() -> None:
    workers = [worker(1, total_kv_blocks=100), worker(2, total_kv_blocks=100)]
    bed = Bed(*workers, busy=BusyLimits(active_decode_blocks=0.5))
    bed.router.book.report(1, 0, Load(kv_used_blocks=90), bed.now)
    bed.router.book.report(2, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    assert bed.serve() == []
    bed.router.book.report(1, 0, Load(), bed.now)
    assert bed.serve() == ["a"]
    assert placed(bed.answers["a"]).worker == Placement(1, 0)


def test_a_worker_that_gets_room_to_serve_alone_lets_in_who_waited_for_prefill() -> None:
    group = {"transfer_group": "g", "local_prefill": True, "total_kv_blocks": 100}
    workers = [worker(1, role="prefill", **group), worker(2, role="decode", **group)]
    bypass = Bypass(policy="isl_bounding", eff_isl_ratio_threshold=1.1, decode_busy_threshold=0.5)
    bed = Bed(*workers, bypass=bypass)
    bed.router.book.report(1, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    bed.router.book.report(2, 0, Load(kv_used_blocks=90), bed.now)
    queued(bed.admit("a", 10))
    assert bed.serve() == []
    bed.router.book.report(2, 0, Load(), bed.now)
    assert bed.serve() == ["a"]
    assert placed(bed.answers["a"]).bypass == "short_prompt"


# What a look through the queue costs.


class Counting:
    """Chooses the first, and counts how often it was asked."""

    name = "counting"

    def __init__(self) -> None:
        self.asked = 0

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Selection:
        self.asked += 1
        return Selection(candidates[0], "first")


def crowded(selector: WorkerSelector, lanes: int, **policy: Any) -> Bed:
    """So many lanes wait for worker 1."""
    bed = Bed(selector=selector, **policy)
    placed(bed.admit("a"))
    for number in range(lanes):
        queued(bed.admit(f"r{number}", allowed_worker_ids=frozenset({1, 100 + number})))
    return bed


@pytest.mark.parametrize(
    "busy", [BusyLimits(), BusyLimits(active_prefill_tokens=9 * BATCH)], ids=["no limits", "limits"]
)
def test_a_sweep_that_is_left_early_goes_on_and_gets_to_the_last_lane(busy: BusyLimits) -> None:
    selector = Counting()
    bed = crowded(selector, 25, busy=busy)
    bed.see(worker(1, max_num_batched_tokens=BATCH + 1))
    selector.asked = 0
    looked_at: list[int] = []
    for count in (10, 10, 5):
        part = list(islice(bed.router.rescan(bed.now, Random(0)), 10))
        assert len(part) == count
        assert all(outcome is None for _, outcome in part)
        looked_at += [one.number for one, _ in part]
    assert looked_at == list(range(1, 26))
    assert selector.asked == 25
    bed.free("a")
    assert bed.serve() == ["r0"], "a new sweep looks again"


@pytest.mark.parametrize(
    "busy",
    [BusyLimits(), BusyLimits(active_prefill_tokens_frac=9.0, active_decode_blocks=0.9)],
    ids=["no limits", "limits"],
)
def test_a_relief_looks_at_no_more_lanes_than_it_has_room_for(busy: BusyLimits) -> None:
    selector = Counting()
    bed = crowded(selector, 100, busy=busy)
    selector.asked = 0
    bed.router.book.report(1, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    assert (bed.relieve(1), selector.asked) == ([], 0), "it is as busy as before"
    bed.free("a")
    bed.router.book.report(1, 0, Load(), bed.now)
    assert (bed.relieve(1), selector.asked) == (["r0"], 1)
    assert (bed.relieve(1), selector.asked) == ([], 1)


def test_whom_a_limit_kept_from_others_is_found_by_the_relief_that_lifts_it() -> None:
    workers = [worker(at, total_kv_blocks=100) for at in (1, 2, 3)]
    bed = Bed(*workers, busy=BusyLimits(active_decode_blocks=0.5))
    for at in (1, 2):
        bed.router.book.report(at, 0, Load(kv_used_blocks=90), bed.now)
    bed.router.book.report(3, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    queued(bed.admit("b", 10, backend_instance_id=3))
    assert bed.relieve(1, 2, 3) == []
    bed.router.book.report(2, 0, Load(kv_used_blocks=40), bed.now)
    assert bed.relieve(2) == ["a"]
    assert placed(bed.answers["a"]).worker == Placement(2, 0)


def test_a_rank_counts_as_relieved_when_another_of_its_worker_is() -> None:
    bed = Bed(worker(1, dp_size=2), busy=BusyLimits(active_prefill_tokens_frac=2.0))
    busy = Load(waiting=1, waiting_tokens=5000)
    bed.router.book.report(1, 1, Load(waiting=1, waiting_tokens=1500), bed.now)
    bed.router.book.report(1, 0, busy, bed.now)
    queued(bed.admit("a", 10))
    bed.router.book.report(1, 1, Load(), bed.now)
    ((_, outcome),) = bed.router.capacity_freed(Placement(1, 1), bed.now, Random(0))
    assert isinstance(outcome, Decision)
    assert outcome.worker == Placement(1, 1)


def test_who_waits_is_not_refused_because_all_are_above_a_limit_just_then() -> None:
    workers = [worker(at, total_kv_blocks=100) for at in (1, 2)]
    bed = Bed(*workers, busy=BusyLimits(active_decode_blocks=0.5))
    for at in (1, 2):
        bed.router.book.report(at, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    for at in (1, 2):
        bed.router.book.report(at, 0, Load(kv_used_blocks=90), bed.now)
    bed.see(*workers, worker(9, model="n"))
    assert (bed.serve(), bed.waiting) == ([], 1)
    with pytest.raises(Overloaded):
        bed.admit("b", 10)
    bed.router.book.report(2, 0, Load(), bed.now)
    assert bed.relieve(2) == ["a"]


def test_when_to_look_again_though_nothing_happens() -> None:
    bed = Bed()
    lost = bed.router.book.open_session(8)
    assert bed.router.next_wakeup_at(bed.now) == math.inf
    bed.router.admit(Query("m", 2 * BATCH), BookingKey(8, "x", 0), bed.now, Random(0), lost)
    queued(bed.admit("a"))
    assert bed.router.next_wakeup_at(bed.now) == bed.now + 60.0, "its longest wait"
    bed.router.book.end_session(lost, bed.now)
    assert bed.router.next_wakeup_at(bed.now) == bed.now + ORPHAN_S
    bed.router.book.report(1, 0, Load(), bed.now)
    assert bed.router.next_wakeup_at(bed.now) == bed.now + REPORT_MAX_AGE_S


def test_nothing_is_remembered_of_those_who_have_left_the_queue() -> None:
    bed = crowded(Counting(), 30)
    for number in range(30):
        bed.router.queue.withdraw(key(f"r{number}"))
    assert bed.router.queue.slots == []
    many = crowded(Counting(), 30)
    for number in range(29):
        many.router.queue.withdraw(key(f"r{number}"))
    many.router.queue.drop_stale_slots()
    assert sum(map(len, many.router.queue._heads_by_slot.values())) == 1


def test_a_frontend_that_comes_makes_nobody_be_picked_for_again() -> None:
    selector = Counting()
    bed = crowded(selector, 3)
    selector.asked = 0
    bed.see(worker(1), Instance(FRONTEND, "mesh", "frontend", "", "127.0.0.1:2"))
    assert (bed.serve(), selector.asked) == ([], 0)
    bed.see(worker(1), worker(2, model="n"))
    assert (bed.serve(), selector.asked) == ([], 3)


# Pins, and other ways to be particular.


def test_a_pinned_request_waits_for_its_own_worker_and_for_no_other() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    queued(bed.admit("b", backend_instance_id=1))
    placed(bed.admit("c", backend_instance_id=2))
    queued(bed.admit("d", backend_instance_id=2))
    bed.free("c")
    assert bed.serve() == ["d"], "b is first in the queue, but its worker is busy"


def test_a_pinned_request_holds_up_nobody_else() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    queued(bed.admit("b", backend_instance_id=1))
    assert placed(bed.admit("c", 10)).worker == Placement(2, 0)


def test_a_session_that_waits_for_its_worker_holds_up_nobody_else() -> None:
    bed = Bed(worker(1), worker(2))
    bound = placed(bed.admit("a", session_control=SessionControl("s", None)))
    queued(bed.admit("b", session_control=SessionControl("s", None)))
    assert placed(bed.admit("c", 10)).worker != bound.worker


def test_taints_and_allow_lists_and_sessions_are_judged_by_whom_they_leave() -> None:
    bed = Bed(worker(1, taints=frozenset({"big"})), worker(2), worker(3))
    tainted = RoutingConstraints(required_taints=frozenset({"big"}))
    placed(bed.admit("a", routing_constraints=tainted))
    queued(bed.admit("b", routing_constraints=tainted))
    placed(bed.admit("c", allowed_worker_ids=frozenset({2})))
    queued(bed.admit("d", allowed_worker_ids=frozenset({1, 2})))
    bound = placed(bed.admit("e", session_control=SessionControl("s", None)))
    assert bound.worker == Placement(3, 0)
    queued(bed.admit("f", session_control=SessionControl("s", None)))
    bed.free("e")
    assert bed.serve() == ["f"]


def test_requests_of_other_models_are_not_held_up() -> None:
    bed = Bed(worker(1), worker(2, model="n"))
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    answer = bed.ask("c", Query("n", 10))
    assert placed(answer).worker == Placement(2, 0)


# Wishes.

SESSION = SessionControl("s", None)
SOFT: dict[str, Any] = {"more_rules": {"session_mode": "soft"}}


def test_a_soft_session_whose_worker_is_busy_goes_to_another_that_is_not() -> None:
    bed = Bed(worker(1), worker(2), worker(3), **SOFT)
    bound = placed(bed.admit("a", session_control=SESSION))
    moved = placed(bed.admit("b", 10, session_control=SESSION))
    assert moved.worker != bound.worker
    assert moved.affinity == "moved"


def test_a_soft_session_stays_while_its_worker_has_room() -> None:
    bed = Bed(worker(1), worker(2), **SOFT)
    bound = placed(bed.admit("a", 900, session_control=SESSION))
    assert placed(bed.admit("b", 90, session_control=SESSION)).worker == bound.worker


def test_a_soft_session_waits_for_all_who_may_serve_it_and_prefers_its_own() -> None:
    bed = Bed(worker(1), worker(2), **SOFT)
    bound = placed(bed.admit("a", session_control=SESSION)).worker.worker_id
    other = 3 - bound
    placed(bed.admit("b", backend_instance_id=other))
    queued(bed.admit("c", 10, session_control=SESSION))
    bed.free("b")
    assert bed.relieve(other) == ["c"]
    assert placed(bed.answers["c"]).worker == Placement(other, 0)
    placed(bed.admit("d", backend_instance_id=other))
    queued(bed.admit("e", 10, session_control=SESSION))
    bed.free("d")
    bed.free("a")
    assert bed.relieve(bound, other) == ["e"]
    assert placed(bed.answers["e"]).worker == Placement(other, 0), "it was bound there meanwhile"


def test_a_soft_session_stands_in_line_with_those_who_want_the_same() -> None:
    bed = Bed(worker(1), worker(2), **SOFT)
    for at in (1, 2):
        placed(bed.admit(f"fills {at}", backend_instance_id=at))
    queued(bed.admit("first", 10))
    bed.free("fills 1")
    queued(bed.admit("second", 10, session_control=SESSION))
    assert bed.relieve(1) == ["first", "second"]


def test_a_soft_pair_goes_to_another_prefill_worker_and_keeps_its_decode() -> None:
    group = {"transfer_group": "g", "local_prefill": False}
    bed = Bed(
        *(worker(n, role="prefill", **group) for n in (1, 2)),
        *(worker(n, role="decode", **group) for n in (11, 12)),
        **SOFT,
    )
    first = placed(bed.admit("a", session_control=SESSION))
    second = placed(bed.admit("b", 10, session_control=SESSION))
    assert first.prefill != second.prefill
    assert first.worker == second.worker


def test_a_soft_session_on_a_whole_worker_goes_to_a_pair_that_has_room() -> None:
    group = {"transfer_group": "g", "local_prefill": False}
    bed = Bed(worker(1), **SOFT)
    placed(bed.admit("a", session_control=SESSION))
    bed.see(worker(1), worker(2, role="prefill", **group), worker(3, role="decode", **group))
    assert placed(bed.admit("b", 10, session_control=SESSION)).prefill == Placement(2, 0)


def test_a_preferred_adapter_is_no_reason_to_wait() -> None:
    policy: dict[str, Any] = {"lora_residency": "preferred"}
    bed = Bed(worker(1, loras=frozenset({"l"})), worker(2), more_rules=policy)
    assert placed(bed.admit("a", lora_name="l")).worker == Placement(1, 0)
    assert placed(bed.admit("b", lora_name="l")).worker == Placement(2, 0)
    queued(bed.admit("c", lora_name="l"))


def test_hard_sessions_of_one_worker_wait_in_one_lane_and_an_unbound_one_waits_for_all() -> None:
    bed = Bed(worker(1), worker(2))
    one = placed(bed.admit("a", 10, session_control=SessionControl("y", None))).worker.worker_id
    x = SessionControl("x", None)
    placed(bed.admit("b", backend_instance_id=one, session_control=x))
    placed(bed.admit("fills", backend_instance_id=3 - one))
    lanes = [
        queued(bed.admit(name, 10, session_control=SessionControl(name, None))).constraint_class
        for name in ("x", "y", "unbound")
    ]
    assert lanes[0] == lanes[1]
    assert lanes[0].placements == (Placement(one, 0),)
    assert lanes[2].placements == ()
    bed.free("fills")
    assert bed.relieve(3 - one) == ["unbound"]


def test_who_waits_for_a_worker_that_its_session_left_is_found() -> None:
    bed = Bed(worker(1), worker(2))
    bound = placed(bed.admit("a", session_control=SESSION)).worker.worker_id
    queued(bed.admit("b", 10, session_control=SESSION))
    assert bed.rebound_requests(SESSION) == []
    placed(bed.admit("c", 10, backend_instance_id=3 - bound, session_control=SESSION))
    ((one, outcome),) = bed.rebound_requests(SESSION)
    assert one.key == key("b")
    assert isinstance(outcome, Decision)
    assert outcome.worker == Placement(3 - bound, 0)
    assert bed.router.queue.bound(SessionName("m", SESSION.session_id)) == []


def test_a_stray_is_found_behind_one_of_another_session_too() -> None:
    bed = Bed(worker(1), worker(2))
    other = SessionControl("other", None)
    placed(bed.admit("a", 10, backend_instance_id=1, session_control=SESSION))
    placed(bed.admit("b", backend_instance_id=1, session_control=other))
    asked = (("x", SESSION), ("y1", other), ("y2", other))
    lanes = {
        queued(bed.admit(name, 10, session_control=control)).constraint_class
        for name, control in asked
    }
    assert len(lanes) == 1
    placed(bed.admit("c", 10, backend_instance_id=2, session_control=other))
    assert bed.rebound_requests(SESSION) == []
    assert [one.key.request_id for one, _ in bed.rebound_requests(other)] == ["y1", "y2"]
    assert bed.router.book.load(Placement(2, 0), bed.now).requests == 3
    assert bed.waiting == 1


def test_a_stray_whose_new_worker_is_busy_too_waits_there() -> None:
    bed = Bed(worker(1), worker(2))
    bound = placed(bed.admit("a", session_control=SESSION)).worker.worker_id
    queued(bed.admit("b", 10, session_control=SESSION))
    placed(bed.admit("c", backend_instance_id=3 - bound, session_control=SESSION))
    ((one, outcome),) = bed.rebound_requests(SESSION)
    assert (outcome, one.constraint_class.placements) == (None, (Placement(3 - bound, 0),))
    bed.free("a")
    assert bed.relieve(bound) == []
    bed.free("c")
    assert bed.relieve(3 - bound) == ["b"]


# The order.


def test_a_higher_level_goes_first_however_late_it_came() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    for name, level, jump in (("low", 0, 50.0), ("mid", 1, None), ("high", 2, None)):
        queued(bed.admit(name, level=level, priority_jump=jump))
        bed.now += 1.0
    order: list[str] = []
    for _ in range(3):
        bed.router.book.free(key((["a", *order])[-1]))
        order += bed.serve()
    assert order == ["high", "mid", "low"]


@pytest.mark.parametrize("policy", ["fcfs", "wspt", "lcfs"])
def test_a_level_counts_before_whatever_the_policy_says(policy: QueuePolicy) -> None:
    asked = [
        ("long ago and urgent", 0.0, Query("m", 1, routing=jumping(1e6), waited_s=1e6)),
        ("high", 1.0, Query("m", 10_000, strict_priority=1)),
        ("highest", 2.0, Query("m", 10_000, strict_priority=2**32 - 1)),
        ("low", 3.0, Query("m", 1, routing=jumping(1e6))),
    ]
    names = drained(policy, asked)
    assert names[:2] == ["highest", "high"]
    assert set(names[2:]) == {"long ago and urgent", "low"}


def drained(policy: QueuePolicy, asked: Sequence[tuple[str, float, Query]]) -> list[str]:
    """The order in which a queue lets (name, time of asking, query) go."""
    queue = AdmissionQueue(QueueSettings(threshold=0.0, policy=policy))
    for name, at, query in asked:
        queue.enqueue(query, key(name), at, blockers=NOBODY)
    names = []
    for one in queue.heads():
        names.append(one.key.request_id)
        queue.withdraw(one.key)
    return names


def jumping(seconds: float) -> RoutingHints:
    return RoutingHints(priority_jump=seconds)


def test_fcfs_goes_by_arrival_which_a_jump_moves_forward() -> None:
    query = Query("m", 100)
    asked = [
        ("first", 0.0, query),
        ("second", 1.0, query),
        ("jumps two", 2.5, replace(query, routing=jumping(2.0))),
        ("negative jumps nothing", 3.0, replace(query, routing=jumping(-9.0))),
    ]
    expected = ["first", "jumps two", "second", "negative jumps nothing"]
    assert drained("fcfs", asked) == expected


def test_lcfs_goes_the_other_way_round() -> None:
    query = Query("m", 100)
    asked = [
        ("first", 0.0, query),
        ("second", 1.0, query),
        ("jumps two", 0.5, replace(query, routing=jumping(2.0))),
    ]
    assert drained("lcfs", asked) == ["jumps two", "second", "first"]


def test_a_request_that_is_routed_again_keeps_its_place() -> None:
    query = Query("m", 100)
    asked = [
        ("came at 0", 0.0, query),
        ("came at 2", 2.0, query),
        ("came at 1, failed, asked at 3", 3.0, replace(query, waited_s=2.0)),
    ]
    assert drained("fcfs", asked) == [
        "came at 0",
        "came at 1, failed, asked at 3",
        "came at 2",
    ]


def test_wspt_goes_by_the_least_work_and_a_jump_weighs_it() -> None:
    asked = [
        ("long", 0.0, Query("m", 1000)),
        ("short", 1.0, Query("m", 10)),
        ("middling", 2.0, Query("m", 100)),
        ("long and urgent", 3.0, Query("m", 1000, routing=jumping(49.0))),
    ]
    assert drained("wspt", asked) == ["short", "long and urgent", "middling", "long"]


class Held:
    """An index in which workers hold so many blocks of whatever prompt."""

    def __init__(self, **blocks: int) -> None:
        self.blocks = {int(name[1:]): count for name, count in blocks.items()}

    def match(self, query: Query) -> Sequence[SourceMatch]:
        whole = len(query.prefix_hashes) // 8
        return [
            SourceMatch(Source(at, 0), min(held, whole), min(held, whole), min(held, whole))
            for at, held in self.blocks.items()
        ]

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("exact", "", 0.0)


def hashed(blocks: int) -> Query:
    return Query("m", 16 * blocks, bytes(8 * blocks), 1, 16)


@pytest.mark.parametrize(
    ("pin", "first"), [(None, "cached"), (2, "short")], ids=["any worker", "the one without cache"]
)
def test_wspt_counts_what_an_eligible_worker_has_cached(pin: int | None, first: str) -> None:
    workers = [worker(1, kv_index="events"), worker(2, kv_index="events")]
    bed = Bed(*workers, policy="wspt", index=Held(w1=90))
    for at in (1, 2):
        placed(bed.admit(f"fills {at}", backend_instance_id=at))
    hints = None if pin is None else RoutingHints(backend_instance_id=pin)
    # 100 blocks, of which worker 1 has 90, against 50 blocks that share no beginning with it.
    queued(bed.ask("cached", replace(hashed(100), routing=hints)))
    queued(bed.ask("short", replace(Query("m", 800), routing=hints)))
    heads = [one.key.request_id for one in bed.router.queue.heads()]
    assert heads[0] == first


def test_the_best_of_all_lanes_goes_first_where_they_want_the_same_worker() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    placed(bed.admit("b", backend_instance_id=2))
    queued(bed.admit("anywhere"))
    bed.now += 1.0
    queued(bed.admit("pinned", backend_instance_id=1))
    queued(bed.admit("pinned and high", backend_instance_id=1, level=1))
    bed.free("a")
    assert bed.serve() == ["pinned and high"]
    bed.free("pinned and high")
    assert bed.serve() == ["anywhere"]
    assert placed(bed.answers["anywhere"]).worker == Placement(1, 0)


def test_several_are_let_in_at_once_but_each_sees_what_the_one_before_booked() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    for name in "bcde":
        queued(bed.admit(name, 600))
    bed.free("a")
    assert bed.serve() == ["b", "c"], "two of 600 tokens make a worker busy above 1000"
    assert bed.load() == LoadTotals(1200, 76, 2)


# The bounds.


@pytest.mark.parametrize(
    ("limits", "kind", "current", "limit"),
    [
        ({"requests_max": 3}, "requests", "3", "3"),
        ({"tokens_max": 500}, "tokens", "600", "500"),
    ],
)
def test_a_full_queue_says_which_limit_is_reached_and_when_to_come_again(
    limits: dict[str, Any], kind: str, current: str, limit: str
) -> None:
    bed = Bed(**limits)
    placed(bed.admit("a"))
    for number in range(3):
        queued(bed.admit(f"r{number}", 200))
    with pytest.raises(Overloaded) as caught:
        bed.admit("too many", 200)
    error = caught.value
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 1.0)
    assert error.metadata == {
        "model": "m",
        "limit_kind": kind,
        "current": current,
        "limit": limit,
    }
    assert (bed.waiting, len(bed.router.book)) == (3, 1)
    assert bed.router.queue.withdraw(key("r1")) is not None
    queued(bed.admit("now there is room", 200))


def test_who_waited_too_long_is_turned_away_and_nobody_else() -> None:
    bed = Bed(wait_max_s=5.0)
    placed(bed.admit("a"))
    queued(bed.admit("early"))
    bed.now += 4.0
    queued(bed.admit("late"))
    bed.now += 0.9
    assert bed.router.queue.pop_overdue(bed.now) == []
    bed.now += 0.1
    (gone,) = bed.router.queue.pop_overdue(bed.now)
    error = queue_timeout_error(gone, 5.0)
    assert (gone.key, error.reason, error.retryable) == (key("early"), "QUEUE_TIMEOUT", True)
    assert (bed.waiting, bed.router.queue.tokens) == (1, 2 * BATCH)


def test_a_withdrawn_request_is_gone_and_books_nothing() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    queued(bed.admit("c"))
    assert bed.router.queue.withdraw(key("b")) is not None
    assert bed.router.queue.withdraw(key("b")) is None
    bed.free("a")
    assert bed.serve() == ["c"]
    assert bed.router.book.get(key("b")) is None


def test_the_end_of_a_session_takes_out_its_own() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("mine"))
    other = bed.router.book.open_session(8)
    bed.router.admit(Query("m", 10), BookingKey(8, "theirs", 0), bed.now, Random(0), other)
    gone = bed.router.queue.withdraw_session(bed.session)
    assert [one.key for one in gone] == [key("mine")]
    assert bed.waiting == 1
    assert [one.key.request_id for one in bed.router.queue.clear()] == ["theirs"]
    assert (bed.waiting, bed.router.queue.tokens) == (0, 0)


# What goes wrong.


def test_when_the_last_worker_goes_all_who_wait_are_told_at_once_and_nothing_is_booked() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    for name in "bcd":
        queued(bed.admit(name))
    bed.see()
    assert bed.serve() == ["b", "c", "d"]
    for name in "bcd":
        error = bed.answers[name]
        assert isinstance(error, Unavailable)
        assert error.reason == "NO_WORKER"
    assert (bed.waiting, len(bed.router.book)) == (0, 1)


def test_who_is_pinned_to_a_worker_that_goes_is_told_and_others_wait_on() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    placed(bed.admit("b", backend_instance_id=2))
    queued(bed.admit("pinned", backend_instance_id=1))
    queued(bed.admit("pinned too", backend_instance_id=1))
    queued(bed.admit("free"))
    bed.see(worker(2))
    assert bed.serve() == ["pinned", "pinned too"]
    error = bed.answers["pinned too"]
    assert isinstance(error, Unavailable)
    assert error.reason == "PINNED_WORKER_GONE"
    assert bed.waiting == 1


@pytest.mark.row("S1-107")
def test_a_worker_that_goes_while_a_request_waits_for_it_is_never_chosen() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    placed(bed.admit("b", backend_instance_id=2))
    queued(bed.admit("c"))
    bed.free("a")
    bed.see(worker(2))
    assert bed.serve() == [], "the worker with room is not there any more"
    bed.free("b")
    assert bed.serve() == ["c"]
    assert placed(bed.answers["c"]).worker == Placement(2, 0)


class Broken:
    """Chooses the first of them until it is told to fail."""

    name = "broken"

    def __init__(self) -> None:
        self.fails = False

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Selection:
        if self.fails:
            raise ZeroDivisionError("of no fault of ours")
        return Selection(candidates[0], "first")


def test_a_selector_that_fails_on_the_parked_costs_that_request_only() -> None:
    selector = Broken()
    bed = Bed(selector=selector)
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    bed.free("a")
    selector.fails = True
    assert bed.serve() == ["b"]
    error = bed.answers["b"]
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert (bed.waiting, len(bed.router.book)) == (0, 0)


@pytest.mark.parametrize("jump", [float("inf"), float("nan")])
def test_a_jump_that_has_no_place_in_an_order_is_refused(jump: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Bed().admit("a", priority_jump=jump)
    assert caught.value.field == "query.routing.priority_jump"


def test_a_key_that_is_booked_gets_its_answer_though_others_wait() -> None:
    bed = Bed()
    first = placed(bed.admit("a"))
    queued(bed.admit("b"))
    assert placed(bed.admit("a")) == first
    assert (bed.waiting, len(bed.router.book)) == (1, 1)


def test_an_override_that_tracks_no_prefill_makes_nobody_busy() -> None:
    bed = Bed()
    untracked = RouterConfigOverride(track_prefill_tokens=False)
    for number in range(3):
        placed(bed.ask(f"r{number}", Query("m", 5000, override=untracked)))
    assert bed.load().prefill_tokens == 0


# Properties.

_ASKED = st.lists(
    st.tuples(
        st.integers(0, 2),  # strict priority
        st.floats(0, 5),  # seconds since arrival
        st.sampled_from([None, 0.0, 1.5, -1.0]),  # jump
        st.integers(1, 500),  # tokens
        st.sampled_from([None, 1, 2]),  # pin
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(asked=_ASKED, policy=st.sampled_from(["fcfs", "wspt", "lcfs"]))
def test_the_queue_orders_like_a_sorted_list_whatever_the_lanes(
    asked: list[tuple[int, float, float | None, int, int | None]], policy: QueuePolicy
) -> None:
    queue = AdmissionQueue(QueueSettings(threshold=0.0, policy=policy))
    expected = []
    for number, (level, waited, jump, tokens, pin) in enumerate(asked):
        hints = RoutingHints(priority_jump=jump, backend_instance_id=pin)
        query = Query("m", tokens, routing=hints, waited_s=waited, strict_priority=level)
        queue.enqueue(query, key(str(number)), float(number), blockers=NOBODY)
        gain, arrival = max(0.0, jump or 0.0), number - waited
        value = {"fcfs": gain - arrival, "lcfs": gain + arrival, "wspt": (1 + gain) / tokens}
        expected.append((-level, -value[policy], number))
    assert queue.tokens == sum(tokens for *_, tokens, _ in asked)
    names = []
    for one in queue.heads():
        names.append(int(one.key.request_id))
        queue.withdraw(one.key)
    assert names == [number for *_, number in sorted(expected)]
    assert (len(queue), queue.tokens) == (0, 0)


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "free", "done", "serve", "withdraw", "fleet"]), st.integers(0, 9)
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps=_STEPS, seed=st.integers(0, 99))
@example(steps=[("ask", 8), ("ask", 2), ("ask", 2), ("free", 0), ("ask", 4)], seed=0)
def test_whatever_happens_everybody_is_placed_or_told_and_books_return_to_zero(
    steps: list[tuple[str, int]], seed: int
) -> None:
    rng = Random(seed)
    workers = [worker(at) for at in (1, 2, 3)]
    bed = Bed(*workers)
    asked: set[str] = set()
    running: set[str] = set()
    gone: set[str] = set()
    here = list(workers)
    by_fleet = False

    capacity_freed: dict[int, None] = {}
    bed.router.events.capacity_freed.subscribe(lambda at: capacity_freed.setdefault(at.worker_id))

    def serve() -> None:
        # The fleet changes are for sweeps, all else for reliefs.
        nonlocal by_fleet
        names = bed.serve() if by_fleet else []
        by_fleet = False
        while capacity_freed:
            at = next(iter(capacity_freed))
            del capacity_freed[at]
            names += bed.relieve(at)
        for name in names:
            assert name in asked - running - gone, "told twice, or after it was withdrawn"
            (running if isinstance(bed.answers[name], Decision) else gone).add(name)
        free_workers = [w.id for w in here if bed.load(w.id).prefill_tokens <= BATCH]
        for head in bed.router.queue.heads():
            pin = head.constraint_class.worker_id
            assert not free_workers if pin is None else pin not in free_workers, "waits for nothing"

    for number, (step, arg) in enumerate(steps):
        bed.now += 0.01
        name = f"r{number}"
        if step == "ask":
            pin = arg if arg in (1, 2) else None
            asked.add(name)
            try:
                answer = bed.admit(name, 200 * (arg + 1), backend_instance_id=pin)
            except MeshError:
                gone.add(name)
            else:
                if isinstance(answer, Decision):
                    running.add(name)
        elif step in ("free", "done") and running:
            one = rng.choice(sorted(running))
            if step == "free":
                bed.free(one)
                running.discard(one)
                gone.add(one)
            else:
                bed.router.book.mark_prefill_done(key(one))
        elif step == "withdraw" and asked - running - gone:
            one = rng.choice(sorted(asked - running - gone))
            assert bed.router.queue.withdraw(key(one)) is not None
            gone.add(one)
        elif step == "fleet":
            here = [w for w in workers if w.id != arg]
            bed.see(*here)
            by_fleet = True
        if step == "serve" or arg % 3:  # Else what comes next comes before anybody is let in.
            serve()
    serve()
    assert bed.waiting == len(asked - running - gone)
    bed.see(*workers)
    by_fleet = True
    while asked - gone:
        for one in sorted(running):
            bed.free(one)
        gone |= running
        running.clear()
        serve()
    assert (bed.waiting, bed.router.queue.tokens, len(bed.router.book)) == (0, 0, 0)
    assert all(bed.load(at) == LoadTotals() for at in (1, 2, 3))


def test_who_goes_to_another_lane_amid_a_relief_is_found_at_the_same_spot_again() -> None:
    queue, slot = (
        AdmissionQueue(QueueSettings(threshold=0.0)),
        RankCapacity(Placement(1, 0), "whole"),
    )
    blockers = Blockers(1, frozenset({slot}))
    query = Query("m", 1, routing=RoutingHints(session_control=SESSION))
    queue.enqueue(query, key("moves"), 0.0, blockers=blockers)
    bound = constraint_class_of(query, (Placement(1, 0),))
    seen = []
    for one in queue.queued_heads_at(slot):
        seen.append(one.constraint_class)
        queue.mark_blocked(one, bound, blockers)
    assert seen[-1] == bound, "it is looked at in its new lane too"
    assert len(seen) == 2
    assert [one.key for one in queue.queued_heads_at(slot)] == [key("moves")]


def test_a_sweep_gets_to_those_behind_one_that_went_to_another_lane() -> None:
    """They were left unseen, and held up whoever came after them: simulated seed 304."""
    queue = AdmissionQueue(QueueSettings(threshold=0.0))
    query = Query("m", 1, routing=RoutingHints(session_control=SESSION))
    bound = constraint_class_of(query, (Placement(1, 0),))
    for number, name in enumerate(("moves", "behind")):
        queue.enqueue(query, key(name), float(number), blockers=NOBODY, constraint_class=bound)
    queue.mark_all_dirty()
    seen = []
    for one in queue.heads():
        seen.append(one.key.request_id)
        queue.mark_blocked(
            one, constraint_class_of(one.query) if seen == ["moves"] else bound, NOBODY
        )
    assert seen == ["moves", "behind"]
    order = queue.order(Query("m", 1), 9.0)
    assert not queue.overtakes(order, "m", RankCapacity(Placement(9, 0), "whole")), (
        "nobody is unseen"
    )
