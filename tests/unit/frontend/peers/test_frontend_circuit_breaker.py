"""Who is left alone, for how long, and how often requests may be tried again."""

from __future__ import annotations

from random import Random

from frontend_svc.core.peers.circuit_breaker import (
    PROBE_INTERVAL_MAX_S,
    CircuitBreaker,
    HangDetector,
    RetryBudget,
)


def test_a_tripped_worker_gets_no_request_until_a_probe_works() -> None:
    breaker = CircuitBreaker(Random(1))
    assert breaker.open_circuit(1, "lost", 0.0)
    assert not breaker.open_circuit(1, "lost again", 0.1), "no news"
    assert breaker.excluded([1, 2]) == {1}
    assert breaker.due(0.1) == []
    assert breaker.due(1.0) == [1]
    assert breaker.due(1.0) == [], "one probe at a time"
    breaker.record_probe(1, False, 1.0)
    assert breaker.excluded([1, 2]) == {1}
    assert breaker.due(3.0) == [1]
    breaker.record_probe(1, True, 3.0)
    assert breaker.excluded([1, 2]) == frozenset()


def test_probes_become_rarer_up_to_a_limit() -> None:
    breaker = CircuitBreaker(Random(2))
    breaker.open_circuit(1, "lost", 0.0)
    now, gaps = 0.0, []
    for _ in range(12):
        at = now
        while not breaker.due(at):
            at += 0.01
        gaps.append(at - now)
        now = at
        breaker.record_probe(1, False, now)
    assert gaps[0] < 1.0
    assert gaps[-1] > gaps[1]
    assert max(gaps) <= PROBE_INTERVAL_MAX_S * 1.26


def test_at_most_a_quarter_of_a_pool_is_left_alone_for_standing_still() -> None:
    breaker = CircuitBreaker(Random(3))
    for worker_id in range(8):
        breaker.open_circuit(worker_id, "hung", 0.0, is_hung=True)
    assert breaker.excluded(range(8)) == {0, 1}
    assert breaker.excluded([0, 1]) == {0}, "at least one"


def test_all_that_are_lost_are_left_alone() -> None:
    breaker = CircuitBreaker(Random(4))
    for worker_id in range(4):
        breaker.open_circuit(worker_id, "lost", 0.0)
    assert breaker.excluded(range(4)) == {0, 1, 2, 3}


def test_one_that_stood_still_and_is_gone_now_does_not_count_as_standing_still() -> None:
    breaker = CircuitBreaker(Random(4))
    for worker_id in range(4):
        breaker.open_circuit(worker_id, "stands still", 0.0, is_hung=True)
    assert breaker.excluded(range(4)) == {0}, "a quarter"
    assert not breaker.open_circuit(3, "its stream was lost", 1.0), (
        "no news: it gets no requests either"
    )
    assert breaker.excluded(range(4)) == {0, 3}
    assert breaker.why()[3] == "its stream was lost"
    breaker.open_circuit(3, "stands still", 2.0, is_hung=True)
    assert breaker.excluded(range(4)) == {0, 3}, "and it stays gone until it is whole"


def test_who_has_left_is_forgotten() -> None:
    breaker = CircuitBreaker(Random(5))
    breaker.open_circuit(1, "lost", 0.0)
    breaker.retain([2])
    assert breaker.why() == {}
    assert breaker.due(100.0) == []


def test_the_budget_allows_a_floor_and_a_share() -> None:
    budget = RetryBudget()
    assert sum(budget.take(1.0) for _ in range(200)) == RetryBudget.RETRIES_MIN
    busy = RetryBudget()
    for _ in range(2000):
        busy.request(1.0)
    assert sum(busy.take(1.0) for _ in range(1000)) == 200


def test_the_budget_comes_back_with_time() -> None:
    budget = RetryBudget()
    while budget.take(1.0):
        pass
    assert not budget.take(4.9)
    assert not budget.take(6.0), "the last half window still counts"
    assert budget.take(11.0)


def test_an_engine_that_stands_still_with_work_is_hung() -> None:
    watch = HangDetector(2.0)
    assert not watch.received(7, 3, 0.0)
    assert not watch.received(7, 3, 1.0)
    assert watch.received(7, 3, 2.0)
    assert not watch.received(8, 3, 3.0), "it moved"


def test_an_idle_engine_is_not_hung_and_neither_is_one_that_just_got_work() -> None:
    watch = HangDetector(2.0)
    for second in range(10):
        assert not watch.received(7, 0, float(second))
    assert not watch.received(7, 1, 10.0)
    assert not watch.received(7, 1, 11.0)
    assert watch.received(7, 1, 12.0)
