"""Signals that ask a mesh to stop, and those that kill it."""

from __future__ import annotations

import signal

import pytest

from meshctl.process.stop_requests import Asked, StopRequests

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def asked(*heard: tuple[signal.Signals, float]) -> list[Asked]:
    requests = StopRequests()
    return [requests.heard(number, now) for number, now in heard]


@pytest.mark.parametrize("second", [TERM, HUP])
def test_a_signal_that_arrives_twice_at_once_is_one_request(second: signal.Signals) -> None:
    found = asked((TERM, 100.0), (second, 100.0), (second, 100.9))
    assert found == [Asked.STOP, Asked.NOTHING, Asked.NOTHING]


def test_a_later_signal_kills() -> None:
    assert asked((TERM, 100.0), (TERM, 101.0)) == [Asked.STOP, Asked.KILL]


@pytest.mark.parametrize("first", [INT, TERM])
def test_a_second_ctrl_c_kills_however_soon_it_comes(first: signal.Signals) -> None:
    assert asked((first, 100.0), (INT, 100.0)) == [Asked.STOP, Asked.KILL]
