"""Detection of a hung engine from its heartbeats."""

from __future__ import annotations

from frontend_svc.core.peers.hang_detector import HangDetector


def test_an_engine_without_steps_while_requests_run_is_hung() -> None:
    detector = HangDetector(2.0)
    assert not detector.received(7, 3, 0.0)
    assert not detector.received(7, 3, 1.0)
    assert detector.received(7, 3, 2.0)
    assert not detector.received(8, 3, 3.0), "it stepped"


def test_an_idle_engine_is_not_hung_and_neither_is_one_that_just_received_work() -> None:
    detector = HangDetector(2.0)
    for second in range(10):
        assert not detector.received(7, 0, float(second))
    assert not detector.received(7, 1, 10.0)
    assert not detector.received(7, 1, 11.0)
    assert detector.received(7, 1, 12.0)
