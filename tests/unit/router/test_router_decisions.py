"""When those who wait at a router are looked through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.errors import Conflict, InternalError, InvalidRequest, MeshError, Overloaded
from common.kv.load import Load
from common.registry.instances import Instance, Snapshot
from kvmesh.router.v1 import router_pb2
from router_svc.core.admission import QueuedRequest, QueueSettings
from router_svc.core.load_tracker import ORPHAN_S
from router_svc.core.placement import SELECTOR_FAILED
from router_svc.core.policy import Policy
from router_svc.core.rank_load import REPORT_MAX_AGE_S
from router_svc.core.router import Decision, Router
from router_svc.core.selectors import SELECTORS, LeastLoadedSelector, Selection, WorkerSelector
from router_svc.core.sessions import SessionPlacement, SessionRecord, SessionUpdate
from router_svc.core.types import BookingKey, Placement, SessionHello, SessionName
from router_svc.decisions import LOOP_TIME_DIVISOR, REQUESTS_PER_SLICE, Decisions
from router_svc.hashing import HasherCache
from router_svc.metrics import Metrics
from router_svc.tracing import DecisionSpans

BATCH = 1000
TOO_MUCH = 2 * BATCH


class Turn:
    """A call that is to come."""

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when, self.call, self.is_cancelled = when, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class HandLoop:
    """A loop whose time goes on by one second each time it is asked for; runs nothing by itself."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns: list[Turn] = []
        self.alarms: list[Turn] = []

    def time(self) -> float:
        self.now += 1.0
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Turn:
        self.turns.append(Turn(when, call))
        return self.turns[-1]

    def call_later(self, delay: float, call: Callable[[], None]) -> Turn:
        """What only the passing of time brings about; `when` is the delay."""
        self.alarms.append(Turn(delay, call))
        return self.alarms[-1]

    @property
    def due(self) -> list[float]:
        """When the calls that still are to come will come."""
        return [turn.when for turn in self.turns if not turn.is_cancelled]

    def run(self) -> None:
        """Make the only call that is to come."""
        (turn,) = (turn for turn in self.turns if not turn.is_cancelled)
        self.turns.clear()
        turn.call()


class NoGpu(InvalidRequest):
    kind = "NO_GPU"


class Moody(LeastLoadedSelector):
    """Somebody's selector: raises `mood` while there is one."""

    mood: Exception | None = None

    def select(self, *args: Any) -> Selection:
        if self.mood is not None:
            raise self.mood
        return super().select(*args)


class Desk:
    """Decisions on one worker that is busy above BATCH tokens."""

    def __init__(self, selector: WorkerSelector | None = None, **policy: Any) -> None:
        self.now = 100.0
        self.answers: dict[str, Decision | MeshError] = {}
        self.router = Router(
            selector or SELECTORS["least_loaded"](),
            policy=Policy(queue=QueueSettings(threshold=1.0), **policy),
        )
        self.see(BATCH)
        self.session = self.router.book.open_session(7)
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

    def hear(self, record: SessionRecord) -> None:
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
    ) -> Decision | QueuedRequest:
        message = router_pb2.Query(model="m", total_tokens=tokens)
        if constraint_class:
            message.excluded_worker_ids.append(1000 + constraint_class)
        if session_id:
            message.routing.session_control.session_id = session_id
        if pin:
            message.routing.backend_instance_id = pin
        key = BookingKey(7 if session is None else 8, name, 0)
        session = self.session if session is None else session

        def answer(outcome: Decision | MeshError) -> None:
            self.answers[name] = outcome

        return self.decisions.submit(message, key, session, "", answer)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> HandLoop:
    loop = HandLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.mark.parametrize("is_expired_first", [False, True], ids=["by the turn", "just before it"])
def test_an_orphan_that_is_freed_lets_in_the_next_and_leaves_no_turn_over(
    loop: HandLoop, is_expired_first: bool
) -> None:
    desk = Desk()
    lost = desk.router.book.open_session(8)
    desk.submit("lost", lost)
    for name in ("first", "second"):
        assert isinstance(desk.submit(name), QueuedRequest)
    desk.router.book.end_session(lost, desk.now)
    desk.now += ORPHAN_S
    if is_expired_first:
        desk.router.expire(desk.now)
        assert len(loop.due) == 1
    desk.decisions.serve_queue()
    assert list(desk.answers) == ["first"]
    assert loop.due == []


@pytest.mark.parametrize(
    "mood",
    [NoGpu("no gpu"), MeshError("of no class"), Overloaded(reason="QUEUE_FULL"), KeyError("?")],
    ids=["of its own kind", "of no class", "full without saying of what", "no error of ours"],
)
def test_who_fails_when_its_turn_comes_is_answered_and_the_router_goes_on(
    loop: HandLoop, mood: Exception
) -> None:
    selector = Moody()
    desk = Desk(selector)
    desk.submit("first")
    assert isinstance(desk.submit("a"), QueuedRequest)
    desk.router.book.free(BookingKey(7, "first", 0))
    selector.mood = mood
    desk.decisions.serve_queue()
    selector.mood = None
    answer = desk.answers["a"]
    assert answer is mood or isinstance(answer, InternalError)
    assert isinstance(desk.submit("next"), Decision)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "when its turn comes"])
def test_what_a_selector_raises_is_logged_once_with_where_it_did_so(
    loop: HandLoop, waits: bool
) -> None:
    selector, mood = Moody(), KeyError("gpus")
    desk = Desk(selector)
    desk.submit("first")
    assert not waits or isinstance(desk.submit("a"), QueuedRequest)
    desk.router.book.free(BookingKey(7, "first", 0))
    selector.mood = mood
    with capture_logs() as lines:
        if waits:
            loop.run()
            answer = desk.answers["a"]
        else:
            with pytest.raises(InternalError) as raised:
                desk.submit("a")
            answer = raised.value
    assert isinstance(answer, InternalError)
    assert (answer.reason, answer.retryable) == (SELECTOR_FAILED, True)
    (line,) = lines
    assert line["exc_info"] is mood
    assert mood.__traceback__ is not None
    assert line["reason"] == "the selector 'least_loaded' failed: it raised KeyError"
    counted = {"selector": selector.name, "outcome": "bug"}
    assert desk.metrics.registry.get_sample_value("kvmesh_router_decisions_total", counted) == 1


@pytest.mark.parametrize(
    ("mood", "sample", "labels"),
    [
        (NoGpu("no gpu"), "decisions", {"outcome": "other"}),
        (MeshError("of no class"), "decisions", {"outcome": "other"}),
        (Overloaded(reason="QUEUE_FULL"), "queue_full", {"limit": "other"}),
        (
            Overloaded(reason="QUEUE_FULL", metadata={"limit_kind": "mine"}),
            "queue_full",
            {"limit": "other"},
        ),
    ],
)
def test_errors_that_nobody_knows_are_counted_as_others(
    loop: HandLoop, mood: MeshError, sample: str, labels: dict[str, str]
) -> None:
    selector = Moody()
    desk = Desk(selector)
    selector.mood = mood
    with pytest.raises(type(mood)):
        desk.submit("a")
    if sample == "decisions":
        labels = {"selector": selector.name, **labels}
    name = f"kvmesh_router_{sample}_total"
    assert desk.metrics.registry.get_sample_value(name, labels) == 1


@pytest.mark.parametrize("mood", [None, NoGpu("no gpu")], ids=["placed", "refused"])
def test_who_waited_is_answered_also_when_the_answer_cannot_be_measured(
    loop: HandLoop, monkeypatch: pytest.MonkeyPatch, mood: Exception | None
) -> None:
    def fail(*args: object) -> None:
        raise KeyError("a mistake of ours")

    selector = Moody()
    desk = Desk(selector)
    desk.submit("first")
    assert isinstance(desk.submit("a"), QueuedRequest)
    monkeypatch.setattr(Metrics, "decided", fail)
    desk.router.book.free(BookingKey(7, "first", 0))
    selector.mood = mood
    desk.decisions.serve_queue()
    assert isinstance(desk.answers["a"], Decision if mood is None else NoGpu)


def test_who_must_wait_on_is_looked_at_in_slices_and_a_relief_meanwhile_is_not_lost(
    loop: HandLoop,
) -> None:
    desk = Desk()
    desk.submit("a")
    for number in range(REQUESTS_PER_SLICE + 1):
        assert isinstance(desk.submit(f"r{number}", constraint_class=number + 1), QueuedRequest)
    desk.see(BATCH + 1)
    loop.run()
    assert desk.answers == {}
    assert loop.due == [loop.now + LOOP_TIME_DIVISOR - 1], "one lane is left"
    desk.router.book.free(BookingKey(7, "a", 0))
    loop.run()
    assert list(desk.answers) == ["r0"], "the best of all, not the one that the sweep had left"
    assert loop.due == [], "and the sweep has looked at that one"
    desk.router.book.free(BookingKey(7, "r0", 0))
    loop.run()
    assert list(desk.answers) == ["r0", "r1"]
    assert loop.due == []


def test_a_relief_that_helps_nobody_wakes_nobody(loop: HandLoop) -> None:
    desk = Desk()
    desk.submit("a")
    desk.submit("b")
    desk.router.book.report(2, 0, Load(), desk.now)
    assert loop.due == [], "nobody waits for that worker"
    desk.router.book.report(1, 0, Load(), desk.now)
    assert len(loop.due) == 1
    loop.run()
    assert (desk.answers, loop.due) == ({}, [])


def test_a_report_that_grows_old_is_noticed_when_it_does_not_at_the_next_tick(
    loop: HandLoop,
) -> None:
    desk = Desk()
    desk.router.book.report(1, 0, Load(waiting=1, waiting_tokens=TOO_MUCH), desk.now)
    assert isinstance(desk.submit("a"), QueuedRequest)
    (alarm,) = loop.alarms
    assert alarm.when == pytest.approx(REPORT_MAX_AGE_S)
    desk.now += REPORT_MAX_AGE_S + 0.001
    alarm.call()
    assert list(desk.answers) == ["a"]


def test_an_alarm_that_rings_too_early_is_set_again(loop: HandLoop) -> None:
    desk = Desk()
    busy = Load(waiting=1, waiting_tokens=TOO_MUCH)
    desk.router.book.report(1, 0, busy, desk.now)
    desk.submit("a")
    desk.now += 0.1
    desk.router.book.report(1, 0, busy, desk.now)
    loop.run()
    desk.now += REPORT_MAX_AGE_S - 0.1
    (alarm,) = loop.alarms
    alarm.call()
    assert desk.answers == {}
    (_, again) = loop.alarms
    assert again.when == pytest.approx(0.1)


def test_the_longest_wait_ends_by_itself(loop: HandLoop) -> None:
    desk = Desk()
    desk.submit("a")
    desk.submit("b")
    wait_s = desk.router.queue.policy.wait_max_s
    (alarm,) = loop.alarms
    assert alarm.when == wait_s
    desk.now += wait_s
    alarm.call()
    assert isinstance(desk.answers["b"], Overloaded)


def test_a_sweep_in_slices_ends_where_nothing_was_relieved(loop: HandLoop) -> None:
    desk = Desk()
    desk.submit("a")
    for number in range(REQUESTS_PER_SLICE + 1):
        desk.submit(f"r{number}", constraint_class=number + 1)
    desk.see(BATCH + 1)
    loop.run()
    loop.run()
    assert (desk.answers, loop.due) == ({}, [])


def test_reliefs_do_not_keep_a_sweep_from_those_who_hold_others_up(loop: HandLoop) -> None:
    """A slice full of heads that might overtake one not seen yet spent all of it, for ever."""
    desk = Desk()
    workers = {
        id: Instance(id, "mesh", "worker", "", "127.0.0.1:1", model=m, max_num_batched_tokens=BATCH)
        for id, m in ((1, "m"), (2, "m"), (3, "other"))
    }
    here = {id: workers[id] for id in (1, 2)}
    desk.router.update(Snapshot(2, here), desk.now)
    for name in ("a", "b"):
        assert isinstance(desk.submit(name), Decision)
    pinned = router_pb2.Query(model="m", total_tokens=TOO_MUCH)
    pinned.routing.backend_instance_id = 2
    for number in range(2):
        key = BookingKey(7, f"pinned{number}", 0)
        waits = desk.decisions.submit(pinned, key, desk.session, "", lambda outcome: None)
        assert isinstance(waits, QueuedRequest)
    for number in range(2 * REQUESTS_PER_SLICE):
        assert isinstance(desk.submit(f"r{number}", constraint_class=number + 1), QueuedRequest)
    desk.router.update(Snapshot(3, workers), desk.now)
    booked = {b.key.request_id: b.worker.worker_id for b in desk.router.book}
    (free,) = (name for name, worker_id in booked.items() if worker_id == 1)
    desk.router.book.free(BookingKey(7, free, 0))
    for _ in range(6):
        if loop.due:
            loop.run()
    assert list(desk.answers) == ["r0"]


S = SessionName("m", "s")
LATER = 2**50  # Than any revision by the time of day.


@pytest.mark.parametrize(
    "move",
    [
        lambda desk: desk.submit("c", session_id="s", pin=2, tokens=1),
        lambda desk: desk.hear(
            SessionRecord(S, SessionPlacement(Placement(2, 0)), LATER, BookingKey(9, "c", 0))
        ),
        lambda desk: desk.hear(SessionRecord(S, None, LATER, BookingKey(9, "c", 0))),
    ],
    ids=["by another request", "by another router", "closed by another router"],
)
def test_who_waits_where_its_session_was_bound_before_is_let_in_without_a_tick(
    loop: HandLoop, move: Callable[[Desk], object]
) -> None:
    desk = Desk()
    desk.see(BATCH, 1, 2)
    assert isinstance(desk.submit("a", session_id="s", pin=1), Decision)
    for number in range(REQUESTS_PER_SLICE + 1):
        assert isinstance(desk.submit(f"b{number}", session_id="s", tokens=1), QueuedRequest)
    assert loop.due == []
    move(desk)
    for _ in range(2):
        loop.run()
    workers = [a.worker.worker_id for a in desk.answers.values() if isinstance(a, Decision)]
    assert workers == [2] * (REQUESTS_PER_SLICE + 1)
    assert loop.due == []


def test_sessions_that_move_all_the_time_do_not_keep_a_relief_from_the_others(
    loop: HandLoop,
) -> None:
    desk = Desk()
    desk.see(BATCH, 1, 2, 3)
    assert isinstance(desk.submit("a", session_id="s", pin=2, tokens=1), Decision)
    for at in (2, 3):
        assert isinstance(desk.submit(f"fills {at}", pin=at), Decision)
    for number in range(REQUESTS_PER_SLICE + 1):
        assert isinstance(desk.submit(f"b{number}", session_id="s", tokens=1), QueuedRequest)
    assert isinstance(desk.submit("first", pin=1), Decision)
    assert isinstance(desk.submit("pinned", pin=1), QueuedRequest)
    desk.router.book.free(BookingKey(7, "first", 0))
    for turn in range(2):
        record = SessionRecord(
            S, SessionPlacement(Placement(3 - turn, 0)), LATER + turn, BookingKey(9, "c", 0)
        )
        desk.hear(record)
        loop.run()
    assert list(desk.answers) == ["pinned"]


def test_a_session_that_is_forgotten_while_somebody_waits_for_its_worker_binds_it_no_more(
    loop: HandLoop,
) -> None:
    desk = Desk(session_ttl_s=5.0)
    desk.see(BATCH, 1, 2)
    assert isinstance(desk.submit("a", session_id="s", pin=1, tokens=1), Decision)
    assert isinstance(desk.submit("fills", pin=1), Decision)
    assert isinstance(desk.submit("b", session_id="s"), QueuedRequest)
    desk.router.book.free(BookingKey(7, "a", 0))
    desk.router.expire(desk.now)
    loop.run()
    assert (desk.answers, loop.due) == ({}, [])
    desk.now += 5.0
    desk.router.expire(desk.now)
    loop.run()
    answer = desk.answers["b"]
    assert isinstance(answer, Decision)
    assert (answer.worker.worker_id, answer.affinity) == (2, "bound")


def test_what_a_superseded_session_asked_waits_no_more_and_what_it_asks_is_refused(
    loop: HandLoop,
) -> None:
    desk = Desk()
    desk.submit("a")
    book = desk.router.book
    desk.session = book.open_session(8, generation=1)
    assert isinstance(desk.submit("old", desk.session), QueuedRequest)
    book.supersede_sessions(SessionHello(8, 2), desk.now)
    assert len(desk.router.queue) == 0
    with pytest.raises(Conflict) as refused:
        desk.submit("late", desk.session)
    assert refused.value.reason == "SUPERSEDED"
    assert desk.answers == {}, "nobody listens there"
    book.end_session(desk.session, desk.now)
