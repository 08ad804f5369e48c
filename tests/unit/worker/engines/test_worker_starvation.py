"""Detection of legs that wait for blocks, from their count."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from worker_svc.engines.sglang.starvation import COUNT_AGE_MAX_S, StarvationDetector

BLOCKS_S = 7.5


def queue(*leg_ids: str) -> StarvationDetector:
    """Legs of rank 0, opened at 0."""
    made = StarvationDetector(BLOCKS_S)
    for leg_id in leg_ids:
        made.open(leg_id, 0, 0.0)
    return made


def test_a_single_leg_starves_after_waiting_long_enough_for_blocks() -> None:
    made = queue("a")
    assert made.find_starved(0, 1, 0.0, BLOCKS_S - 0.1) == []
    assert made.find_starved(0, 1, 0.0, BLOCKS_S) == ["a"]


def test_a_leg_that_has_its_blocks_waits_for_its_partner_and_does_not_starve() -> None:
    assert queue("a").find_starved(0, 0, 0.0, 100.0) == []


def test_a_count_below_all_legs_identifies_none_since_a_later_one_may_have_passed() -> None:
    """The engine gives blocks to a later leg that reached its prefill worker first."""
    made = queue("was not ready", "overtook it and has its blocks")
    assert made.find_starved(0, 1, 0.0, 100.0) == []
    assert made.find_starved(0, 2, 0.0, 100.0) == [
        "was not ready",
        "overtook it and has its blocks",
    ]


def test_only_legs_that_waited_long_enough_starve() -> None:
    made = queue("a")
    made.open("b", 0, 5.0)
    assert made.find_starved(0, 2, 0.0, BLOCKS_S) == ["a"]


def test_a_leg_with_output_does_not_starve() -> None:
    made = queue("a", "b")
    made.close("a", 50.0)
    made.close("a", 99.9)
    assert made.find_starved(0, 1, 0.0, 100.0) == ["b"]


def test_a_leg_that_just_ended_may_still_be_counted() -> None:
    made = queue("waits for its partner", "was aborted")
    made.close("was aborted", 50.0)
    assert made.find_starved(0, 1, 0.0, 50.0 + COUNT_AGE_MAX_S / 2) == []
    assert made.find_starved(0, 1, 0.0, 50.0 + COUNT_AGE_MAX_S) == ["waits for its partner"]


def test_a_count_from_before_the_end_of_a_leg_may_be_of_that_leg() -> None:
    made = queue("waits for its partner", "was aborted")
    made.close("was aborted", 50.0)
    assert made.find_starved(0, 1, COUNT_AGE_MAX_S / 2, 50.0 + COUNT_AGE_MAX_S) == []


@pytest.mark.parametrize("age", [COUNT_AGE_MAX_S, 60.0, -0.1])
def test_an_old_or_future_count_is_ignored(age: float) -> None:
    assert queue("a").find_starved(0, 1, age, 100.0) == []


def test_a_leg_opened_after_the_count_is_not_included() -> None:
    made = queue("a")
    made.open("b", 0, 99.9)
    assert made.find_starved(0, 1, 0.2, 100.0) == ["a"]
    assert made.find_starved(0, 1, 0.0, 100.0) == []


def test_each_rank_has_a_queue_of_its_own() -> None:
    made = StarvationDetector(BLOCKS_S)
    made.open("a", 0, 0.0)
    made.open("b", 1, 0.0)
    made.open("c", 2, 0.0)
    made.close("c", 100.0)
    assert made.find_starved(0, 0, 0.0, 100.0) == []
    assert made.find_starved(1, 1, 0.0, 100.0) == ["b"]


def test_a_leg_without_a_rank_may_be_on_any() -> None:
    made = queue("a")
    made.open("somewhere", None, 0.0)
    assert made.find_starved(0, 1, 0.0, 100.0) == []
    assert made.find_starved(0, 2, 0.0, 100.0) == ["a", "somewhere"]
    made.close("somewhere", 100.0)
    assert made.find_starved(0, 1, 0.0, 100.0) == []


def test_each_leg_is_visited_once_and_none_if_the_count_is_zero() -> None:
    class Counted(dict[str, object]):
        walks = 0

        def items(self) -> Iterator[tuple[str, object]]:  # type: ignore[override]
            self.walks += 1
            return iter(super().items())

    made = queue(*map(str, range(1000)))
    legs = made._legs = Counted(made._legs)  # type: ignore[assignment]
    assert made.find_starved(0, 0, 0.0, 100.0) == []
    assert legs.walks == 0
    assert len(made.find_starved(0, 1000, 0.0, 100.0)) == 1000
    assert legs.walks == 1


@pytest.mark.parametrize("seed", range(20))
def test_every_starved_leg_waits_for_blocks(seed: int) -> None:
    """An engine that gives blocks in any order at any time, and reports it with a delay."""
    rng, made, starved_count = Random(seed), StarvationDetector(BLOCKS_S), 0
    waits: list[str] = []
    served: list[str] = []
    for step in range(3000):
        now = step / 4
        match rng.randrange(12):
            case 0:
                waits.append(str(step))
                made.open(str(step), 0, now)
            case 1 if waits:
                served.append(waits.pop(rng.randrange(len(waits))))
            case 2 | 3 | 4 if served:
                made.close(served.pop(rng.randrange(len(served))), now)
        count, age = len(waits), rng.choice([0.0, 0.2])
        find_starved = made.find_starved(0, count, age, now + age)
        assert set(find_starved) <= set(waits)
        starved_count += len(find_starved)
    assert starved_count
