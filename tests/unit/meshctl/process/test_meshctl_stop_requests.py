"""Signals that request the stop of a mesh, and signals that kill it."""

from __future__ import annotations

import signal

import pytest

from meshctl.process.stop_requests import StopAction, StopRequests

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def asked(*receive: tuple[signal.Signals, float]) -> list[StopAction]:
    requests = StopRequests()
    return [requests.receive(number, now) for number, now in receive]


@pytest.mark.parametrize("second", [TERM, HUP])
def test_a_signal_that_arrives_twice_at_once_is_one_request(second: signal.Signals) -> None:
    found = asked((TERM, 100.0), (second, 100.0), (second, 100.9))
    assert found == [StopAction.STOP, StopAction.IGNORE, StopAction.IGNORE]


def test_a_later_signal_kills() -> None:
    assert asked((TERM, 100.0), (TERM, 101.0)) == [StopAction.STOP, StopAction.KILL]


@pytest.mark.parametrize("first", [INT, TERM])
def test_a_second_ctrl_c_kills_even_within_the_duplicate_window(first: signal.Signals) -> None:
    assert asked((first, 100.0), (INT, 100.0)) == [StopAction.STOP, StopAction.KILL]
