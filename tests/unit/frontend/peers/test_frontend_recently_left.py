"""Who was seen to leave, and who was never seen."""

from __future__ import annotations

from frontend_svc.core.peers.recently_left import DEPARTED_MAX, Departed


def test_only_those_that_were_shown_and_are_no_more_have_departed() -> None:
    departed = Departed()
    assert 1 not in departed
    departed.follow([1, 2])
    assert 1 not in departed
    departed.follow([2])
    assert 1 in departed
    assert 3 not in departed
    departed.follow([1, 2])
    assert 1 not in departed, "it is back"


def test_the_oldest_are_forgotten_first() -> None:
    departed = Departed()
    for one in range(DEPARTED_MAX + 2):
        departed.follow([one])
    departed.follow([])
    assert 0 not in departed
    assert 1 not in departed
    assert 2 in departed
    assert DEPARTED_MAX + 1 in departed
