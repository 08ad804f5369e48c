"""Workers with an open circuit: which are excluded, and when they are probed."""

from __future__ import annotations

from random import Random

from frontend_svc.workers.breaker import PROBE_INTERVAL_MAX_S, Cause, CircuitBreaker


def test_a_worker_with_an_open_circuit_is_excluded_until_a_probe_succeeds() -> None:
    breaker = CircuitBreaker(Random(1))
    assert breaker.open_circuit(1, "lost", 0.0)
    assert not breaker.open_circuit(1, "lost again", 0.1), "it was open before"
    assert breaker.excluded([1, 2]) == {1}
    assert breaker.due(0.1) == []
    assert breaker.due(1.0) == [1]
    assert breaker.due(1.0) == [], "one probe at a time"
    breaker.record_probe(1, False, 1.0)
    assert breaker.excluded([1, 2]) == {1}
    assert breaker.due(3.0) == [1]
    breaker.record_probe(1, True, 3.0)
    assert breaker.excluded([1, 2]) == frozenset()


def test_probe_intervals_grow_up_to_a_limit() -> None:
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


def test_a_circuit_that_opens_again_and_again_is_probed_less_often() -> None:
    breaker = CircuitBreaker(Random(3))
    now, opened = 0.0, 0
    while now < 60.0:
        opened += breaker.open_circuit(1, "did not accept a request in time", now)
        for worker_id in breaker.due(now):
            breaker.record_probe(worker_id, True, now)
        now += 0.05
    assert opened < 45, "at a constant interval of 0.2 s it would open 200 times"
    breaker.retain([])
    assert breaker.open_circuit(1, "lost", now + 1)
    assert breaker.due(now + 1.3) == [1], "a worker that left has no history"


def test_a_circuit_that_opens_again_much_later_is_probed_soon() -> None:
    breaker = CircuitBreaker(Random(3))
    for now in (0.0, 20.0, 40.0):
        assert breaker.open_circuit(1, "lost", now)
        assert breaker.due(now + 0.3) == [1]
        breaker.record_probe(1, True, now + 0.3)


def test_at_most_a_quarter_of_a_pool_is_excluded_as_hung() -> None:
    breaker = CircuitBreaker(Random(3))
    for worker_id in range(8):
        breaker.open_circuit(worker_id, "hung", 0.0, Cause.HUNG)
    assert breaker.excluded(range(9)) == {0, 1}
    assert breaker.excluded([0, 1, 8]) == {0}, "at least one"


def test_without_a_closed_circuit_all_workers_are_excluded() -> None:
    breaker = CircuitBreaker(Random(3))
    for worker_id in range(8):
        breaker.open_circuit(worker_id, "hung", 0.0, Cause.HUNG)
    assert breaker.excluded(range(8)) == set(range(8))
    breaker.record_probe(5, True, 1.0)
    assert breaker.excluded(range(8)) == set(range(8)) - {5}, "the others have not recovered"


def test_all_lost_workers_are_excluded() -> None:
    breaker = CircuitBreaker(Random(4))
    for worker_id in range(4):
        breaker.open_circuit(worker_id, "lost", 0.0)
    assert breaker.excluded(range(4)) == {0, 1, 2, 3}


def test_a_hung_worker_that_is_then_lost_counts_as_lost() -> None:
    breaker = CircuitBreaker(Random(4))
    for worker_id in range(4):
        breaker.open_circuit(worker_id, "hung", 0.0, Cause.HUNG)
    assert breaker.excluded(range(5)) == {0}, "a quarter"
    assert not breaker.open_circuit(3, "its stream was lost", 1.0), "its circuit was open before"
    assert breaker.excluded(range(5)) == {0, 3}
    assert breaker.reasons()[3] == "its stream was lost"
    breaker.open_circuit(3, "hung", 2.0, Cause.HUNG)
    assert breaker.excluded(range(5)) == {0, 3}, "it counts as lost until its circuit closes"


def test_a_worker_that_left_is_removed() -> None:
    breaker = CircuitBreaker(Random(5))
    breaker.open_circuit(1, "lost", 0.0)
    breaker.retain([2])
    assert breaker.reasons() == {}
    assert breaker.due(100.0) == []


def test_a_failing_worker_is_excluded_longer_each_time() -> None:
    """Its engine responds to probes, so that only its requests show the failure."""
    breaker = CircuitBreaker(Random(6))
    now, excluded_s = 0.0, []
    for _ in range(8):
        assert breaker.open_circuit(1, "it failed 4 of 5 requests", now, Cause.FAILING)
        opened_at = now
        while not breaker.due(now):
            now += 0.05
        breaker.record_probe(1, True, now)
        excluded_s.append(now - opened_at)
        now += 5.0
    assert 0.7 < excluded_s[0] < 1.4
    assert excluded_s[:4] == sorted(excluded_s[:4])
    assert 20.0 < excluded_s[-1] < 40.0
    now += 60.0
    breaker.open_circuit(1, "it failed 4 of 5 requests", now, Cause.FAILING)
    assert breaker.due(now + 1.4) == [1], "it was well for a minute"


def test_after_a_failed_probe_a_failing_worker_is_probed_soon() -> None:
    breaker = CircuitBreaker(Random(6))
    now = 0.0
    for _ in range(5):
        breaker.open_circuit(1, "its engine fails", now, Cause.FAILING)
        now += 40.0
        assert breaker.due(now) == [1]
        breaker.record_probe(1, True, now)
    breaker.open_circuit(1, "its engine fails", now, Cause.FAILING)
    assert breaker.due(now + 40.0) == [1]
    breaker.probe_early(1, now)
    breaker.record_probe(1, False, now + 40.0)
    assert breaker.due(now + 40.0 + 2.6) == [1]
    breaker.record_probe(1, False, now + 43.0)
    breaker.probe_early(1, now + 43.0)
    assert breaker.due(now + 43.0) == [1], "the worker reports that its engine works again"


def test_at_most_half_of_a_pool_is_excluded_as_failing_without_a_failed_probe() -> None:
    breaker = CircuitBreaker(Random(6))
    for worker_id in range(3):
        breaker.open_circuit(worker_id, "it fails", 0.0, Cause.FAILING)
    assert breaker.excluded(range(5)) == {0, 1}
    assert breaker.excluded([1, 3]) == {1}
    for worker_id in breaker.due(2.0):
        breaker.record_probe(worker_id, False, 2.0)
    assert breaker.excluded(range(5)) == {0, 1, 2}, "their probes failed"


def test_a_pool_is_never_excluded_as_failing_as_a_whole() -> None:
    breaker = CircuitBreaker(Random(6))
    for worker_id in range(2):
        breaker.open_circuit(worker_id, "it fails", 0.0, Cause.FAILING)
    for worker_id in breaker.due(2.0):
        breaker.record_probe(worker_id, False, 2.0)
    assert breaker.excluded([0, 1]) == frozenset(), "a common cause: an error is better than a wait"
    assert breaker.excluded([0]) == frozenset()
    assert breaker.excluded([0, 1, 2]) == {0, 1}
    breaker.open_circuit(2, "lost", 3.0)
    assert breaker.excluded([0, 1, 2]) == {2}, "a failing worker is better than a lost one"


def test_a_failing_worker_that_is_lost_counts_as_lost() -> None:
    breaker = CircuitBreaker(Random(6))
    breaker.open_circuit(1, "it fails", 0.0, Cause.FAILING)
    breaker.open_circuit(1, "its stream was lost", 0.0, Cause.LOST)
    breaker.open_circuit(1, "it fails", 0.0, Cause.FAILING)
    assert breaker.count_by_cause() == {Cause.LOST: 1, Cause.HUNG: 0, Cause.FAILING: 0}
    breaker.open_circuit(2, "hung", 0.0, Cause.HUNG)
    breaker.open_circuit(2, "it fails", 0.0, Cause.FAILING)
    assert breaker.count_by_cause() == {Cause.LOST: 1, Cause.HUNG: 0, Cause.FAILING: 1}
