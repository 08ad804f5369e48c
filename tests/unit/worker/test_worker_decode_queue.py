"""Which legs wait for blocks, told from how many do."""

from __future__ import annotations

from random import Random

import pytest

from worker_svc.core.decode_queue import OLD_S, DecodeQueue

BLOCKS_S = 7.5


def queue(*legs: tuple[str, int]) -> DecodeQueue:
    """Legs by id and priority, all of rank 0, opened at 0."""
    made = DecodeQueue(BLOCKS_S)
    for leg_id, priority in legs:
        made.open(leg_id, 0, priority, 0.0)
    return made


def test_a_leg_alone_starves_once_it_has_waited_for_blocks_long_enough() -> None:
    made = queue(("a", 0))
    assert made.starved({0: 1}, BLOCKS_S - 0.1) == []
    assert made.starved({0: 1}, BLOCKS_S) == ["a"]


def test_a_leg_that_has_its_blocks_waits_for_its_partner_and_does_not_starve() -> None:
    assert queue(("a", 0)).starved({0: 0}, 100.0) == []
    assert queue(("a", 0)).starved({}, 100.0) == []


def test_the_last_legs_are_those_that_wait() -> None:
    made = queue(("a", 0), ("b", 0), ("c", 0))
    assert made.starved({0: 2}, 100.0) == ["b", "c"]


def test_a_leg_that_was_heard_of_is_out_of_the_queue() -> None:
    made = queue(("a", 0), ("b", 0))
    made.close("a", 50.0)
    made.close("a", 99.9)
    assert made.starved({0: 2}, 100.0) == ["b"]


def test_a_leg_that_has_just_ended_may_be_the_one_that_is_said_to_wait() -> None:
    made = queue(("waits for its partner", 0), ("was aborted", 0))
    made.close("was aborted", 50.0)
    assert made.starved({0: 1}, 50.0 + OLD_S / 2) == []
    assert made.starved({0: 1}, 50.0 + OLD_S) == ["waits for its partner"]


def test_of_a_leg_that_a_later_one_may_have_overtaken_nothing_is_said() -> None:
    """The urgent one may have its blocks, or the other may have had them before it came."""
    assert queue(("patient", 0), ("urgent", 5)).starved({0: 1}, 100.0) == []
    assert queue(("patient", 0), ("urgent", 5)).starved({0: 2}, 100.0) == ["patient", "urgent"]
    assert queue(("urgent", 5), ("patient", 0)).starved({0: 1}, 100.0) == ["patient"]


def test_each_rank_has_a_queue_of_its_own() -> None:
    made = DecodeQueue(BLOCKS_S)
    made.open("a", 0, 0, 0.0)
    made.open("b", 1, 0, 0.0)
    assert made.starved({0: 0, 1: 1}, 100.0) == ["b"]


def test_a_leg_whose_rank_the_engine_chose_may_be_any_that_waits() -> None:
    made = queue(("a", 0))
    made.open("somewhere", None, 0, 0.0)
    assert made.starved({0: 1}, 100.0) == []
    assert made.starved({0: 2}, 100.0) == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_said_to_starve_waits_for_blocks(seed: int) -> None:
    """An engine that gives blocks in order of priority, then of arrival, whenever it likes."""
    rng, made, said = Random(seed), DecodeQueue(BLOCKS_S), 0
    waits: dict[int, int] = {}
    served: list[int] = []
    for now in range(300):
        match rng.randrange(4):
            case 0 | 1:
                waits[now] = rng.choice([0, 0, 0, 1])
                made.open(str(now), 0, waits[now], float(now))
            case 2 if waits:
                first = min(waits, key=lambda one: (-waits[one], one))
                del waits[first]
                served.append(first)
            case 3 if served:
                made.close(str(served.pop(rng.randrange(len(served)))), float(now))
        starved = made.starved({0: len(waits)}, float(now))
        assert set(starved) <= set(map(str, waits))
        said += len(starved)
    assert said
