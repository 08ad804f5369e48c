"""Limits on retries: the budget, permits for migrations, and waits for open circuits."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from common.errors import Overloaded, Unavailable
from frontend_svc.core.request.retry_policy import (
    EXCLUDED_RETRY_ATTEMPTS,
    ExclusionPolicy,
    MigrationLimiter,
    Permit,
    RetryBudget,
    WorkerCount,
)

MODEL = "m"


def available(all_: int, **having: int) -> WorkerCount:
    """Worker counts of the model, and of adapters; all workers have an adapter not named here."""
    return lambda adapter: having.get(adapter, all_)


def test_permits_are_limited_per_worker_and_a_release_admits_the_next_request() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2)
    permits = [
        migrations.request_permit(MODEL, request, float(request), available(2))
        for request in range(6)
    ]
    assert permits == [Permit.GRANTED] * 4 + [Permit.QUEUED] * 2
    assert (migrations.computing, migrations.waiting) == (4, 2)
    assert migrations.release(MODEL, 1, available(2)) == [4]
    assert migrations.release(MODEL, 1, available(2)) == [], "the permit is released once"


def test_the_request_that_arrived_first_is_admitted_first() -> None:
    migrations: MigrationLimiter[str] = MigrationLimiter(per_worker=1)
    assert migrations.request_permit(MODEL, "first", 50.0, available(1)) == Permit.GRANTED
    assert migrations.request_permit(MODEL, "young", 90.0, available(1)) == Permit.QUEUED
    assert migrations.request_permit(MODEL, "old", 10.0, available(1)) == Permit.QUEUED
    assert migrations.release(MODEL, "first", available(1)) == ["old"]
    assert migrations.release(MODEL, "old", available(1)) == ["young"]


def test_a_new_request_does_not_overtake_queued_requests() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    migrations.request_permit(MODEL, 1, 1.0, available(1))
    migrations.request_permit(MODEL, 2, 2.0, available(1))
    assert migrations.request_permit(MODEL, 3, 3.0, available(5)) == Permit.QUEUED, (
        "there is capacity, and 2 was first"
    )
    assert migrations.release(MODEL, 1, available(5)) == [2, 3]


def test_a_request_with_a_permit_keeps_it_when_it_requests_another() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    assert [migrations.request_permit(MODEL, 1, 1.0, available(1)) for _ in range(3)] == [
        Permit.GRANTED
    ] * 3
    assert migrations.computing == 1


def test_a_full_queue_refuses_the_next_request() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1, waiting_max=2)
    assert [migrations.request_permit(MODEL, n, 0.0, available(1)) for n in range(4)] == [
        Permit.GRANTED,
        Permit.QUEUED,
        Permit.QUEUED,
        Permit.QUEUE_FULL,
    ]


def test_a_request_released_from_the_queue_is_not_admitted_later() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    for request in range(3):
        migrations.request_permit(MODEL, request, float(request), available(1))
    assert migrations.release(MODEL, 1, available(1)) == []
    assert migrations.release(MODEL, 0, available(1)) == [2]


def test_the_limits_of_two_models_are_independent() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    assert migrations.request_permit("a", 1, 1.0, available(1)) == Permit.GRANTED
    assert migrations.request_permit("b", 2, 2.0, available(1)) == Permit.GRANTED


def test_an_adapter_on_one_of_many_workers_has_the_limit_of_one_worker() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2)
    workers = available(10, french=1)
    permits = [
        migrations.request_permit(MODEL, request, float(request), workers, "french")
        for request in range(4)
    ]
    assert permits == [Permit.GRANTED] * 2 + [Permit.QUEUED] * 2
    assert migrations.release(MODEL, 0, workers) == [2], "one is admitted per release"


def test_a_request_queued_for_an_adapter_does_not_block_requests_for_other_workers() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    workers = available(4, french=1, german=1)
    adapters = ["french", "french", "", "german", "german", "", ""]
    permits = [
        migrations.request_permit(MODEL, n, float(n), workers, adapter)
        for n, adapter in enumerate(adapters)
    ]
    assert permits == [
        Permit.GRANTED,
        Permit.QUEUED,
        Permit.GRANTED,
        Permit.GRANTED,
        Permit.QUEUED,
        Permit.GRANTED,
        Permit.QUEUED,
    ], "four workers, four at once"
    assert migrations.release(MODEL, 2, workers) == [6], "older requests wait for busy workers"
    assert migrations.release(MODEL, 3, workers) == [4]
    assert migrations.release(MODEL, 0, workers) == [1]


def test_all_adapters_together_stay_within_the_limit_of_their_model() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2)
    permits = [
        migrations.request_permit(MODEL, n, float(n), available(2), f"adapter {n}")
        for n in range(5)
    ]
    assert permits == [Permit.GRANTED] * 4 + [Permit.QUEUED]


class LimiterModel(RuleBasedStateMachine):
    """Compares the limiter with a model: sets of computing and waiting requests."""

    def __init__(self) -> None:
        super().__init__()
        self.migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2, waiting_max=5)
        self.computing: dict[int, str] = {}
        self.waiting: dict[int, str] = {}
        self.next = 0

    def computing_of(self, adapter: str) -> int:
        return list(self.computing.values()).count(adapter)

    @rule(
        arrived_at=st.floats(0, 10),
        workers=st.integers(0, 3),
        having=st.integers(0, 3),
        adapter=st.sampled_from(["", "french", "german"]),
    )
    def request_permit(self, arrived_at: float, workers: int, having: int, adapter: str) -> None:
        self.next += 1
        having = min(having, workers)
        counts = available(workers, french=having)
        permit = self.migrations.request_permit(MODEL, self.next, arrived_at, counts, adapter)
        if permit == Permit.GRANTED:
            assert len(self.computing) < 2 * max(1, workers)
            if adapter == "french":
                assert self.computing_of(adapter) < 2 * max(1, having)
            assert adapter not in self.waiting.values(), "no queued request is overtaken"
            self.computing[self.next] = adapter
        elif permit == Permit.QUEUED:
            self.waiting[self.next] = adapter
        else:
            assert len(self.waiting) == 5

    @rule(data=st.data(), workers=st.integers(0, 3), having=st.integers(0, 3))
    def release(self, data: st.DataObject, workers: int, having: int) -> None:
        known = sorted(self.computing | self.waiting)
        if not known:
            return
        having = min(having, workers)
        request = data.draw(st.sampled_from(known))
        self.computing.pop(request, None)
        self.waiting.pop(request, None)
        admitted = self.migrations.release(MODEL, request, available(workers, french=having))
        for one in admitted:
            self.computing[one] = self.waiting.pop(one)
        if admitted:
            assert len(self.computing) <= 2 * max(1, workers)
        if "french" in [self.computing[one] for one in admitted]:
            assert self.computing_of("french") <= 2 * max(1, having)
        if len(self.computing) < 2 * max(1, workers):
            assert set(self.waiting.values()) <= {"french"}, "the others have capacity"
            assert not self.waiting or self.computing_of("french") >= 2 * max(1, having)

    @invariant()
    def counts_agree_and_a_request_computes_while_others_wait(self) -> None:
        found = (self.migrations.computing, self.migrations.waiting)
        assert found == (len(self.computing), len(self.waiting))
        assert self.computing or not self.waiting, "a computing request admits the next"


def test_in_any_order_of_events_no_request_is_lost_or_waits_forever() -> None:
    profile = settings(max_examples=50, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(LimiterModel, settings=profile)


# Retry budget


def test_the_retry_budget_grants_a_minimum_and_a_fraction_of_the_requests() -> None:
    budget = RetryBudget()
    assert sum(budget.take(1.0) for _ in range(200)) == RetryBudget.RETRIES_MIN
    busy = RetryBudget()
    for _ in range(2000):
        busy.count_request(1.0)
    assert sum(busy.take(1.0) for _ in range(1000)) == 200


def test_the_retry_budget_is_restored_with_time() -> None:
    budget = RetryBudget()
    while budget.take(1.0):
        pass
    assert not budget.take(4.9)
    assert not budget.take(6.0), "the last half window still counts"
    assert budget.take(11.0)


# Exclusions

NONE = frozenset[int]()


def test_failed_workers_and_open_circuits_are_excluded() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({1}))
    assert policy.excluded(frozenset({1, 2, 3}), frozenset({2})) == frozenset({1, 2})


def test_a_request_waits_while_all_other_workers_have_an_open_circuit() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({1}))
    pool = frozenset({1, 2})
    assert policy.excluded(pool, frozenset({2})) is None
    assert policy.excluded(pool, NONE) == frozenset({1})


def test_a_wait_ends_after_the_maximum_number_of_attempts() -> None:
    policy = ExclusionPolicy()
    pool = frozenset({1})
    waits = [policy.excluded(pool, pool) is None for _ in range(EXCLUDED_RETRY_ATTEMPTS + 1)]
    assert waits == [True] * EXCLUDED_RETRY_ATTEMPTS + [False]


def test_a_failed_worker_is_used_again_once_its_circuit_closes() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({1}))
    pool = frozenset({1, 2})
    assert policy.excluded(pool, pool) is None
    assert policy.excluded(pool, frozenset({2})) == frozenset({2})
    policy.start_attempt(frozenset({1}))
    assert policy.excluded(pool, NONE) == frozenset({1}), "it failed the next attempt too"


def test_a_failed_worker_with_a_closed_circuit_stays_excluded() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({1}))
    pool = frozenset({1, 2})
    assert policy.excluded(pool, frozenset({2})) is None
    assert policy.excluded(pool, frozenset({2})) is None, "a busy worker is not dead"


def test_a_refusal_of_the_router_leads_to_a_wait_only_with_an_open_circuit() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(NONE)
    policy.excluded(frozenset({1, 2}), NONE)
    assert not policy.waits_after(Unavailable("no worker"))
    policy.excluded(frozenset({1, 2}), frozenset({2}))
    assert policy.waits_after(Unavailable("no worker"))
    assert not policy.waits_after(Overloaded(1.0))
