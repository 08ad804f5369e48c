"""The admission queue: which requests are queued, in which order, and how a wait ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import InternalError, InvalidRequest, MeshError, Overloaded, Unavailable
from common.kv.events import Source
from common.kv.load import LOAD_MAX_AGE_S, Load
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from common.request.preprocessed import (
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
    SessionControl,
)
from router_svc.core.admission import (
    QueuedRequest,
    QueuePolicy,
    QueueSettings,
    queue_timeout_error,
)
from router_svc.core.booking import BookingKey
from router_svc.core.candidate import Candidate, LoadTotals
from router_svc.core.decision import DecisionRecord
from router_svc.core.eligibility import BusyLimits
from router_svc.core.overlap import IndexStatus
from router_svc.core.pairing import NO_BYPASS, Bypass
from router_svc.core.policy import Policy
from router_svc.core.router import Router
from router_svc.core.scoring import View
from router_svc.core.selectors import SELECTORS, Selection, WorkerSelector
from tests.kit import instances
from tests.kit.bookings import FRONTEND, key
from tests.kit.instances import snapshot_of

BATCH = 1000
worker = partial(instances.worker, max_num_batched_tokens=BATCH)


class Bed:
    """A router with workers that are prefill-busy above one batch; `now` is set by hand.

    outcomes: of the queued requests, in order.
    """

    def __init__(
        self,
        *workers: Instance,
        selector: WorkerSelector | None = None,
        busy: BusyLimits | None = None,
        bypass: Bypass = NO_BYPASS,
        index: Any = None,
        more_policy: Mapping[str, Any] = MappingProxyType({}),
        **queue: Any,
    ) -> None:
        given = {"threshold": 1.0, **queue}
        policy = Policy(
            queue=QueueSettings(**given), busy=busy or BusyLimits(), bypass=bypass, **more_policy
        )
        self.router = Router(selector or SELECTORS["least_loaded"](), policy=policy, index=index)
        self.now = 100.0
        self.outcomes: dict[str, DecisionRecord | MeshError] = {}
        self.see(*(workers or (worker(1),)))
        self.session = self.router.load_tracker.open_session(FRONTEND)

    def see(self, *workers: Instance) -> None:
        self.router.update(snapshot_of(*workers), self.now)

    def admit(
        self, name: str, tokens: int = 2 * BATCH, *, level: int = 0, **hints: Any
    ) -> DecisionRecord | QueuedRequest:
        """Request a placement; the default `tokens` alone make a worker busy."""
        routing = RoutingHints(**hints) if hints else None
        query = Query("m", tokens, routing=routing, strict_priority=level)
        return self.submit(name, query)

    def submit(self, name: str, query: Query) -> DecisionRecord | QueuedRequest:
        return self.router.admit(query, key(name), self.now, Random(0), self.session)

    def free(self, name: str) -> None:
        assert self.router.load_tracker.free(key(name))

    def serve(self) -> list[str]:
        """Rescan the queue; the names of the requests that left it, in order."""
        names = []
        for queued, outcome in self.router.rescan(self.now, Random(0)):
            if outcome is None:
                continue
            names.append(queued.key.request_id)
            self.outcomes[queued.key.request_id] = outcome
        return names

    def tick(self) -> list[str]:
        """Rescan the whole queue, as the router does twice per second."""
        self.router.queue.mark_all_dirty()
        return self.serve()

    def load(self, worker_id: int = 1) -> LoadTotals:
        return self.router.load_tracker.load(Placement(worker_id, 0), self.now)

    @property
    def waiting(self) -> int:
        return len(self.router.queue)


def placed(outcome: DecisionRecord | QueuedRequest | MeshError) -> DecisionRecord:
    assert isinstance(outcome, DecisionRecord), outcome
    return outcome


def queued(outcome: DecisionRecord | QueuedRequest) -> QueuedRequest:
    assert isinstance(outcome, QueuedRequest), "the request was placed at once"
    return outcome


# Which requests are queued.


def test_without_a_threshold_no_request_is_queued() -> None:
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
    assert (bed.waiting, bed.router.queue.tokens, len(bed.router.load_tracker)) == (1, 300, 2)
    assert bed.serve() == [], "nothing has changed"
    bed.free("b")
    bed.now += 1.5
    assert bed.serve() == ["c"]
    record = placed(bed.outcomes["c"])
    assert (record.decision.worker, record.decision.queued_ms) == (Placement(2, 0), 1500)
    assert record.decision.reasons[-1] == "queued for 1500 ms"
    assert bed.load(2) == LoadTotals(300, 19, 1)
    assert (bed.waiting, bed.router.queue.tokens) == (0, 0)


def test_a_worker_is_busy_above_the_threshold_and_not_at_it() -> None:
    bed = Bed()
    placed(bed.admit("a", BATCH))
    placed(bed.admit("b", 1))
    queued(bed.admit("c", 1))


def test_a_worker_without_a_reported_batch_size_is_busy_at_absurd_loads_only() -> None:
    bed = Bed(worker(1, max_num_batched_tokens=None))
    for number in range(5):
        placed(bed.admit(f"r{number}", 2_000_000))
    placed(bed.admit("the request that crosses the threshold", 1))
    queued(bed.admit("the next", 1))


@pytest.mark.row("S1-21")
def test_a_new_request_waits_behind_queued_requests_for_the_same_workers() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("b", 10))
    bed.free("a")  # Capacity, but no rescan yet.
    queued(bed.admit("c", 10))
    assert bed.serve() == ["b", "c"]


def test_the_end_of_prefill_frees_capacity_before_the_response_ends() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    bed.router.load_tracker.mark_prefill_done(key("a"))
    assert bed.serve() == ["b"]
    assert bed.load().requests == 2


def test_a_new_worker_adds_capacity() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    bed.see(worker(1), worker(2))
    assert bed.serve() == ["b"]
    assert placed(bed.outcomes["b"]).decision.worker == Placement(2, 0)


def test_a_load_report_blocks_requests_and_a_later_one_admits_them() -> None:
    bed = Bed()
    bed.router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    assert bed.serve() == []
    bed.router.load_tracker.report(1, 0, Load(), bed.now)
    assert bed.serve() == ["a"]


def test_an_expired_load_report_blocks_no_request() -> None:
    bed = Bed()
    bed.router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    bed.now += LOAD_MAX_AGE_S + 0.1
    assert bed.tick() == ["a"]


def test_a_pair_waits_only_for_the_worker_that_computes_the_prompt() -> None:
    group = {"transfer_group": "g", "local_prefill": False}
    bed = Bed(worker(1, role="prefill", **group), worker(2, role="decode", **group))
    first = placed(bed.admit("a"))
    assert (first.decision.prefill, first.decision.worker) == (Placement(1, 0), Placement(2, 0))
    queued(bed.admit("b"))
    bed.router.load_tracker.mark_prefill_done(key("a"))
    assert bed.serve() == ["b"], "decode load does not matter"


def test_a_worker_below_its_busy_threshold_again_admits_requests_that_wait_for_others() -> None:
    workers = [worker(1, total_kv_blocks=100), worker(2, total_kv_blocks=100)]
    bed = Bed(*workers, busy=BusyLimits(active_decode_blocks=0.5))
    bed.router.load_tracker.report(1, 0, Load(kv_used_blocks=90), bed.now)
    bed.router.load_tracker.report(2, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    assert bed.serve() == []
    bed.router.load_tracker.report(1, 0, Load(), bed.now)
    assert bed.serve() == ["a"]
    assert placed(bed.outcomes["a"]).decision.worker == Placement(1, 0)


def test_a_decode_worker_with_capacity_admits_requests_that_wait_for_prefill() -> None:
    group = {"transfer_group": "g", "local_prefill": True, "total_kv_blocks": 100}
    workers = [worker(1, role="prefill", **group), worker(2, role="decode", **group)]
    bypass = Bypass(policy="isl_bounding", eff_isl_ratio_threshold=1.1, decode_busy_threshold=0.5)
    bed = Bed(*workers, bypass=bypass)
    bed.router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    bed.router.load_tracker.report(2, 0, Load(kv_used_blocks=90), bed.now)
    queued(bed.admit("a", 10))
    assert bed.serve() == []
    bed.router.load_tracker.report(2, 0, Load(), bed.now)
    assert bed.serve() == ["a"]
    assert placed(bed.outcomes["a"]).bypass == "short_prompt"


class Counting:
    """Selects the first candidate and counts the calls."""

    name = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Selection:
        self.calls += 1
        return Selection(candidates[0], "first")


def test_a_request_blocked_by_a_busy_limit_is_admitted_when_the_limit_no_longer_applies() -> None:
    workers = [worker(at, total_kv_blocks=100) for at in (1, 2, 3)]
    bed = Bed(*workers, busy=BusyLimits(active_decode_blocks=0.5))
    for at in (1, 2):
        bed.router.load_tracker.report(at, 0, Load(kv_used_blocks=90), bed.now)
    bed.router.load_tracker.report(3, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    queued(bed.admit("b", 10, backend_instance_id=3))
    assert bed.serve() == []
    bed.router.load_tracker.report(2, 0, Load(kv_used_blocks=40), bed.now)
    assert bed.serve() == ["a"]
    assert placed(bed.outcomes["a"]).decision.worker == Placement(2, 0)


def test_capacity_freed_on_one_rank_admits_requests_to_its_worker() -> None:
    bed = Bed(worker(1, dp_size=2), busy=BusyLimits(active_prefill_tokens_frac=2.0))
    busy = Load(waiting=1, waiting_tokens=5000)
    bed.router.load_tracker.report(1, 1, Load(waiting=1, waiting_tokens=1500), bed.now)
    bed.router.load_tracker.report(1, 0, busy, bed.now)
    queued(bed.admit("a", 10))
    bed.router.load_tracker.report(1, 1, Load(), bed.now)
    assert bed.serve() == ["a"]
    assert placed(bed.outcomes["a"]).decision.worker == Placement(1, 1)


def test_a_queued_request_stays_queued_while_all_workers_are_above_a_busy_limit() -> None:
    workers = [worker(at, total_kv_blocks=100) for at in (1, 2)]
    bed = Bed(*workers, busy=BusyLimits(active_decode_blocks=0.5))
    for at in (1, 2):
        bed.router.load_tracker.report(at, 0, Load(waiting=1, waiting_tokens=5000), bed.now)
    queued(bed.admit("a", 10))
    for at in (1, 2):
        bed.router.load_tracker.report(at, 0, Load(kv_used_blocks=90), bed.now)
    bed.see(*workers, worker(9, model="n"))
    assert (bed.serve(), bed.waiting) == ([], 1)
    with pytest.raises(Overloaded):
        bed.admit("b", 10)
    bed.router.load_tracker.report(2, 0, Load(), bed.now)
    assert bed.serve() == ["a"]


def test_a_frontend_that_joins_triggers_no_rescan() -> None:
    selector = Counting()
    bed = Bed(selector=selector)
    placed(bed.admit("fills"))
    for number in range(3):
        queued(bed.admit(f"r{number}", allowed_worker_ids=frozenset({1, 100 + number})))
    selector.calls = 0
    bed.see(worker(1), Instance(FRONTEND, "mesh", "frontend", "", "127.0.0.1:2"))
    assert (bed.serve(), selector.calls) == ([], 0)
    bed.see(worker(1), worker(2, model="n"))
    assert (bed.serve(), selector.calls) == ([], 3)


# Constraint classes.


def test_a_pinned_request_waits_for_its_own_worker_only() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    queued(bed.admit("b", backend_instance_id=1))
    placed(bed.admit("c", backend_instance_id=2))
    queued(bed.admit("d", backend_instance_id=2))
    bed.free("c")
    assert bed.serve() == ["d"], "b is first in the queue, but its worker is busy"


def test_a_pinned_request_delays_no_other_request() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    queued(bed.admit("b", backend_instance_id=1))
    assert placed(bed.admit("c", 10)).decision.worker == Placement(2, 0)


def test_a_session_that_waits_for_its_worker_delays_no_other_request() -> None:
    bed = Bed(worker(1), worker(2))
    bound = placed(bed.admit("a", session_control=SessionControl("s", None)))
    queued(bed.admit("b", session_control=SessionControl("s", None)))
    assert placed(bed.admit("c", 10)).decision.worker != bound.decision.worker


def test_taints_allow_lists_and_sessions_form_constraint_classes() -> None:
    bed = Bed(worker(1, taints=frozenset({"big"})), worker(2), worker(3))
    tainted = RoutingConstraints(required_taints=frozenset({"big"}))
    placed(bed.admit("a", routing_constraints=tainted))
    queued(bed.admit("b", routing_constraints=tainted))
    placed(bed.admit("c", allowed_worker_ids=frozenset({2})))
    queued(bed.admit("d", allowed_worker_ids=frozenset({1, 2})))
    bound = placed(bed.admit("e", session_control=SessionControl("s", None)))
    assert bound.decision.worker == Placement(3, 0)
    queued(bed.admit("f", session_control=SessionControl("s", None)))
    bed.free("e")
    assert bed.serve() == ["f"]


def test_a_queued_request_delays_no_other_model() -> None:
    bed = Bed(worker(1), worker(2, model="n"))
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    answer = bed.submit("c", Query("n", 10))
    assert placed(answer).decision.worker == Placement(2, 0)


# Preferences.

SESSION = SessionControl("s", None)
SOFT: dict[str, Any] = {"more_policy": {"session_mode": "soft"}}


def test_a_soft_session_moves_to_a_free_worker_if_its_own_is_busy() -> None:
    bed = Bed(worker(1), worker(2), worker(3), **SOFT)
    bound = placed(bed.admit("a", session_control=SESSION))
    moved = placed(bed.admit("b", 10, session_control=SESSION))
    assert moved.decision.worker != bound.decision.worker
    assert moved.affinity == "moved"


def test_a_soft_session_stays_while_its_worker_has_capacity() -> None:
    bed = Bed(worker(1), worker(2), **SOFT)
    bound = placed(bed.admit("a", 900, session_control=SESSION))
    assert (
        placed(bed.admit("b", 90, session_control=SESSION)).decision.worker == bound.decision.worker
    )


def test_a_soft_session_waits_for_all_eligible_workers_and_prefers_its_own() -> None:
    bed = Bed(worker(1), worker(2), **SOFT)
    bound = placed(bed.admit("a", session_control=SESSION)).decision.worker.worker_id
    other = 3 - bound
    placed(bed.admit("b", backend_instance_id=other))
    queued(bed.admit("c", 10, session_control=SESSION))
    bed.free("b")
    assert bed.serve() == ["c"]
    assert placed(bed.outcomes["c"]).decision.worker == Placement(other, 0)
    placed(bed.admit("d", backend_instance_id=other))
    queued(bed.admit("e", 10, session_control=SESSION))
    bed.free("d")
    bed.free("a")
    assert bed.serve() == ["e"]
    assert placed(bed.outcomes["e"]).decision.worker == Placement(other, 0), (
        "the session moved there meanwhile"
    )


def test_a_soft_session_is_in_the_same_constraint_class_as_requests_without_one() -> None:
    bed = Bed(worker(1), worker(2), **SOFT)
    for at in (1, 2):
        placed(bed.admit(f"fills {at}", backend_instance_id=at))
    queued(bed.admit("first", 10))
    bed.free("fills 1")
    queued(bed.admit("second", 10, session_control=SESSION))
    assert bed.serve() == ["first", "second"]


def test_a_soft_session_moves_to_another_prefill_worker_and_keeps_its_decode_worker() -> None:
    group = {"transfer_group": "g", "local_prefill": False}
    bed = Bed(
        *(worker(n, role="prefill", **group) for n in (1, 2)),
        *(worker(n, role="decode", **group) for n in (11, 12)),
        **SOFT,
    )
    first = placed(bed.admit("a", session_control=SESSION))
    second = placed(bed.admit("b", 10, session_control=SESSION))
    assert first.decision.prefill != second.decision.prefill
    assert first.decision.worker == second.decision.worker


def test_a_soft_session_on_an_aggregated_worker_moves_to_a_pair_with_capacity() -> None:
    group = {"transfer_group": "g", "local_prefill": False}
    bed = Bed(worker(1), **SOFT)
    placed(bed.admit("a", session_control=SESSION))
    bed.see(worker(1), worker(2, role="prefill", **group), worker(3, role="decode", **group))
    assert placed(bed.admit("b", 10, session_control=SESSION)).decision.prefill == Placement(2, 0)


def test_a_preferred_adapter_is_no_reason_to_wait() -> None:
    policy: dict[str, Any] = {"lora_residency": "preferred"}
    bed = Bed(worker(1, loras=frozenset({"l"})), worker(2), more_policy=policy)
    assert placed(bed.admit("a", lora_name="l")).decision.worker == Placement(1, 0)
    assert placed(bed.admit("b", lora_name="l")).decision.worker == Placement(2, 0)
    queued(bed.admit("c", lora_name="l"))


def test_hard_sessions_of_one_worker_share_a_class_and_a_new_session_waits_for_all() -> None:
    bed = Bed(worker(1), worker(2))
    one = placed(
        bed.admit("a", 10, session_control=SessionControl("y", None))
    ).decision.worker.worker_id
    x = SessionControl("x", None)
    placed(bed.admit("b", backend_instance_id=one, session_control=x))
    placed(bed.admit("fills", backend_instance_id=3 - one))
    classes = [
        queued(bed.admit(name, 10, session_control=SessionControl(name, None))).constraint_class
        for name in ("x", "y", "unbound")
    ]
    assert classes[0] == classes[1]
    assert classes[0].placements == (Placement(one, 0),)
    assert classes[2].placements == ()
    bed.free("fills")
    assert bed.serve() == ["unbound"]


def test_a_request_whose_session_moved_to_another_worker_is_placed_there() -> None:
    bed = Bed(worker(1), worker(2))
    bound = placed(bed.admit("a", session_control=SESSION)).decision.worker.worker_id
    queued(bed.admit("b", 10, session_control=SESSION))
    assert bed.serve() == []
    placed(bed.admit("c", 10, backend_instance_id=3 - bound, session_control=SESSION))
    assert bed.serve() == ["b"]
    assert placed(bed.outcomes["b"]).decision.worker == Placement(3 - bound, 0)


def test_requests_of_a_moved_session_are_found_behind_those_of_another_session() -> None:
    bed = Bed(worker(1), worker(2))
    other = SessionControl("other", None)
    placed(bed.admit("a", 10, backend_instance_id=1, session_control=SESSION))
    placed(bed.admit("b", backend_instance_id=1, session_control=other))
    requests = (("x", SESSION), ("y1", other), ("y2", other))
    classes = {
        queued(bed.admit(name, 10, session_control=control)).constraint_class
        for name, control in requests
    }
    assert len(classes) == 1
    placed(bed.admit("c", 10, backend_instance_id=2, session_control=other))
    assert bed.serve() == ["y1", "y2"]
    assert bed.router.load_tracker.load(Placement(2, 0), bed.now).requests == 3
    assert bed.waiting == 1


def test_a_request_of_a_moved_session_waits_for_its_new_worker_if_that_is_busy() -> None:
    bed = Bed(worker(1), worker(2))
    bound = placed(bed.admit("a", session_control=SESSION)).decision.worker.worker_id
    one = queued(bed.admit("b", 10, session_control=SESSION))
    placed(bed.admit("c", backend_instance_id=3 - bound, session_control=SESSION))
    assert bed.serve() == []
    assert one.constraint_class.placements == (Placement(3 - bound, 0),)
    bed.free("a")
    assert bed.serve() == []
    bed.free("c")
    assert bed.serve() == ["b"]


# The order.


def test_a_higher_level_goes_first_at_any_arrival_time() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    for name, level, jump in (("low", 0, 50.0), ("mid", 1, None), ("high", 2, None)):
        queued(bed.admit(name, level=level, priority_jump=jump))
        bed.now += 1.0
    order: list[str] = []
    for _ in range(3):
        bed.router.load_tracker.free(key((["a", *order])[-1]))
        order += bed.serve()
    assert order == ["high", "mid", "low"]


@pytest.mark.parametrize("policy", ["fcfs", "wspt", "lcfs"])
def test_the_level_precedes_the_policy(policy: QueuePolicy) -> None:
    requests = [
        ("long ago and urgent", 0.0, Query("m", 1, routing=jumping(1e6), waited_ms=10**9)),
        ("high", 1.0, Query("m", 10_000, strict_priority=1)),
        ("highest", 2.0, Query("m", 10_000, strict_priority=2**32 - 1)),
        ("low", 3.0, Query("m", 1, routing=jumping(1e6))),
    ]
    names = drained(policy, requests)
    assert names[:2] == ["highest", "high"]
    assert set(names[2:]) == {"long ago and urgent", "low"}


def drained(policy: QueuePolicy, requests: Sequence[tuple[str, float, Query]]) -> list[str]:
    """The order in which (name, enqueue time, query) leave the queue, one at a time."""
    bed = Bed(threshold=0.0, policy=policy)
    placed(bed.admit("fills", 1))
    for name, at, query in requests:
        bed.now = 100.0 + at
        queued(bed.submit(name, query))
    names = ["fills"]
    while bed.waiting:
        bed.free(names[-1])
        names += bed.serve()
    return names[1:]


def jumping(seconds: float) -> RoutingHints:
    return RoutingHints(priority_jump=seconds)


def test_fcfs_orders_by_arrival_minus_jump() -> None:
    query = Query("m", 100)
    requests = [
        ("first", 0.0, query),
        ("second", 1.0, query),
        ("jumps two", 2.5, replace(query, routing=jumping(2.0))),
        ("negative jumps nothing", 3.0, replace(query, routing=jumping(-9.0))),
    ]
    expected = ["first", "jumps two", "second", "negative jumps nothing"]
    assert drained("fcfs", requests) == expected


def test_lcfs_orders_by_latest_arrival_plus_jump() -> None:
    query = Query("m", 100)
    requests = [
        ("first", 0.0, query),
        ("second", 1.0, query),
        ("jumps two", 0.5, replace(query, routing=jumping(2.0))),
    ]
    assert drained("lcfs", requests) == ["jumps two", "second", "first"]


def test_a_request_that_is_routed_again_keeps_its_position() -> None:
    query = Query("m", 100)
    requests = [
        ("came at 0", 0.0, query),
        ("came at 2", 2.0, query),
        ("came at 1, failed, again at 3", 3.0, replace(query, waited_ms=2000)),
    ]
    assert drained("fcfs", requests) == [
        "came at 0",
        "came at 1, failed, again at 3",
        "came at 2",
    ]


def test_wspt_orders_by_least_work_divided_by_jump() -> None:
    requests = [
        ("long", 0.0, Query("m", 1000)),
        ("short", 1.0, Query("m", 10)),
        ("middling", 2.0, Query("m", 100)),
        ("long and urgent", 3.0, Query("m", 1000, routing=jumping(49.0))),
    ]
    assert drained("wspt", requests) == ["short", "long and urgent", "middling", "long"]


class Held:
    """An index in which workers hold this many blocks of any prompt."""

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
    # 100 blocks, of which worker 1 has 90, against 50 blocks that share no prefix with it.
    queued(bed.submit("cached", replace(hashed(100), routing=hints)))
    queued(bed.submit("short", replace(Query("m", 800), routing=hints)))
    bed.free("fills 2")
    assert bed.serve()[0] == first


def test_the_best_head_of_all_classes_is_tried_first() -> None:
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
    assert placed(bed.outcomes["anywhere"]).decision.worker == Placement(1, 0)


def test_several_requests_are_admitted_in_one_rescan_each_with_the_bookings_before_it() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    for name in "bcde":
        queued(bed.admit(name, 600))
    bed.free("a")
    assert bed.serve() == ["b", "c"], "two of 600 tokens make a worker busy above 1000"
    assert bed.load() == LoadTotals(1200, 76, 2)


# Limits.


@pytest.mark.parametrize(
    ("limits", "kind", "current", "limit"),
    [
        ({"requests_max": 3}, "requests", "3", "3"),
        ({"tokens_max": 500}, "tokens", "600", "500"),
    ],
)
def test_a_full_queue_reports_the_limit_and_a_retry_hint(
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
    assert (bed.waiting, len(bed.router.load_tracker)) == (3, 1)
    assert bed.router.queue.withdraw(key("r1")) is not None
    queued(bed.admit("a worker has capacity", 200))


def test_only_overdue_requests_are_rejected() -> None:
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
    assert bed.router.load_tracker.get(key("b")) is None


def test_the_end_of_a_frontend_session_withdraws_its_requests_only() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    queued(bed.admit("mine"))
    other = bed.router.load_tracker.open_session(8)
    bed.router.admit(Query("m", 10), BookingKey(8, "theirs", 0), bed.now, Random(0), other)
    gone = bed.router.queue.withdraw_session(bed.session)
    assert [one.key for one in gone] == [key("mine")]
    assert bed.waiting == 1
    assert [one.key.request_id for one in bed.router.queue.clear()] == ["theirs"]
    assert (bed.waiting, bed.router.queue.tokens) == (0, 0)


# Failures.


def test_when_the_last_worker_leaves_all_queued_requests_fail_at_once_without_a_booking() -> None:
    bed = Bed()
    placed(bed.admit("a"))
    for name in "bcd":
        queued(bed.admit(name))
    bed.see()
    assert bed.serve() == ["b", "c", "d"]
    for name in "bcd":
        error = bed.outcomes[name]
        assert isinstance(error, Unavailable)
        assert error.reason == "NO_WORKER"
    assert (bed.waiting, len(bed.router.load_tracker)) == (0, 1)


def test_requests_pinned_to_a_worker_that_left_fail_and_others_stay_queued() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    placed(bed.admit("b", backend_instance_id=2))
    queued(bed.admit("pinned", backend_instance_id=1))
    queued(bed.admit("pinned too", backend_instance_id=1))
    queued(bed.admit("free"))
    bed.see(worker(2))
    assert bed.serve() == ["pinned", "pinned too"]
    error = bed.outcomes["pinned too"]
    assert isinstance(error, Unavailable)
    assert error.reason == "PINNED_WORKER_GONE"
    assert bed.waiting == 1


@pytest.mark.row("S1-107")
def test_a_worker_that_left_while_a_request_was_queued_is_never_selected() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("a", backend_instance_id=1))
    placed(bed.admit("b", backend_instance_id=2))
    queued(bed.admit("c"))
    bed.free("a")
    bed.see(worker(2))
    assert bed.serve() == [], "the worker with capacity left"
    bed.free("b")
    assert bed.serve() == ["c"]
    assert placed(bed.outcomes["c"]).decision.worker == Placement(2, 0)


class Broken:
    """Selects the first candidate until `fails` is set."""

    name = "broken"

    def __init__(self) -> None:
        self.fails = False

    def select(
        self, query: Query, candidates: Sequence[Candidate], view: View, rng: Random
    ) -> Selection:
        if self.fails:
            raise ZeroDivisionError("the worker is not at fault")
        return Selection(candidates[0], "first")


def test_a_selector_that_fails_on_a_queued_request_fails_that_request_only() -> None:
    selector = Broken()
    bed = Bed(selector=selector)
    placed(bed.admit("a"))
    queued(bed.admit("b"))
    bed.free("a")
    selector.fails = True
    assert bed.serve() == ["b"]
    error = bed.outcomes["b"]
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert (bed.waiting, len(bed.router.load_tracker)) == (0, 0)


@pytest.mark.parametrize("jump", [float("inf"), float("nan")])
def test_a_jump_that_is_not_finite_is_rejected(jump: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Bed().admit("a", priority_jump=jump)
    assert caught.value.field == "query.routing.priority_jump"


def test_a_booked_key_gets_its_decision_though_others_are_queued() -> None:
    bed = Bed()
    first = placed(bed.admit("a"))
    queued(bed.admit("b"))
    assert placed(bed.admit("a")) == first
    assert (bed.waiting, len(bed.router.load_tracker)) == (1, 1)


def test_an_override_without_prefill_tracking_makes_no_worker_busy() -> None:
    bed = Bed()
    untracked = RouterConfigOverride(track_prefill_tokens=False)
    for number in range(3):
        placed(bed.submit(f"r{number}", Query("m", 5000, config_override=untracked)))
    assert bed.load().prefill_tokens == 0


# Properties.

_REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # strict priority
        st.floats(0, 5),  # seconds since arrival
        st.sampled_from([None, 0.0, 1.5, -1.0]),  # jump
        st.integers(1, 500),  # tokens
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(requests=_REQUESTS, policy=st.sampled_from(["fcfs", "wspt", "lcfs"]))
def test_a_constraint_class_is_served_like_a_sorted_list(
    requests: list[tuple[int, float, float | None, int]], policy: QueuePolicy
) -> None:
    enqueued, expected = [], []
    for number, (level, waited, jump, tokens) in enumerate(requests):
        hints = RoutingHints(priority_jump=jump)
        query = Query(
            "m", tokens, routing=hints, waited_ms=round(waited * 1000), strict_priority=level
        )
        enqueued.append((str(number), float(number), query))
        gain, arrival = max(0.0, jump or 0.0), 100.0 + number - waited
        value = {"fcfs": gain - arrival, "lcfs": gain + arrival, "wspt": (1 + gain) / tokens}
        expected.append((-level, -value[policy], number))
    assert drained(policy, enqueued) == [str(number) for *_, number in sorted(expected)]


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "free", "done", "serve", "withdraw", "fleet"]), st.integers(0, 9)
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(steps=_STEPS, seed=st.integers(0, 99))
@example(steps=[("submit", 8), ("submit", 2), ("submit", 2), ("free", 0), ("submit", 4)], seed=0)
def test_after_any_events_each_request_gets_one_result_and_loads_return_to_zero(
    steps: list[tuple[str, int]], seed: int
) -> None:
    rng = Random(seed)
    workers = [worker(at) for at in (1, 2, 3)]
    bed = Bed(*workers)
    submitted: dict[str, int | None] = {}
    running: set[str] = set()
    gone: set[str] = set()
    here = list(workers)

    def serve() -> None:
        for name in bed.serve():
            assert name in submitted.keys() - running - gone, "two results, or one after withdrawal"
            (running if isinstance(bed.outcomes[name], DecisionRecord) else gone).add(name)
        free_workers = [w.id for w in here if bed.load(w.id).prefill_tokens <= BATCH]
        for name in submitted.keys() - running - gone:
            pin = submitted[name]
            assert not free_workers if pin is None else pin not in free_workers, (
                f"{name} waits though a worker has capacity"
            )

    for number, (step, arg) in enumerate(steps):
        bed.now += 0.01
        name = f"r{number}"
        if step == "submit":
            pin = arg if arg in (1, 2) else None
            submitted[name] = pin
            try:
                answer = bed.admit(name, 200 * (arg + 1), backend_instance_id=pin)
            except MeshError:
                gone.add(name)
            else:
                if isinstance(answer, DecisionRecord):
                    running.add(name)
        elif step in ("free", "done") and running:
            one = rng.choice(sorted(running))
            if step == "free":
                bed.free(one)
                running.discard(one)
                gone.add(one)
            else:
                bed.router.load_tracker.mark_prefill_done(key(one))
        elif step == "withdraw" and submitted.keys() - running - gone:
            one = rng.choice(sorted(submitted.keys() - running - gone))
            assert bed.router.queue.withdraw(key(one)) is not None
            gone.add(one)
        elif step == "fleet":
            here = [w for w in workers if w.id != arg]
            bed.see(*here)
        if step == "serve" or arg % 3:  # Else the next step precedes the rescan.
            serve()
    serve()
    assert bed.waiting == len(submitted.keys() - running - gone)
    bed.see(*workers)
    while submitted.keys() - gone:
        for one in sorted(running):
            bed.free(one)
        gone |= running
        running.clear()
        serve()
    assert (bed.waiting, bed.router.queue.tokens, len(bed.router.load_tracker)) == (0, 0, 0)
    assert all(bed.load(at) == LoadTotals() for at in (1, 2, 3))


# Several constraint classes.

PARTICULAR: dict[str, RoutingHints] = {
    "a session without a placement": RoutingHints(session_control=SessionControl("s1")),
    "an allow-list of all workers": RoutingHints(allowed_worker_ids=frozenset({1, 2})),
    "a pin": RoutingHints(backend_instance_id=1),
}


@pytest.mark.parametrize("hints", PARTICULAR.values(), ids=PARTICULAR)
def test_a_new_request_does_not_take_capacity_that_was_freed_for_a_queued_one(
    hints: RoutingHints,
) -> None:
    bed = Bed()
    placed(bed.admit("first"))
    queued(bed.admit("waits"))
    bed.router.load_tracker.mark_prefill_done(key("first"))  # No rescan follows yet.
    queued(bed.submit("new", Query("m", 2 * BATCH, routing=hints)))
    assert bed.serve() == ["waits"]
    bed.router.load_tracker.mark_prefill_done(key("waits"))
    assert bed.serve() == ["new"]


def test_a_new_worker_serves_a_queued_request_before_a_new_one() -> None:
    bed = Bed()
    placed(bed.admit("first"))
    queued(bed.admit("waits"))
    bed.see(worker(1), worker(2))
    queued(bed.admit("new", allowed_worker_ids=frozenset({1, 2})))
    assert bed.serve() == ["waits"]
    assert placed(bed.outcomes["waits"]).decision.worker == Placement(2, 0)


def test_constraint_classes_are_served_by_arrival_so_that_none_starves() -> None:
    bed = Bed()
    placed(bed.admit("fills"))
    requests = []
    for number in range(3):
        for name, hints in (("any", {}), ("pinned", {"backend_instance_id": 1})):
            bed.now += 0.01
            requests.append(f"{name} {number}")
            queued(bed.admit(requests[-1], **hints))
    names = ["fills"]
    while bed.waiting:
        bed.free(names[-1])
        names += bed.serve()
    assert names[1:] == requests


def test_a_rescan_that_is_stopped_early_continues_with_the_other_classes() -> None:
    bed = Bed()
    placed(bed.admit("fills"))
    for number in range(25):
        queued(bed.admit(f"r{number}", allowed_worker_ids=frozenset({1, 100 + number})))
    bed.router.queue.mark_all_dirty()
    tried: list[str] = []
    for _ in range(3):
        bed.router.load_tracker.report(1, 0, Load(), bed.now)  # Marks all classes dirty again.
        part = list(islice(bed.router.rescan(bed.now, Random(0)), 10))
        assert all(outcome is None for _, outcome in part)
        tried += [one.key.request_id for one, _ in part]
    assert tried[:25] == [f"r{number}" for number in range(25)]


def test_a_class_is_served_while_it_has_capacity_though_many_others_wait_in_vain() -> None:
    bed = Bed(worker(1), worker(2))
    placed(bed.admit("fills 1", backend_instance_id=1))
    placed(bed.admit("fills 2", backend_instance_id=2))
    for number in range(25):
        queued(bed.admit(f"r{number}", allowed_worker_ids=frozenset({1, 100 + number})))
    for number in range(20):
        queued(bed.admit(f"any {number}", 10))
    bed.free("fills 2")
    left: list[str] = []
    for _ in range(5):
        bed.router.load_tracker.report(1, 0, Load(), bed.now)  # Marks all classes dirty again.
        part = islice(bed.router.rescan(bed.now, Random(0)), 10)
        left += [one.key.request_id for one, outcome in part if outcome is not None]
    assert left == [f"any {number}" for number in range(20)]


def test_a_class_that_was_tried_in_vain_is_not_tried_again_without_an_event() -> None:
    selector = Counting()
    bed = Bed(selector=selector)
    placed(bed.admit("fills"))
    queued(bed.admit("waits"))
    selector.calls = 0
    bed.free("fills")
    assert (bed.serve(), selector.calls) == (["waits"], 1)
    queued(bed.admit("next"))
    selector.calls = 0
    assert (bed.serve(), bed.serve(), selector.calls) == ([], [], 0)


# Tenants.


def shares(weights: Mapping[str, float], sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Tokens admitted by tenant, while the requests of one worker end one by one. The tenants send
    one after the other, each 60 requests."""
    bed = Bed()
    placed(bed.admit("first"))
    for tenant, weight in weights.items():
        for number in range(60):
            query = Query("m", sizes[tenant], tenant=tenant, tenant_weight=weight)
            queued(bed.submit(f"{tenant} {number}", query))
    admitted, running = dict.fromkeys(weights, 0), "first"
    for _ in range(count):
        bed.free(running)
        (running,) = bed.serve()
        admitted[running.split()[0]] += sizes[running.split()[0]]
    return admitted


@pytest.mark.parametrize(
    ("weights", "sizes", "shared"),
    [
        ({"a": 1, "b": 1}, {"a": 2000, "b": 2000}, {"a": 0.5, "b": 0.5}),
        ({"a": 1, "b": 1}, {"a": 1500, "b": 6000}, {"a": 0.5, "b": 0.5}),
        ({"a": 3, "b": 1}, {"a": 2000, "b": 2000}, {"a": 0.75, "b": 0.25}),
        ({"a": 1, "b": 1, "c": 2}, dict.fromkeys("abc", 2000), {"a": 0.25, "b": 0.25, "c": 0.5}),
    ],
)
def test_waiting_tenants_share_the_prompt_tokens_by_weight(
    weights: dict[str, float], sizes: dict[str, int], shared: dict[str, float]
) -> None:
    admitted = shares(weights, sizes, 60)
    total = sum(admitted.values())
    for tenant, share in shared.items():
        assert admitted[tenant] / total == pytest.approx(share, abs=0.06)


def test_a_tenant_that_comes_later_gets_its_share_and_no_more() -> None:
    bed = Bed()
    placed(bed.admit("first"))
    running, order = "first", []
    for number in range(40):
        queued(bed.submit(f"a {number}", Query("m", 2000, tenant="a")))
    for number in range(60):
        if number == 20:
            for late in range(40):
                queued(bed.submit(f"b {late}", Query("m", 2000, tenant="b")))
        bed.free(running)
        (running,) = bed.serve()
        order.append(running[0])
    assert order[:20] == ["a"] * 20
    assert order[20:60].count("b") == 20


def test_a_level_is_strict_across_tenants() -> None:
    bed = Bed()
    placed(bed.admit("first"))
    for number in range(3):
        queued(bed.submit(f"a {number}", Query("m", 2000, tenant="a", strict_priority=1)))
        queued(bed.submit(f"b {number}", Query("m", 2000, tenant="b")))
    running, order = "first", []
    for _ in range(6):
        bed.free(running)
        (running,) = bed.serve()
        order.append(running[0])
    assert order == ["a", "a", "a", "b", "b", "b"]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_above_zero_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Bed().submit("a", Query("m", 1, tenant_weight=weight))
    assert refused.value.field == "query.tenant_weight"


def test_the_age_of_the_queue_is_that_of_its_oldest_request() -> None:
    bed = Bed()
    queue = bed.router.queue
    bed.admit("runs")
    assert queue.oldest_wait_s(bed.now) == 0
    for name in ("first", "second"):
        queued(bed.admit(name))
        bed.now += 2
    assert queue.oldest_wait_s(bed.now) == 4
    queue.withdraw(key("first"))
    assert queue.oldest_wait_s(bed.now) == 2
