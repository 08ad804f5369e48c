"""When a dead service restarts."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.service.restarts import JITTER, RestartPolicy, Restarts


def end(restarts: Restarts, now: float, *, is_retryable: bool = True) -> float | None:
    """Seconds until the next start; None: no more restarts."""
    pause_s = restarts.ended(now)
    return None if restarts.is_exhausted(is_retryable=is_retryable) else pause_s


def pauses(restarts: Restarts, count: int, *, ready: bool = True) -> list[float | None]:
    found = []
    for _ in range(count):
        if ready:
            restarts.ready(0.0)
        found.append(end(restarts, 0.0))
    return found


def test_pauses_double_from_the_first_to_the_limit() -> None:
    restarts = Restarts(RestartPolicy(), None)
    assert pauses(restarts, 8) == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])


def test_enough_time_ready_resets_the_pause() -> None:
    restarts = Restarts(RestartPolicy(), None)
    pauses(restarts, 4)
    restarts.ready(100.0)
    assert end(restarts, 130.0) == pytest.approx(0.2)


def test_too_little_time_ready_does_not_reset_the_pause() -> None:
    restarts = Restarts(RestartPolicy(), None)
    pauses(restarts, 4)
    restarts.ready(100.0)
    assert end(restarts, 129.9) == pytest.approx(3.2)


def test_a_long_run_without_readiness_does_not_reset_the_pause() -> None:
    restarts = Restarts(RestartPolicy(), None)
    pauses(restarts, 4)
    end(restarts, 1000.0)
    assert end(restarts, 5000.0) == pytest.approx(6.4)


def test_restarts_end_at_the_fifth_exit_of_a_service_that_was_never_ready() -> None:
    found = pauses(Restarts(RestartPolicy(), None), 5, ready=False)
    assert None not in found[:4]
    assert found[4] is None


def test_a_service_that_was_ready_once_is_restarted_without_limit() -> None:
    restarts = Restarts(RestartPolicy(), None)
    restarts.ready(0.0)
    assert None not in pauses(restarts, 5000, ready=False)
    assert end(restarts, 0.0, is_retryable=False) is not None


def test_a_failure_that_is_not_retryable_ends_restarts() -> None:
    assert end(Restarts(RestartPolicy(), None), 0.0, is_retryable=False) is None


@settings(max_examples=50)
@given(seed=st.integers(), count=st.integers(1, 60))
def test_jitter_only_shortens_and_by_a_bounded_part(seed: int, count: int) -> None:
    plain = pauses(Restarts(RestartPolicy(), None), count)
    jittered = pauses(Restarts(RestartPolicy(), Random(seed)), count)
    for longest, pause_s in zip(plain, jittered, strict=True):
        assert longest is not None
        assert pause_s is not None
        assert (1 - JITTER) * longest <= pause_s <= longest
