"""The recommended number of workers: what made other autoscalers flap, stick or overshoot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.registry.instances import Role
from common.scaling.budget import within_budget
from common.scaling.need import PREFILL_SHARE_MAX
from common.scaling.pool import Advice, PoolSample, Reason, ScalingSettings
from common.scaling.scaler import PoolScaler

STEP_S = 15.0
HOUR_S = 3600.0
SETTINGS = ScalingSettings()


def sample_of(work: float, present: int, **fields: Any) -> PoolSample:
    """Returns what workers report of a load that this many of them can just carry."""
    share = work * PREFILL_SHARE_MAX / present if present else 0.0
    given: dict[str, Any] = {
        "prefill": share,
        "ttft_s": 0.2 / max(0.05, 1 - share),
        "in_flight": round(10 * work),
        **fields,
    }
    return replace(PoolSample(present, present), **given)


class Bed:
    """A pool that follows the recommendation. start_s: None: asked workers never come."""

    def __init__(
        self,
        present: int,
        config: ScalingSettings = SETTINGS,
        role: Role = "aggregated",
        start_s: float | None = 60.0,
    ) -> None:
        self.scaler = PoolScaler(role, config)
        self.present = present
        self.now = 0.0
        self.start_s = start_s
        self.advice = Advice(present, Reason.STEADY)
        self.counts: list[int] = []
        self._asked_at: float | None = None

    def run(self, seconds: float, work: Callable[[float], float], **fields: Any) -> None:
        """Lets time pass with a load."""
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_S
            self.see(sample_of(work(self.now), self.present, **fields))

    def see(self, sample: PoolSample) -> None:
        self.advice = self.scaler.advise(sample, self.now)
        self.counts.append(self.advice.replicas)
        wanted = self.advice.replicas
        if wanted <= self.present:
            self.present, self._asked_at = wanted, None
        elif self.start_s is not None:
            self._asked_at = self.now if self._asked_at is None else self._asked_at
            if self.now - self._asked_at >= self.start_s:
                self.present, self._asked_at = wanted, None

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in pairwise(self.counts))


def constant(work: float) -> Callable[[float], float]:
    return lambda _: work


@pytest.mark.parametrize("work", [n / 20 for n in range(6, 80, 6)])
@pytest.mark.parametrize("start", [1, 6])
def test_a_constant_load_ends_at_one_count_and_never_oscillates(work: float, start: int) -> None:
    """The failure 2 -> 1 -> 2: the workers that stay were not asked whether they can do the work.
    Noise of a tenth is no reason either."""
    rng = Random(f"{work}:{start}")
    bed = Bed(start)
    bed.run(4 * HOUR_S, lambda _: work * rng.uniform(0.9, 1.1))
    bed.counts.clear()
    bed.run(4 * HOUR_S, lambda _: work * rng.uniform(0.9, 1.1))
    assert bed.changes == 0, bed.counts
    assert work <= bed.present <= 1.25 * 1.1 * work + 2


def test_a_worker_leaves_only_if_the_others_keep_the_targets() -> None:
    late = {"ttft_s": 1.9}
    bed = Bed(2)
    bed.run(2 * HOUR_S, constant(0.6), **late)
    assert bed.present == 2, "1.9 s at a share of 0.24 would be 2.8 s at 0.48"
    bed.run(2 * HOUR_S, constant(0.6), ttft_s=0.5)
    assert (bed.present, bed.advice.reason) == (1, Reason.STEADY)


def test_without_traffic_the_count_falls_to_the_floor_and_with_a_floor_of_0_to_sleep() -> None:
    quiet = {"ttft_s": None, "itl_s": None, "in_flight": 0}
    bed = Bed(4)
    bed.run(2 * HOUR_S, constant(0.0), **quiet)
    assert bed.present == 1
    sleeper = Bed(4, replace(SETTINGS, floor=0))
    sleeper.run(2 * HOUR_S, constant(0.0), **quiet)
    assert sleeper.advice == Advice(0, Reason.ASLEEP)
    sleeper.see(PoolSample(0, 0))
    assert sleeper.advice == Advice(0, Reason.ASLEEP)
    sleeper.see(PoolSample(0, 0, awaiting=3))
    assert sleeper.advice == Advice(1, Reason.WAKE)


def test_a_request_keeps_a_pool_awake_that_may_sleep() -> None:
    bed = Bed(1, replace(SETTINGS, floor=0))
    bed.run(2 * HOUR_S, constant(0.0), ttft_s=None, in_flight=1)
    assert bed.present == 1


def test_late_tokens_ask_once_while_the_workers_that_were_asked_for_start() -> None:
    bed = Bed(4, start_s=None)
    bed.run(SETTINGS.pending_s - 60, constant(3.0), ttft_s=9.0)
    assert bed.advice.replicas == 5
    assert bed.present == 4


def test_workers_that_never_come_do_not_keep_the_count_up() -> None:
    bed = Bed(2, start_s=None)
    bed.run(600, constant(6.0), ttft_s=9.0)
    assert (bed.present, bed.advice.replicas >= 6) == (2, True)
    bed.run(3 * HOUR_S, constant(0.3), ttft_s=0.2)
    assert bed.advice.replicas == 1


def test_an_outage_of_load_reports_holds_the_count() -> None:
    bed = Bed(3, replace(SETTINGS, floor=0))
    bed.run(HOUR_S, constant(2.0))
    held = bed.advice.replicas
    for _ in range(400):
        bed.now += STEP_S
        bed.see(PoolSample(bed.present, 0))
        assert bed.advice == Advice(held, Reason.MISSING_DATA)
    start = bed.now
    while bed.advice.replicas == held:
        bed.now += STEP_S
        bed.see(sample_of(0.2, bed.present))
    assert bed.now - start >= SETTINGS.down_window_s, "the window begins after the outage"


def test_a_worker_without_reports_forbids_a_step_down_and_not_a_step_up() -> None:
    bed = Bed(4)
    bed.run(2 * HOUR_S, constant(0.5), reporting=3)
    assert bed.advice == Advice(4, Reason.MISSING_DATA)
    bed.run(300, constant(6.0), reporting=3)
    assert bed.advice.replicas >= 6


def test_a_target_that_no_count_can_meet_asks_for_no_more_workers() -> None:
    bed = Bed(2, role="decode")
    bed.run(2 * HOUR_S, constant(0.0), kv=0.1, requests=0.1, itl_s=1.0)
    assert max(bed.counts) == 2


def test_late_tokens_of_busy_workers_ask_for_more() -> None:
    bed = Bed(2, role="decode", start_s=None)
    bed.run(120, constant(0.0), kv=0.5, itl_s=0.2)
    assert bed.advice == Advice(3, Reason.PENDING) or bed.advice.reason == Reason.ITL


@pytest.mark.parametrize(
    ("role", "fields", "reason"),
    [
        ("prefill", {"prefill": 2.4}, Reason.PREFILL),
        ("decode", {"kv": 0.99}, Reason.KV),
        ("decode", {"requests": 1.0}, Reason.REQUESTS),
        ("aggregated", {"prefill": 0.1, "kv": 0.99}, Reason.KV),
        ("aggregated", {"prefill": 0.5, "queue_s": 5.0}, Reason.QUEUE),
        ("aggregated", {"prefill": 0.5, "ttft_s": 5.0}, Reason.TTFT),
        ("aggregated", {"prefill": 0.5, "itl_s": 5.0}, Reason.ITL),
    ],
)
def test_the_reason_names_the_signal(role: Role, fields: dict[str, Any], reason: Reason) -> None:
    scaler = PoolScaler(role, SETTINGS)
    advice = Advice(4, Reason.STEADY)
    for step in range(8):
        sample = PoolSample(4, 4, in_flight=1)
        advice = scaler.advise(replace(sample, **fields), step * STEP_S)
        if advice.replicas > 4:
            break
    assert advice.reason == reason
    assert advice.replicas > 4


def test_a_short_peak_is_no_reason() -> None:
    bed = Bed(2)
    bed.run(HOUR_S, constant(1.2))
    bed.counts.clear()
    bed.run(STEP_S, constant(4.0))
    bed.run(HOUR_S, constant(1.2))
    assert bed.changes == 0


def test_bursts_that_return_within_the_window_change_nothing() -> None:
    bed = Bed(4)

    def load(now: float) -> float:
        return 6.0 if now % 3000 < 600 else 3.0

    bed.run(2 * HOUR_S, load)
    bed.counts.clear()
    bed.run(10 * HOUR_S, load)
    assert bed.changes == 0
    assert 6 <= bed.present <= 8


def test_workers_that_an_operator_starts_are_not_stopped_at_once() -> None:
    bed = Bed(2)
    bed.run(HOUR_S, constant(1.2))
    bed.present = 6
    bed.run(SETTINGS.down_window_s - 60, constant(1.2))
    assert bed.present == 6
    bed.run(HOUR_S, constant(1.2))
    assert bed.present == 2


@pytest.mark.parametrize(
    ("role", "fields", "is_back"),
    [
        ("aggregated", {"ttft_s": 0.5}, False),
        ("aggregated", {"ttft_s": 2.5}, True),
        ("decode", {"kv": 0.9}, False),
        ("decode", {"kv": 0.99}, True),
    ],
)
def test_after_a_step_down_a_burst_brings_a_worker_back_if_tokens_are_late_or_workers_full(
    role: Role, fields: dict[str, Any], is_back: bool
) -> None:
    """The burst is more than one worker shall do, and not more than it can do. It ends within the
    quarter of an hour, or lasts."""
    bed = Bed(2, role=role)
    while bed.present == 2:
        bed.run(STEP_S, constant(0.3), kv=0.2)
    bed.run(600, constant(1.2), **fields)
    assert (bed.advice.replicas > 1) == is_back
    bed.run(600, constant(1.2), **fields)
    assert bed.advice.replicas > 1


def test_advice_that_is_not_followed_does_not_change() -> None:
    scaler = PoolScaler("aggregated", SETTINGS)
    counts = [
        scaler.advise(sample_of(0.5, 4), n * STEP_S).replicas
        for n in range(int(4 * HOUR_S / STEP_S))
    ]
    assert counts[-1] == 3, "one less than there are, until it has left"
    assert sum(a != b for a, b in pairwise(counts)) == 1


def test_ceiling_and_floor_are_kept_with_their_reasons() -> None:
    bed = Bed(3, replace(SETTINGS, floor=2, ceiling=3))
    bed.run(300, constant(9.0))
    assert bed.advice == Advice(3, Reason.CEILING)
    bed = Bed(1, replace(SETTINGS, floor=2), start_s=None)
    bed.run(STEP_S, constant(0.0))
    assert bed.advice == Advice(2, Reason.FLOOR)


def test_a_pool_over_budget_gets_its_share_and_none_starves() -> None:
    wanted = {name: Advice(n, Reason.PREFILL) for name, n in {"a": 8, "b": 4, "c": 1}.items()}
    granted = within_budget(wanted, 7)
    assert {name: one.replicas for name, one in granted.items()} == {"a": 4, "b": 2, "c": 1}
    assert granted["a"].reason == Reason.BUDGET
    assert granted["c"] == wanted["c"]
    assert within_budget(wanted, None) == within_budget(wanted, 13) == wanted


@settings(max_examples=50)
@given(st.dictionaries(st.integers(0, 9), st.integers(0, 12), max_size=6), st.integers(1, 40))
def test_a_budget_is_never_exceeded_and_never_left_unused(
    counts: dict[int, int], budget: int
) -> None:
    wanted = {key: Advice(count, Reason.STEADY) for key, count in counts.items()}
    granted = within_budget(wanted, budget)
    assert sum(one.replicas for one in granted.values()) == min(budget, sum(counts.values()))
    assert all(granted[key].replicas <= counts[key] for key in counts)
