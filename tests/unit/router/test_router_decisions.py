"""When the router rescans its admission queue, and the effect of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.errors import Conflict, InternalError, InvalidRequest, MeshError, Overloaded
from common.kv.load import LOAD_MAX_AGE_S, Load
from common.registry.instances import Instance, Snapshot
from common.request.placement import Placement
from kvmesh.router.v1 import router_pb2
from router_svc.core.admission import QueuedRequest, QueueSettings
from router_svc.core.booking import BookingKey, SessionHello, SessionName
from router_svc.core.decision import DecisionRecord
from router_svc.core.load_tracker import ORPHAN_S
from router_svc.core.placement import SELECTOR_FAILED
from router_svc.core.policy import Policy
from router_svc.core.router import Router
from router_svc.core.selectors import SELECTORS, LeastLoadedSelector, Selection, WorkerSelector
from router_svc.core.sessions import SessionPlacement, SessionRecord, SessionUpdate
from router_svc.decisions import LOOP_TIME_DIVISOR, REQUESTS_PER_SLICE, Decisions
from router_svc.hashing import HasherCache
from router_svc.metrics import Metrics
from router_svc.tracing import DecisionSpans

BATCH = 1000
TOO_MUCH = 2 * BATCH


class ScheduledCall:
    """A handle of `call_at`."""

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when, self.call, self.is_cancelled = when, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandLoop:
    """A loop with a clock that advances by one second per reading; it runs calls in `run` only."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.calls: list[ScheduledCall] = []

    def time(self) -> float:
        self.now += 1.0
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> ScheduledCall:
        self.calls.append(ScheduledCall(when, call))
        return self.calls[-1]

    @property
    def due(self) -> list[float]:
        """Times of the scheduled calls."""
        return [call.when for call in self.calls if not call.is_cancelled]

    def run(self) -> None:
        """Run the only scheduled call."""
        (call,) = (call for call in self.calls if not call.is_cancelled)
        self.calls.clear()
        call.call()


class NoGpu(InvalidRequest):
    kind = "NO_GPU"


class FailingSelector(LeastLoadedSelector):
    """Raises `error` if set."""

    error: Exception | None = None

    def select(self, *args: Any) -> Selection:
        if self.error is not None:
            raise self.error
        return super().select(*args)


class Bed:
    """Decisions on one worker that is prefill-busy above BATCH tokens."""

    def __init__(self, selector: WorkerSelector | None = None, **policy: Any) -> None:
        self.now = 100.0
        self.outcomes: dict[str, DecisionRecord | MeshError] = {}
        self.router = Router(
            selector or SELECTORS["least_loaded"](),
            policy=Policy(queue=QueueSettings(threshold=1.0), **policy),
        )
        self.see(BATCH)
        self.session = self.router.load_tracker.open_session(7)
        self.metrics = Metrics(self.router, clock=lambda: self.now)
        self.decisions = Decisions(
            self.router,
            self.metrics,
            rng=Random(0),
            hasher_cache=HasherCache(b""),
            spans=DecisionSpans(),
            clock=lambda: self.now,
        )

    def see(self, batch: int, *ids: int) -> None:
        workers = {
            id: Instance(
                id, "mesh", "worker", "", "127.0.0.1:1", model="m", max_num_batched_tokens=batch
            )
            for id in ids or (1,)
        }
        self.router.update(Snapshot(1, workers), self.now)

    def receive(self, record: SessionRecord) -> None:
        self.router.affinity.receive(SessionUpdate(record, 0.0), self.now)

    def submit(
        self,
        name: str,
        session: int | None = None,
        constraint_class: int = 0,
        *,
        session_id: str = "",
        pin: int = 0,
        tokens: int = TOO_MUCH,
    ) -> DecisionRecord | QueuedRequest:
        message = router_pb2.Query(model="m", total_tokens=tokens)
        if constraint_class:
            message.excluded_worker_ids.append(1000 + constraint_class)
        if session_id:
            message.routing.session_control.session_id = session_id
        if pin:
            message.routing.backend_instance_id = pin
        key = BookingKey(7 if session is None else 8, name, 0)
        session = self.session if session is None else session

        def deliver(outcome: DecisionRecord | MeshError) -> None:
            self.outcomes[name] = outcome

        return self.decisions.submit(message, key, session, "", deliver)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> HandLoop:
    loop = HandLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.mark.parametrize("is_expired_first", [False, True], ids=["by the rescan", "just before it"])
def test_an_orphan_that_is_freed_admits_the_next_request_and_no_rescan_stays_due(
    loop: HandLoop, is_expired_first: bool
) -> None:
    bed = Bed()
    lost = bed.router.load_tracker.open_session(8)
    bed.submit("lost", lost)
    for name in ("first", "second"):
        assert isinstance(bed.submit(name), QueuedRequest)
    bed.router.load_tracker.end_session(lost, bed.now)
    bed.now += ORPHAN_S
    if is_expired_first:
        bed.router.expire(bed.now)
        assert len(loop.due) == 1
    bed.decisions.serve_queue()
    assert list(bed.outcomes) == ["first"]
    assert loop.due == []


@pytest.mark.parametrize(
    "error",
    [NoGpu("no gpu"), MeshError("of no kind"), Overloaded(reason="QUEUE_FULL"), KeyError("?")],
    ids=["of its own kind", "of no kind", "full without a limit", "a foreign exception"],
)
def test_a_queued_request_that_fails_gets_an_error_and_the_router_continues(
    loop: HandLoop, error: Exception
) -> None:
    selector = FailingSelector()
    bed = Bed(selector)
    bed.submit("first")
    assert isinstance(bed.submit("a"), QueuedRequest)
    bed.router.load_tracker.free(BookingKey(7, "first", 0))
    selector.error = error
    bed.decisions.serve_queue()
    selector.error = None
    answer = bed.outcomes["a"]
    assert answer is error or isinstance(answer, InternalError)
    assert isinstance(bed.submit("next"), DecisionRecord)


@pytest.mark.parametrize("is_queued", [False, True], ids=["at once", "from the queue"])
def test_an_exception_of_a_selector_is_logged_once_with_its_traceback(
    loop: HandLoop, is_queued: bool
) -> None:
    selector, error = FailingSelector(), KeyError("gpus")
    bed = Bed(selector)
    bed.submit("first")
    assert not is_queued or isinstance(bed.submit("a"), QueuedRequest)
    bed.router.load_tracker.free(BookingKey(7, "first", 0))
    selector.error = error
    with capture_logs() as lines:
        if is_queued:
            loop.run()
            answer = bed.outcomes["a"]
        else:
            with pytest.raises(InternalError) as raised:
                bed.submit("a")
            answer = raised.value
    assert isinstance(answer, InternalError)
    assert (answer.reason, answer.retryable) == (SELECTOR_FAILED, True)
    (line,) = lines
    assert line["exc_info"] is error
    assert error.__traceback__ is not None
    assert line["reason"] == "the selector 'least_loaded' failed: it raised KeyError"
    counted = {"selector": selector.name, "outcome": "bug"}
    assert bed.metrics.registry.get_sample_value("kvmesh_router_decisions_total", counted) == 1


@pytest.mark.parametrize(
    ("error", "sample", "labels"),
    [
        (NoGpu("no gpu"), "decisions", {"outcome": "other"}),
        (MeshError("of no kind"), "decisions", {"outcome": "other"}),
        (Overloaded(reason="QUEUE_FULL"), "queue_full", {"limit": "other"}),
        (
            Overloaded(reason="QUEUE_FULL", metadata={"limit_kind": "mine"}),
            "queue_full",
            {"limit": "other"},
        ),
    ],
)
def test_unknown_errors_are_counted_as_other(
    loop: HandLoop, error: MeshError, sample: str, labels: dict[str, str]
) -> None:
    selector = FailingSelector()
    bed = Bed(selector)
    selector.error = error
    with pytest.raises(type(error)):
        bed.submit("a")
    if sample == "decisions":
        labels = {"selector": selector.name, **labels}
    name = f"kvmesh_router_{sample}_total"
    assert bed.metrics.registry.get_sample_value(name, labels) == 1


@pytest.mark.parametrize("error", [None, NoGpu("no gpu")], ids=["placed", "refused"])
def test_a_queued_request_gets_its_result_even_if_measuring_fails(
    loop: HandLoop, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def fail(*args: object) -> None:
        raise KeyError("a bug")

    selector = FailingSelector()
    bed = Bed(selector)
    bed.submit("first")
    assert isinstance(bed.submit("a"), QueuedRequest)
    monkeypatch.setattr(Metrics, "decided", fail)
    bed.router.load_tracker.free(BookingKey(7, "first", 0))
    selector.error = error
    bed.decisions.serve_queue()
    assert isinstance(bed.outcomes["a"], DecisionRecord if error is None else NoGpu)


def test_capacity_freed_at_an_unknown_worker_triggers_no_rescan(loop: HandLoop) -> None:
    bed = Bed()
    bed.submit("a")
    bed.submit("b")
    bed.router.load_tracker.report(2, 0, Load(), bed.now)
    assert loop.due == [], "no request waits for that worker"
    bed.router.load_tracker.report(1, 0, Load(), bed.now)
    assert len(loop.due) == 1
    loop.run()
    assert (bed.outcomes, loop.due) == ({}, [])


def test_the_periodic_rescan_admits_requests_after_a_load_report_expired(loop: HandLoop) -> None:
    bed = Bed()
    bed.router.load_tracker.report(1, 0, Load(waiting=1, waiting_tokens=TOO_MUCH), bed.now)
    assert isinstance(bed.submit("a"), QueuedRequest)
    bed.now += LOAD_MAX_AGE_S + 0.001
    bed.decisions.serve_queue()
    assert list(bed.outcomes) == ["a"]


def test_the_periodic_rescan_rejects_overdue_requests(loop: HandLoop) -> None:
    bed = Bed()
    bed.submit("a")
    bed.submit("b")
    bed.now += bed.router.queue.settings.wait_max_s
    bed.decisions.serve_queue()
    assert isinstance(bed.outcomes["b"], Overloaded)


def test_a_rescan_is_done_in_slices_that_leave_the_loop_most_of_its_time(loop: HandLoop) -> None:
    bed = Bed()
    bed.submit("a")
    for number in range(REQUESTS_PER_SLICE + 1):
        assert isinstance(bed.submit(f"r{number}", constraint_class=number + 1), QueuedRequest)
    bed.see(BATCH + 1)
    loop.run()
    assert bed.outcomes == {}
    assert loop.due == [loop.now + LOOP_TIME_DIVISOR - 1], "one class is left"
    loop.run()
    assert (bed.outcomes, loop.due) == ({}, [])


def test_capacity_freed_during_a_rescan_is_used_after_it(loop: HandLoop) -> None:
    bed = Bed()
    bed.submit("a")
    for number in range(REQUESTS_PER_SLICE + 1):
        assert isinstance(bed.submit(f"r{number}", constraint_class=number + 1), QueuedRequest)
    bed.see(BATCH + 1)
    loop.run()
    bed.router.load_tracker.free(BookingKey(7, "a", 0))
    loop.run()
    (name,) = bed.outcomes
    bed.router.load_tracker.free(BookingKey(7, name, 0))
    while loop.due:
        loop.run()
    assert len(bed.outcomes) == 2


def test_reports_all_the_time_do_not_keep_the_rescan_from_the_last_class(loop: HandLoop) -> None:
    bed = Bed()
    bed.see(BATCH, 1, 2)
    for at in (1, 2):
        assert isinstance(bed.submit(f"fills {at}", pin=at), DecisionRecord)
    for number in range(3 * REQUESTS_PER_SLICE):
        assert isinstance(
            bed.submit(f"r{number}", constraint_class=number + 1, pin=1), QueuedRequest
        )
    assert isinstance(bed.submit("last", pin=2), QueuedRequest)
    bed.router.load_tracker.free(BookingKey(7, "fills 2", 0))
    for _ in range(4):
        loop.run()
        bed.router.load_tracker.report(1, 0, Load(), bed.now)
    assert list(bed.outcomes) == ["last"]


S = SessionName("m", "s")
LATER = 2**50  # Larger than any revision from the time of day.


@pytest.mark.parametrize(
    "move",
    [
        lambda bed: bed.submit("c", session_id="s", pin=2, tokens=1),
        lambda bed: bed.receive(
            SessionRecord(S, SessionPlacement(Placement(2, 0)), LATER, BookingKey(9, "c", 0))
        ),
        lambda bed: bed.receive(SessionRecord(S, None, LATER, BookingKey(9, "c", 0))),
    ],
    ids=["by another request", "by another router", "closed by another router"],
)
def test_a_request_of_a_moved_session_is_admitted_without_a_periodic_rescan(
    loop: HandLoop, move: Callable[[Bed], object]
) -> None:
    bed = Bed()
    bed.see(BATCH, 1, 2)
    assert isinstance(bed.submit("a", session_id="s", pin=1), DecisionRecord)
    for number in range(REQUESTS_PER_SLICE + 1):
        assert isinstance(bed.submit(f"b{number}", session_id="s", tokens=1), QueuedRequest)
    assert loop.due == []
    move(bed)
    for _ in range(2):
        loop.run()
    workers = [
        a.decision.worker.worker_id for a in bed.outcomes.values() if isinstance(a, DecisionRecord)
    ]
    assert workers == [2] * (REQUESTS_PER_SLICE + 1)
    assert loop.due == []


def test_sessions_that_move_all_the_time_do_not_delay_other_requests(
    loop: HandLoop,
) -> None:
    bed = Bed()
    bed.see(BATCH, 1, 2, 3)
    assert isinstance(bed.submit("a", session_id="s", pin=2, tokens=1), DecisionRecord)
    for at in (2, 3):
        assert isinstance(bed.submit(f"fills {at}", pin=at), DecisionRecord)
    for number in range(REQUESTS_PER_SLICE + 1):
        assert isinstance(bed.submit(f"b{number}", session_id="s", tokens=1), QueuedRequest)
    assert isinstance(bed.submit("first", pin=1), DecisionRecord)
    assert isinstance(bed.submit("pinned", pin=1), QueuedRequest)
    bed.router.load_tracker.free(BookingKey(7, "first", 0))
    for number in range(2):
        record = SessionRecord(
            S, SessionPlacement(Placement(3 - number, 0)), LATER + number, BookingKey(9, "c", 0)
        )
        bed.receive(record)
        loop.run()
    assert list(bed.outcomes) == ["pinned"]


def test_an_expired_session_no_longer_constrains_its_queued_request(
    loop: HandLoop,
) -> None:
    bed = Bed(session_ttl_s=5.0)
    bed.see(BATCH, 1, 2)
    assert isinstance(bed.submit("a", session_id="s", pin=1, tokens=1), DecisionRecord)
    assert isinstance(bed.submit("fills", pin=1), DecisionRecord)
    assert isinstance(bed.submit("b", session_id="s"), QueuedRequest)
    bed.router.load_tracker.free(BookingKey(7, "a", 0))
    bed.router.expire(bed.now)
    loop.run()
    assert (bed.outcomes, loop.due) == ({}, [])
    bed.now += 5.0
    bed.router.expire(bed.now)
    loop.run()
    answer = bed.outcomes["b"]
    assert isinstance(answer, DecisionRecord)
    assert (answer.decision.worker.worker_id, answer.affinity) == (2, "bound")


def test_requests_of_a_superseded_frontend_session_are_withdrawn_and_new_ones_rejected(
    loop: HandLoop,
) -> None:
    bed = Bed()
    bed.submit("a")
    load_tracker = bed.router.load_tracker
    bed.session = load_tracker.open_session(8, generation=1)
    assert isinstance(bed.submit("old", bed.session), QueuedRequest)
    load_tracker.supersede_sessions(SessionHello(8, 2), bed.now)
    assert len(bed.router.queue) == 0
    with pytest.raises(Conflict) as refused:
        bed.submit("late", bed.session)
    assert refused.value.reason == "SUPERSEDED"
    assert bed.outcomes == {}, "that session receives no results"
    load_tracker.end_session(bed.session, bed.now)
