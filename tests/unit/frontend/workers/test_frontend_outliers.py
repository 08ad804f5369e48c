"""Workers that fail more requests than their peers."""

from __future__ import annotations

from frontend_svc.workers.outliers import FAILURES_MIN, WINDOW_S, OutlierDetector

POOL = (1, 2, 3)


def served(detector: OutlierDetector, requests: int, now: float = 0.0) -> None:
    """Each worker of the pool gets that many requests."""
    for worker_id in POOL:
        for _ in range(requests):
            detector.count_request(worker_id, now)


def failed(detector: OutlierDetector, worker_id: int, failures: int, now: float = 0.0) -> list[str]:
    return [detector.count_failure(worker_id, POOL, now) for _ in range(failures)]


def test_a_worker_that_alone_fails_its_requests_is_an_outlier() -> None:
    detector = OutlierDetector()
    served(detector, 5)
    verdicts = failed(detector, 1, FAILURES_MIN)
    assert verdicts[:-1] == [""] * (FAILURES_MIN - 1), "too few to judge"
    assert verdicts[-1] == "it failed 4 of 5 requests in 10 s, its peers 0 of 10"


def test_failures_that_all_workers_have_make_none_an_outlier() -> None:
    detector = OutlierDetector()
    served(detector, 20)
    for _ in range(15):
        assert [failed(detector, worker_id, 1) for worker_id in POOL] == [[""]] * 3


def test_a_few_failures_among_many_requests_make_no_outlier() -> None:
    detector = OutlierDetector()
    served(detector, 100)
    assert set(failed(detector, 1, 19)) == {""}
    assert failed(detector, 1, 1) != [""]


def test_without_requests_of_its_peers_a_worker_is_not_compared() -> None:
    detector = OutlierDetector()
    for _ in range(10):
        detector.count_request(1, 0.0)
    assert set(failed(detector, 1, 10)) == {""}
    detector.count_request(2, 0.0)
    assert failed(detector, 1, 1) == [""], "one request of the peers proves nothing"


def test_failures_before_the_window_do_not_count() -> None:
    detector = OutlierDetector()
    now = 0.0
    for _ in range(20):
        served(detector, 5, now)
        assert failed(detector, 1, 1, now) == [""]
        now += WINDOW_S / 2
    served(detector, 5, now)
    assert failed(detector, 1, FAILURES_MIN, now)[-1]


def test_a_forgotten_worker_is_judged_anew() -> None:
    detector = OutlierDetector()
    served(detector, 5)
    assert failed(detector, 1, FAILURES_MIN)[-1]
    detector.forget(1)
    served(detector, 5)
    assert set(failed(detector, 1, FAILURES_MIN - 1)) == {""}
