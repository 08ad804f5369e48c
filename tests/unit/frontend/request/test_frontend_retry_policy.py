"""Limits on retries: the budget, permits for migrations, and waits for open circuits."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from common.errors import Overloaded, Unavailable, WorkerLost
from frontend_svc.request.retry_policy import (
    ALL_EXCLUDED,
    NO_ROUTER,
    ExclusionPolicy,
    MigrationLimiter,
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
    assert permits == [True] * 4 + [False] * 2
    assert (migrations.computing, migrations.waiting) == (4, 2)
    assert migrations.release(MODEL, 1, available(2)) == [4]
    assert migrations.release(MODEL, 1, available(2)) == [], "the permit is released once"


def test_the_request_that_arrived_first_is_admitted_first() -> None:
    migrations: MigrationLimiter[str] = MigrationLimiter(per_worker=1)
    assert migrations.request_permit(MODEL, "first", 50.0, available(1))
    assert not migrations.request_permit(MODEL, "young", 90.0, available(1))
    assert not migrations.request_permit(MODEL, "old", 10.0, available(1))
    assert migrations.release(MODEL, "first", available(1)) == ["old"]
    assert migrations.release(MODEL, "old", available(1)) == ["young"]


def test_a_new_request_does_not_overtake_queued_requests() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    migrations.request_permit(MODEL, 1, 1.0, available(1))
    migrations.request_permit(MODEL, 2, 2.0, available(1))
    assert not migrations.request_permit(MODEL, 3, 3.0, available(5)), (
        "there is capacity, and 2 was first"
    )
    assert migrations.release(MODEL, 1, available(5)) == [2, 3]


def test_a_request_with_a_permit_keeps_it_when_it_requests_another() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    assert [migrations.request_permit(MODEL, 1, 1.0, available(1)) for _ in range(3)] == [True] * 3
    assert migrations.computing == 1


def test_ten_thousand_requests_wait_and_all_are_admitted_in_order_of_arrival() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    count = 10_000
    permits = [migrations.request_permit(MODEL, n, float(n), available(1)) for n in range(count)]
    assert permits == [True] + [False] * (count - 1)
    admitted = [0]
    for request in admitted:
        admitted += migrations.release(MODEL, request, available(1))
    assert admitted == list(range(count))


def test_a_request_released_from_the_queue_is_not_admitted_later() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    for request in range(3):
        migrations.request_permit(MODEL, request, float(request), available(1))
    assert migrations.release(MODEL, 1, available(1)) == []
    assert migrations.release(MODEL, 0, available(1)) == [2]


def test_the_limits_of_two_models_are_independent() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    assert migrations.request_permit("a", 1, 1.0, available(1))
    assert migrations.request_permit("b", 2, 2.0, available(1))


def test_an_adapter_on_one_of_many_workers_has_the_limit_of_one_worker() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2)
    workers = available(10, french=1)
    permits = [
        migrations.request_permit(MODEL, request, float(request), workers, "french")
        for request in range(4)
    ]
    assert permits == [True] * 2 + [False] * 2
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
        True,
        False,
        True,
        True,
        False,
        True,
        False,
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
    assert permits == [True] * 4 + [False]


class LimiterModel(RuleBasedStateMachine):
    """Compares the limiter with a model: sets of computing and waiting requests."""

    def __init__(self) -> None:
        super().__init__()
        self.migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2)
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
        if permit:
            assert len(self.computing) < 2 * max(1, workers)
            if adapter == "french":
                assert self.computing_of(adapter) < 2 * max(1, having)
            assert adapter not in self.waiting.values(), "no queued request is overtaken"
            self.computing[self.next] = adapter
        else:
            self.waiting[self.next] = adapter

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

FULL = Unavailable("too many concurrent requests", 1.0, reason="FULL")


def test_the_retry_budget_does_not_limit_retries_after_the_loss_of_a_worker() -> None:
    budget = RetryBudget()
    lost = WorkerLost("gone", retryable=True)
    draining = Unavailable("the worker is draining", reason="DRAINING")
    assert all(budget.take(1.0, error) for error in (lost, draining) * 1000)
    assert budget.granted == 2000
    assert budget.take(1.0, FULL), "they take nothing of the budget"


def test_the_retry_budget_grants_a_minimum_and_a_fraction_of_the_requests() -> None:
    budget = RetryBudget()
    assert sum(budget.take(1.0, FULL) for _ in range(200)) == RetryBudget.RETRIES_MIN
    busy = RetryBudget()
    for _ in range(2000):
        busy.count_request(1.0)
    assert sum(busy.take(1.0, FULL) for _ in range(1000)) == 200


def test_the_retry_budget_is_restored_with_time() -> None:
    budget = RetryBudget()
    while budget.take(1.0, FULL):
        pass
    assert not budget.take(4.9, FULL)
    assert not budget.take(6.0, FULL), "the last half window still counts"
    assert budget.take(11.0, FULL)


# Exclusions

NONE = frozenset[int]()


def test_failed_workers_and_open_circuits_are_excluded() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({1}))
    assert not policy.must_wait(frozenset({1, 2, 3}), frozenset({2}))
    assert policy.excluded() == frozenset({1, 2})


def test_a_request_waits_while_all_workers_have_an_open_circuit() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({1}))
    pool = frozenset({1, 2})
    assert policy.must_wait(pool, pool)
    assert not policy.must_wait(pool, frozenset({2}))
    assert policy.excluded() == frozenset({2}), "the circuit of the failed worker has closed"
    policy.start_attempt(frozenset({1}))
    assert not policy.must_wait(pool, NONE)
    assert policy.excluded() == frozenset({1}), "it failed the next attempt too"


def test_an_empty_pool_is_left_to_the_router() -> None:
    assert not ExclusionPolicy().must_wait(NONE, NONE), "it may see a worker earlier"


def test_a_failed_worker_is_used_again_after_a_wait_if_no_other_is_left() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({1, 2}))
    assert policy.must_wait(frozenset({1, 2}), frozenset({2}))
    assert not policy.must_wait(frozenset({1, 2}), frozenset({2}))
    assert policy.excluded() == frozenset({2})


def test_a_failed_worker_that_left_stays_excluded() -> None:
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({1}))
    assert policy.must_wait(frozenset({1}), frozenset({1}))
    assert not policy.must_wait(NONE, NONE), "a router may still place on it"
    assert policy.excluded() == frozenset({1})
    all_excluded = Unavailable("no worker is left", reason=ALL_EXCLUDED)
    assert not policy.readmits_after(all_excluded)
    assert policy.waits_after(all_excluded)


def test_a_failed_decode_worker_is_used_again_if_no_other_is_left() -> None:
    decode, other_decode, prefill = 1, 2, 3
    policy = ExclusionPolicy()
    policy.start_attempt(frozenset({decode, other_decode}))
    pool = frozenset({decode, other_decode, prefill})
    assert not policy.must_wait(pool, frozenset({other_decode}))
    assert policy.excluded() == {decode, other_decode}
    all_excluded = Unavailable("no decode worker is left", reason=ALL_EXCLUDED)
    assert not policy.readmits_after(Unavailable("another reason"))
    assert policy.readmits_after(all_excluded)
    assert policy.excluded() == {other_decode}
    assert not policy.readmits_after(all_excluded), "no other failed worker has a closed circuit"


def test_a_request_waits_after_a_refusal_that_a_worker_may_end() -> None:
    policy = ExclusionPolicy()
    assert policy.waits_after(Unavailable("no worker"))
    assert not policy.waits_after(Unavailable("no such worker", field="query.routing.worker"))
    assert not policy.waits_after(Unavailable("no router", reason=NO_ROUTER))
    assert not policy.waits_after(Overloaded(1.0))
    policy.must_wait(frozenset({1, 2}), frozenset({2}))
    assert policy.waits_after(Unavailable("no router", reason=NO_ROUTER))
