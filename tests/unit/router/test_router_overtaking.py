"""Nobody takes the room of one who waits and comes first, whatever lanes the two are in."""

from __future__ import annotations

from itertools import islice, product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.load import Load
from common.registry.instances import Instance, Snapshot
from common.request.preprocessed import RoutingHints, SessionControl
from router_svc.core.admission import (
    AdmissionQueue,
    Blockers,
    ConstraintClass,
    QueuedRequest,
    QueueSettings,
)
from router_svc.core.policy import Policy
from router_svc.core.query import Query
from router_svc.core.router import Decision, Router
from router_svc.core.selectors import SELECTORS
from router_svc.core.types import BookingKey, Placement, RankCapacity

BATCH = 1000


def worker(worker_id: int, batch: int = BATCH) -> Instance:
    return Instance(
        worker_id,
        "mesh",
        "worker",
        "",
        "127.0.0.1:1",
        model="m",
        block_size=16,
        max_num_batched_tokens=batch,
    )


def key(name: str) -> BookingKey:
    return BookingKey(7, name, 0)


class Bed:
    """A router whose workers are prefill-busy above one batch. Arrival goes by `now`."""

    def __init__(self, *workers: int) -> None:
        policy = Policy(queue=QueueSettings(threshold=1.0))
        self.router = Router(SELECTORS["least_loaded"](), policy=policy)
        self.now = 100.0
        self.see(*(workers or (1,)))

    def see(self, *workers: int) -> None:
        self.router.update(Snapshot(1, {n: worker(n) for n in workers}), self.now)

    def ask(self, name: str, level: int = 0, **facts: Any) -> Decision | QueuedRequest:
        self.now += 0.001
        query = Query("m", 2 * BATCH, strict_priority=level, **facts)
        return self.router.admit(query, key(name), self.now, Random(0))

    def full(self, worker_id: int) -> bool:
        return self.router.book.load(Placement(worker_id, 0), self.now).prefill_tokens > BATCH

    def serve(self, steps: int | None = None) -> list[tuple[str, Any]]:
        """Let those in whose turn it is, with the outcome; steps: at most so many are looked at."""
        sweep = islice(self.router.rescan(self.now, Random(0)), steps)
        return [(one.key.request_id, outcome) for one, outcome in sweep if outcome is not None]

    def relieve(self, worker_id: int) -> list[tuple[str, Any]]:
        """The same for those who profit from the relief of that worker."""
        looked_at = self.router.capacity_freed(Placement(worker_id, 0), self.now, Random(0))
        return [(one.key.request_id, outcome) for one, outcome in looked_at if outcome is not None]


def names(served: list[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in served]


PARTICULAR: dict[str, dict[str, Any]] = {
    "a session that is bound nowhere": {
        "routing": RoutingHints(session_control=SessionControl("s1"))
    },
    "a worker excluded that is not there": {"excluded_worker_ids": frozenset({77})},
    "an allow-list that names all there are": {
        "routing": RoutingHints(allowed_worker_ids=frozenset({1, 2}))
    },
    "a pin": {"routing": RoutingHints(backend_instance_id=1)},
}


@pytest.mark.parametrize("facts", PARTICULAR.values(), ids=PARTICULAR)
@pytest.mark.parametrize("level", [9, 0], ids=["a higher level", "the same level, earlier"])
def test_a_newcomer_of_another_lane_does_not_take_the_room_of_who_waits(
    level: int, facts: dict[str, Any]
) -> None:
    bed = Bed()
    assert isinstance(bed.ask("first"), Decision)
    assert isinstance(bed.ask("waits", level=level), QueuedRequest)
    bed.router.book.mark_prefill_done(key("first"))  # Room, before anybody looked at the queue.
    assert isinstance(bed.ask("newcomer", **facts), QueuedRequest)
    assert names(bed.serve()) == ["waits"]
    bed.router.book.mark_prefill_done(key("waits"))
    assert names(bed.serve()) == ["newcomer"]


def test_a_newcomer_that_comes_first_by_its_level_takes_the_room() -> None:
    bed = Bed()
    bed.ask("first")
    assert isinstance(bed.ask("waits", level=1), QueuedRequest)
    bed.router.book.mark_prefill_done(key("first"))
    pinned = RoutingHints(backend_instance_id=1)
    assert isinstance(bed.ask("newcomer", level=2, routing=pinned), Decision)


def test_who_is_kept_from_overtaking_is_looked_at_soon() -> None:
    bed = Bed()
    told: list[Placement] = []
    bed.ask("first")
    bed.ask("waits")
    bed.router.book.mark_prefill_done(key("first"))
    bed.router.events.capacity_freed.subscribe(told.append)
    assert isinstance(bed.ask("newcomer", **PARTICULAR["a pin"]), QueuedRequest)
    assert told == [Placement(1, 0)]


@pytest.mark.parametrize("is_late", [False, True], ids=["a newcomer", "one who waits"])
def test_who_makes_way_gets_the_room_that_another_worker_has(is_late: bool) -> None:
    """It was left parked, and whoever came after it behind it."""
    bed = Bed(1, 2)
    told: dict[Placement, None] = {}
    bed.ask("first", routing=RoutingHints(backend_instance_id=1))
    bed.ask("second", routing=RoutingHints(backend_instance_id=2))
    assert isinstance(
        bed.ask("pinned", 1, routing=RoutingHints(backend_instance_id=1)), QueuedRequest
    )
    if is_late:
        assert isinstance(bed.ask("anywhere"), QueuedRequest)
    bed.router.book.report(2, 0, Load(waiting_tokens=300), bed.now)
    bed.router.book.free(key("second"))
    bed.router.book.free(key("first"))
    bed.router.events.capacity_freed.subscribe(told.setdefault)
    if is_late:
        assert bed.relieve(2) == [], "worker 1 has less to do, but another comes first there"
    else:
        assert isinstance(bed.ask("anywhere"), QueuedRequest)
    got = []
    while told:
        at = next(iter(told))
        del told[at]
        got += bed.relieve(at.worker_id)
    assert [(name, outcome.worker.worker_id) for name, outcome in got] == [
        ("pinned", 1),
        ("anywhere", 2),
    ]


def test_room_that_nobody_waits_for_is_free_to_all() -> None:
    bed = Bed(1, 2)
    bed.ask("first", routing=RoutingHints(backend_instance_id=1))
    assert isinstance(
        bed.ask("waits", 9, routing=RoutingHints(backend_instance_id=1)), QueuedRequest
    )
    decision = bed.ask("newcomer")
    assert isinstance(decision, Decision)
    assert decision.worker == Placement(2, 0)


def test_a_new_worker_goes_to_who_waits_and_not_to_a_newcomer() -> None:
    bed = Bed()
    bed.ask("first")
    assert isinstance(bed.ask("waits", level=1), QueuedRequest)
    bed.see(1, 2)
    assert isinstance(
        bed.ask("newcomer", **PARTICULAR["a session that is bound nowhere"]), QueuedRequest
    )
    ((name, outcome),) = bed.serve()
    assert (name, outcome.worker) == ("waits", Placement(2, 0))


def test_room_that_comes_amid_a_sweep_goes_to_the_best_in_the_next() -> None:
    bed = Bed()
    bed.ask("first")
    for number, level in enumerate((3, 2, 1)):
        constraint_class = RoutingHints(allowed_worker_ids=frozenset({1, 100 + number}))
        assert isinstance(bed.ask(f"level {level}", level, routing=constraint_class), QueuedRequest)
    bed.see(1, 2)
    bed.see(1)  # All have to be picked for again.
    assert bed.serve(steps=1) == [], "the best is looked at, in vain"
    bed.router.book.free(key("first"))
    assert bed.serve() == [], "the sweep goes on with the others, whose turn it is not"
    assert names(bed.serve()) == ["level 3"]


def test_claims_go_with_who_has_them() -> None:
    queue = AdmissionQueue(QueueSettings(threshold=1.0))
    at = [RankCapacity(Placement(n, 0), "whole") for n in (1, 2, 3)]
    late = queue.order(Query("m", 10), 99.0)

    def claimed(model: str = "m") -> list[bool]:
        return [queue.overtakes(late, model, one) for one in at]

    queued = queue.enqueue(Query("m", 10), key("a"), 0.0, blockers=Blockers(1, frozenset(at[:2])))
    queue.enqueue(Query("m", 10), key("b"), 0.0, blockers=Blockers(1, frozenset()))
    assert claimed() == [True, True, False]
    queue.mark_all_dirty()
    assert claimed() == [True, True, True]
    assert claimed("another model") == [True, True, False]
    queue.mark_blocked(queued, queued.constraint_class, Blockers(2, frozenset(at[1:2])))
    assert claimed() == [False, True, False]
    queue.withdraw(key("a"))
    assert claimed() == [False, True, False], "one of the lane waits still"
    queue.withdraw(key("b"))
    assert claimed() == [False, False, False]
    assert queue.slots == []


_AT = [RankCapacity(Placement(n, 0), "whole") for n in (1, 2, 3)]
_PLACES = st.sampled_from([frozenset(), frozenset(_AT[:1]), frozenset(_AT[1:]), frozenset(_AT)])


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["park", "park", "park", "leave", "look", "unsee"]),
            st.integers(0, 11),
            _PLACES,
        ),
        max_size=40,
    )
)
def test_what_is_claimed_is_what_the_first_of_each_lane_waits_for_or_all_if_it_is_unseen(
    steps: list[tuple[str, int, frozenset[RankCapacity]]],
) -> None:
    queue = AdmissionQueue(QueueSettings(threshold=1.0))
    lanes: dict[ConstraintClass, list[QueuedRequest]] = {}
    waits_for: dict[ConstraintClass, frozenset[RankCapacity]] = {}
    unseen: set[ConstraintClass] = set()
    for number, (step, arg, slots) in enumerate(steps):
        model, level = "mn"[arg % 2], arg % 3
        everybody = [queued for line in lanes.values() for queued in line]
        if step == "park":
            excluded = frozenset({arg // 6})
            query = Query(model, 1, strict_priority=level, excluded_worker_ids=excluded)
            queued = queue.enqueue(query, key(f"r{number}"), 0.0, blockers=Blockers(1, slots))
            line = lanes.setdefault(queued.constraint_class, [])
            line.append(queued)
            line.sort(key=lambda p: p.order)
            waits_for.setdefault(queued.constraint_class, slots)
        elif step == "leave" and everybody:
            one = everybody[arg % len(everybody)]
            queue.withdraw(one.key)
            lanes[one.constraint_class].remove(one)
            if not lanes[one.constraint_class]:
                del lanes[one.constraint_class], waits_for[one.constraint_class]
                unseen.discard(one.constraint_class)
        elif step == "look" and lanes:
            head = list(lanes.values())[arg % len(lanes)][0]
            queue.mark_blocked(head, head.constraint_class, Blockers(1, slots))
            waits_for[head.constraint_class] = slots
            unseen.discard(head.constraint_class)
        elif step == "unsee":
            queue.mark_all_dirty()
            unseen = set(lanes)
        for slot, level in product(_AT, range(3)):
            newcomer = queue.order(Query(model, 1, strict_priority=level), 0.0)
            claims = [
                line[0].order < newcomer
                for constraint_class, line in lanes.items()
                if slot in waits_for[constraint_class]
                or (constraint_class in unseen and constraint_class.model == model)
            ]
            assert queue.overtakes(newcomer, model, slot) == any(claims)


_LANES = [
    None,
    RoutingHints(backend_instance_id=1),
    RoutingHints(backend_instance_id=2),
    RoutingHints(allowed_worker_ids=frozenset({1, 3})),
    RoutingHints(allowed_worker_ids=frozenset({2, 3, 9})),
]
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "done", "serve", "look", "report", "see", "withdraw"]),
        st.integers(0, 29),
    ),
    max_size=40,
)


def _may_run(constraint_class: RoutingHints | None, worker_id: int) -> bool:
    if constraint_class is None:
        return True
    allowed = constraint_class.allowed_worker_ids
    return (
        constraint_class.backend_instance_id == worker_id
        if allowed is None
        else worker_id in allowed
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps=_STEPS)
def test_room_always_goes_to_the_first_of_those_who_may_have_it(
    steps: list[tuple[str, int]],
) -> None:
    bed = Bed(1, 2, 3)
    waiting: dict[str, tuple[tuple[int, int], RoutingHints | None]] = {}
    running: list[str] = []
    had_room: set[int] = set()

    def placed(name: str, order: tuple[int, int], outcome: Any) -> None:
        if not isinstance(outcome, Decision):
            return  # Whoever pinned a worker that went.
        running.append(name)
        at = outcome.worker.worker_id
        if at in had_room:
            ahead = [
                n
                for n, (o, constraint_class) in waiting.items()
                if o < order and _may_run(constraint_class, at)
            ]
            assert not ahead, f"{name} took worker {at} before {ahead}"
        if bed.full(at):
            had_room.discard(at)

    def look(limit: int | None) -> None:
        for one, outcome in islice(bed.router.rescan(bed.now, Random(0)), limit):
            if outcome is not None:
                name = one.key.request_id
                order, _ = waiting.pop(name)
                placed(name, order, outcome)

    here = {1, 2, 3}
    for number, (step, arg) in enumerate(steps):
        bed.now += 0.001
        had_room = {n for n in here if not bed.full(n)}
        name = f"r{number}"
        if step == "ask":
            order, constraint_class = (-(arg % 3), number), _LANES[arg % 5]
            query = Query("m", 900, routing=constraint_class, strict_priority=arg % 3)
            if constraint_class is not None and constraint_class.backend_instance_id not in (
                None,
                *here,
            ):
                continue
            outcome = bed.router.admit(query, key(name), bed.now, Random(arg))
            if isinstance(outcome, QueuedRequest):
                waiting[name] = order, constraint_class
            else:
                placed(name, order, outcome)
        elif step == "done" and running:
            bed.router.book.free(key(running.pop(arg % len(running))))
        elif step == "report":
            tokens = 3 * BATCH if arg % 2 else 0
            bed.router.book.report(1 + arg % 3, 0, Load(waiting_tokens=tokens), bed.now)
        elif step == "see":
            here = {1, 2, 3} - {arg}
            bed.see(*here)
        elif step == "withdraw" and waiting:
            gone = sorted(waiting)[arg % len(waiting)]
            del waiting[gone]
            bed.router.queue.withdraw(key(gone))
        elif step in ("serve", "look"):
            look(None if step == "serve" else 1)
    for name in running:
        bed.router.book.free(key(name))
    bed.now += 10.0  # Reports have no say any more.
    bed.see(1, 2, 3)
    while waiting:
        running.clear()
        had_room = {1, 2, 3}
        look(None)
        assert running, "whoever waits is let in at last"
        for name in running:
            bed.router.book.free(key(name))
    assert bed.router.queue.slots == []
