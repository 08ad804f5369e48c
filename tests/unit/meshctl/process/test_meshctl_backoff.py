"""When a dead service restarts."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshctl.process.backoff import JITTER, Backoff, BackoffPolicy


class NoJitter(Random):
    def random(self) -> float:
        return 0.0


NO_JITTER = NoJitter()


def pauses(backoff: Backoff, count: int, *, ready: bool = True) -> list[float | None]:
    found = []
    for _ in range(count):
        if ready:
            backoff.ready(0.0)
        found.append(backoff.ended(0.0))
    return found


def test_pauses_double_from_the_first_to_the_limit() -> None:
    backoff = Backoff(BackoffPolicy(), NO_JITTER)
    assert pauses(backoff, 8) == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])


def test_enough_time_ready_resets_the_pause() -> None:
    backoff = Backoff(BackoffPolicy(), NO_JITTER)
    pauses(backoff, 4)
    backoff.ready(100.0)
    assert backoff.ended(130.0) == pytest.approx(0.2)


def test_too_little_time_ready_does_not_reset_the_pause() -> None:
    backoff = Backoff(BackoffPolicy(), NO_JITTER)
    pauses(backoff, 4)
    backoff.ready(100.0)
    assert backoff.ended(129.9) == pytest.approx(3.2)


def test_a_long_run_without_readiness_does_not_reset_the_pause() -> None:
    backoff = Backoff(BackoffPolicy(), NO_JITTER)
    pauses(backoff, 4)
    backoff.ended(1000.0)
    assert backoff.ended(5000.0) == pytest.approx(6.4)


def test_restarts_end_at_the_fifth_exit_of_a_service_that_was_never_ready() -> None:
    found = pauses(Backoff(BackoffPolicy(), NO_JITTER), 5, ready=False)
    assert None not in found[:4]
    assert found[4] is None


def test_a_service_that_was_ready_once_is_restarted_without_limit() -> None:
    backoff = Backoff(BackoffPolicy(), NO_JITTER)
    backoff.ready(0.0)
    assert None not in pauses(backoff, 5000, ready=False)
    assert backoff.ended(0.0, is_retryable=False) is not None


def test_a_failure_that_is_not_retryable_ends_restarts() -> None:
    assert Backoff(BackoffPolicy(), NO_JITTER).ended(0.0, is_retryable=False) is None


@settings(max_examples=50)
@given(seed=st.integers(), count=st.integers(1, 60))
def test_jitter_only_shortens_and_by_a_bounded_part(seed: int, count: int) -> None:
    plain = pauses(Backoff(BackoffPolicy(), NO_JITTER), count)
    jittered = pauses(Backoff(BackoffPolicy(), Random(seed)), count)
    for longest, pause_s in zip(plain, jittered, strict=True):
        assert longest is not None
        assert pause_s is not None
        assert (1 - JITTER) * longest <= pause_s <= longest
