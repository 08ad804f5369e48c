"""Re-routes: a limit per surviving worker, first come first served, and an end to waiting."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from frontend_svc.core.reroutes import Reroutes

MODEL = "m"


def test_so_many_go_at_once_per_worker_and_the_next_when_one_has_its_token() -> None:
    reroutes: Reroutes[int] = Reroutes(per_worker=2)
    turns = [reroutes.ask(MODEL, who, float(who), workers=2) for who in range(6)]
    assert turns == ["go"] * 4 + ["wait"] * 2
    assert (reroutes.computing, reroutes.waiting) == (4, 2)
    assert reroutes.leave(MODEL, 1, workers=2) == [4]
    assert reroutes.leave(MODEL, 1, workers=2) == [], "it left once"


def test_the_oldest_request_goes_first_however_late_it_asked() -> None:
    reroutes: Reroutes[str] = Reroutes(per_worker=1)
    assert reroutes.ask(MODEL, "first", 50.0, 1) == "go"
    assert reroutes.ask(MODEL, "young", 90.0, 1) == "wait"
    assert reroutes.ask(MODEL, "old", 10.0, 1) == "wait"
    assert reroutes.leave(MODEL, "first", 1) == ["old"]
    assert reroutes.leave(MODEL, "old", 1) == ["young"]


def test_nobody_overtakes_those_who_wait() -> None:
    reroutes: Reroutes[int] = Reroutes(per_worker=1)
    reroutes.ask(MODEL, 1, 1.0, 1)
    reroutes.ask(MODEL, 2, 2.0, 1)
    assert reroutes.ask(MODEL, 3, 3.0, workers=5) == "wait", "room has come, and 2 was first"
    assert reroutes.leave(MODEL, 1, workers=5) == [2, 3]


def test_who_asks_again_while_it_computes_goes_on() -> None:
    reroutes: Reroutes[int] = Reroutes(per_worker=1)
    assert [reroutes.ask(MODEL, 1, 1.0, 1) for _ in range(3)] == ["go"] * 3
    assert reroutes.computing == 1


def test_beyond_the_queue_a_request_is_told_to_come_again() -> None:
    reroutes: Reroutes[int] = Reroutes(per_worker=1, waiting_max=2)
    assert [reroutes.ask(MODEL, n, 0.0, 1) for n in range(4)] == ["go", "wait", "wait", "full"]


def test_who_goes_away_while_waiting_takes_nobodys_place() -> None:
    reroutes: Reroutes[int] = Reroutes(per_worker=1)
    for who in range(3):
        reroutes.ask(MODEL, who, float(who), 1)
    assert reroutes.leave(MODEL, 1, 1) == []
    assert reroutes.leave(MODEL, 0, 1) == [2]


def test_models_do_not_wait_for_each_other() -> None:
    reroutes: Reroutes[int] = Reroutes(per_worker=1)
    assert reroutes.ask("a", 1, 1.0, 1) == "go"
    assert reroutes.ask("b", 2, 2.0, 1) == "go"


class AnyOrder(RuleBasedStateMachine):
    """Against what is meant: sets of who computes and who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.reroutes: Reroutes[int] = Reroutes(per_worker=2, waiting_max=5)
        self.computing: set[int] = set()
        self.waiting: set[int] = set()
        self.next = 0

    @rule(arrived_at=st.floats(0, 10), workers=st.integers(0, 3))
    def ask(self, arrived_at: float, workers: int) -> None:
        self.next += 1
        turn = self.reroutes.ask(MODEL, self.next, arrived_at, workers)
        if turn == "go":
            assert len(self.computing) < 2 * max(1, workers)
            self.computing.add(self.next)
        elif turn == "wait":
            self.waiting.add(self.next)
        else:
            assert len(self.waiting) == 5

    @rule(data=st.data(), workers=st.integers(0, 3))
    def leave(self, data: st.DataObject, workers: int) -> None:
        known = sorted(self.computing | self.waiting)
        if not known:
            return
        who = data.draw(st.sampled_from(known))
        self.computing.discard(who)
        self.waiting.discard(who)
        let_go = self.reroutes.leave(MODEL, who, workers)
        assert self.waiting.issuperset(let_go)
        self.waiting.difference_update(let_go)
        self.computing.update(let_go)

    @invariant()
    def counts_agree_and_somebody_always_computes(self) -> None:
        found = (self.reroutes.computing, self.reroutes.waiting)
        assert found == (len(self.computing), len(self.waiting))
        assert self.computing or not self.waiting, "who waits is let go by somebody"


def test_in_any_order_of_events_nobody_is_lost_or_waits_for_nobody() -> None:
    few = settings(max_examples=50, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(AnyOrder, settings=few)
