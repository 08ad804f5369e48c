"""Re-routes: a limit per surviving worker, first come first served, and an end to waiting."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from frontend_svc.core.request.migration_limiter import MigrationLimiter, WorkerCount

MODEL = "m"


def left(all_: int, **having: int) -> WorkerCount:
    """So many workers of the model, and of those that have an adapter; others: all have it."""
    return lambda adapter: having.get(adapter, all_)


def test_so_many_go_at_once_per_worker_and_the_next_when_one_has_its_token() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2)
    turns = [migrations.request_permit(MODEL, who, float(who), left(2)) for who in range(6)]
    assert turns == ["go"] * 4 + ["wait"] * 2
    assert (migrations.computing, migrations.waiting) == (4, 2)
    assert migrations.release(MODEL, 1, left(2)) == [4]
    assert migrations.release(MODEL, 1, left(2)) == [], "it left once"


def test_the_oldest_request_goes_first_however_late_it_asked() -> None:
    migrations: MigrationLimiter[str] = MigrationLimiter(per_worker=1)
    assert migrations.request_permit(MODEL, "first", 50.0, left(1)) == "go"
    assert migrations.request_permit(MODEL, "young", 90.0, left(1)) == "wait"
    assert migrations.request_permit(MODEL, "old", 10.0, left(1)) == "wait"
    assert migrations.release(MODEL, "first", left(1)) == ["old"]
    assert migrations.release(MODEL, "old", left(1)) == ["young"]


def test_nobody_overtakes_those_who_wait() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    migrations.request_permit(MODEL, 1, 1.0, left(1))
    migrations.request_permit(MODEL, 2, 2.0, left(1))
    assert migrations.request_permit(MODEL, 3, 3.0, left(5)) == "wait", (
        "room has come, and 2 was first"
    )
    assert migrations.release(MODEL, 1, left(5)) == [2, 3]


def test_who_asks_again_while_it_computes_goes_on() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    assert [migrations.request_permit(MODEL, 1, 1.0, left(1)) for _ in range(3)] == ["go"] * 3
    assert migrations.computing == 1


def test_beyond_the_queue_a_request_is_told_to_come_again() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1, waiting_max=2)
    assert [migrations.request_permit(MODEL, n, 0.0, left(1)) for n in range(4)] == [
        "go",
        "wait",
        "wait",
        "full",
    ]


def test_who_goes_away_while_waiting_takes_nobodys_place() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    for who in range(3):
        migrations.request_permit(MODEL, who, float(who), left(1))
    assert migrations.release(MODEL, 1, left(1)) == []
    assert migrations.release(MODEL, 0, left(1)) == [2]


def test_models_do_not_wait_for_each_other() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    assert migrations.request_permit("a", 1, 1.0, left(1)) == "go"
    assert migrations.request_permit("b", 2, 2.0, left(1)) == "go"


def test_an_adapter_that_one_of_many_workers_has_gets_that_ones_share() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2)
    there = left(10, french=1)
    turns = [migrations.request_permit(MODEL, who, float(who), there, "french") for who in range(4)]
    assert turns == ["go"] * 2 + ["wait"] * 2
    assert migrations.release(MODEL, 0, there) == [2], "one came for one that went"


def test_who_waits_for_an_adapters_worker_holds_up_nobody_who_can_run_elsewhere() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=1)
    there = left(4, french=1, german=1)
    asked = ["french", "french", "", "german", "german", "", ""]
    turns = [
        migrations.request_permit(MODEL, n, float(n), there, adapter)
        for n, adapter in enumerate(asked)
    ]
    assert turns == ["go", "wait", "go", "go", "wait", "go", "wait"], "four workers, four at once"
    assert migrations.release(MODEL, 2, there) == [6], "older ones wait for workers that are taken"
    assert migrations.release(MODEL, 3, there) == [4]
    assert migrations.release(MODEL, 0, there) == [1]


def test_adapters_together_get_no_more_than_their_models_workers_do() -> None:
    migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2)
    turns = [
        migrations.request_permit(MODEL, n, float(n), left(2), f"adapter {n}") for n in range(5)
    ]
    assert turns == ["go"] * 4 + ["wait"]


class AnyOrder(RuleBasedStateMachine):
    """Against what is meant: sets of who computes and who waits, with their adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.migrations: MigrationLimiter[int] = MigrationLimiter(per_worker=2, waiting_max=5)
        self.computing: dict[int, str] = {}
        self.waiting: dict[int, str] = {}
        self.next = 0

    def computing_of(self, adapter: str) -> int:
        return list(self.computing.values()).count(adapter)

    @rule(
        arrived_at=st.floats(0, 10),
        workers=st.integers(0, 3),
        having=st.integers(0, 3),
        adapter=st.sampled_from(["", "french", "german"]),
    )
    def request_permit(self, arrived_at: float, workers: int, having: int, adapter: str) -> None:
        self.next += 1
        having = min(having, workers)
        there = left(workers, french=having)
        turn = self.migrations.request_permit(MODEL, self.next, arrived_at, there, adapter)
        if turn == "go":
            assert len(self.computing) < 2 * max(1, workers)
            if adapter == "french":
                assert self.computing_of(adapter) < 2 * max(1, having)
            assert adapter not in self.waiting.values(), "nobody is overtaken"
            self.computing[self.next] = adapter
        elif turn == "wait":
            self.waiting[self.next] = adapter
        else:
            assert len(self.waiting) == 5

    @rule(data=st.data(), workers=st.integers(0, 3), having=st.integers(0, 3))
    def release(self, data: st.DataObject, workers: int, having: int) -> None:
        known = sorted(self.computing | self.waiting)
        if not known:
            return
        having = min(having, workers)
        who = data.draw(st.sampled_from(known))
        self.computing.pop(who, None)
        self.waiting.pop(who, None)
        let_go = self.migrations.release(MODEL, who, left(workers, french=having))
        for one in let_go:
            self.computing[one] = self.waiting.pop(one)
        if let_go:
            assert len(self.computing) <= 2 * max(1, workers)
        if "french" in [self.computing[one] for one in let_go]:
            assert self.computing_of("french") <= 2 * max(1, having)
        if len(self.computing) < 2 * max(1, workers):
            assert set(self.waiting.values()) <= {"french"}, "the others have room"
            assert not self.waiting or self.computing_of("french") >= 2 * max(1, having)

    @invariant()
    def counts_agree_and_somebody_always_computes(self) -> None:
        found = (self.migrations.computing, self.migrations.waiting)
        assert found == (len(self.computing), len(self.waiting))
        assert self.computing or not self.waiting, "who waits is let go by somebody"


def test_in_any_order_of_events_nobody_is_lost_or_waits_for_nobody() -> None:
    few = settings(max_examples=50, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(AnyOrder, settings=few)
