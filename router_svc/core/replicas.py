"""The recommended number of workers of each pool (pure).

Pools are those with workers, and those of models that were served or that a frontend is configured
to serve. With several routers each computes the counts, from the same bookings and load reports;
the count of a pool is the greatest of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from common.scaling.budget import within_budget
from common.scaling.pool import Advice, PoolSample, ScalingSettings
from common.scaling.scaler import PoolScaler
from router_svc.core.demand import Demand
from router_svc.core.pools import PoolKey, PoolObserver
from router_svc.core.router import Router

TICK_S = 1.0
SAMPLE_S = 5.0
# A pool whose workers left is forgotten after this time, unless a frontend is configured to serve
# its model.
FORGOTTEN_S = 3600.0


@dataclass(slots=True)
class PoolReplicas:
    """A pool with its last sample and the advice for it. left_at: since when it has no worker.
    is_guess: it never had one, so its role is not known."""

    scaler: PoolScaler
    sample: PoolSample
    advice: Advice
    left_at: float | None = None
    is_guess: bool = True

    @property
    def state(self) -> str:
        """`awake`, `asleep` without need of a worker, or `waking` until the first one serves."""
        if self.sample.present:
            return "awake"
        return "waking" if self.advice.replicas else "asleep"


class Replicas:
    """The pools of one router."""

    def __init__(self, router: Router, settings: ScalingSettings) -> None:
        self.demand = Demand()
        self._observer = PoolObserver(router)
        self._settings = settings
        self._pools: dict[PoolKey, PoolReplicas] = {}
        self._sampled_at: float | None = None

    def __iter__(self) -> Iterator[tuple[PoolKey, PoolReplicas]]:
        """Yields the pools, sorted. Any thread may call it."""
        # A copy first: another thread may add a pool meanwhile.
        pools = tuple(self._pools.items())
        return iter(sorted(pools, key=lambda item: item[0]))

    def tick(self, now: float) -> None:
        """Call it each TICK_S. now: seconds of the clock of the router's core."""
        self._observer.tick(now)
        if self._sampled_at is None or now - self._sampled_at >= SAMPLE_S:
            self._sampled_at = now
            self._advise(now)

    def _advise(self, now: float) -> None:
        awaiting = self.demand.by_model()
        samples = self._observer.samples(now, awaiting)
        for key, sample in self._with_absent(samples, awaiting).items():
            self._advise_pool(key, sample, now)
        self._forget(awaiting, now)
        advice = {key: pool.advice for key, pool in sorted(self._pools.items())}
        for key, one in within_budget(advice, self._settings.budget).items():
            self._pools[key].advice = one

    def _with_absent(
        self, samples: Mapping[PoolKey, PoolSample], awaiting: Mapping[str, int]
    ) -> dict[PoolKey, PoolSample]:
        """Returns the samples, with those of pools without a worker."""
        known = {key.model for key in (*samples, *self._pools)}
        absent = [key for key in self._pools if key not in samples]
        absent += [PoolKey(model, "aggregated") for model in awaiting if model not in known]
        without = {key: PoolSample(0, 0, awaiting=awaiting.get(key.model, 0)) for key in absent}
        return {**without, **samples}

    def _advise_pool(self, key: PoolKey, sample: PoolSample, now: float) -> None:
        pool = self._pools.get(key)
        if pool is None:
            scaler = PoolScaler(key.role, self._settings)
            pool = PoolReplicas(scaler, sample, scaler.advise(sample, now))
            self._pools[key] = pool
        else:
            pool.sample, pool.advice = sample, pool.scaler.advise(sample, now)
        if sample.present:
            pool.left_at, pool.is_guess = None, False
        elif pool.left_at is None:
            pool.left_at = now

    def _forget(self, awaiting: Mapping[str, int], now: float) -> None:
        known = {key.model for key, pool in self._pools.items() if not pool.is_guess}
        for key, pool in list(self._pools.items()):
            is_gone = pool.left_at is not None and now - pool.left_at >= FORGOTTEN_S
            is_disproved = pool.is_guess and key.model in known
            if is_disproved or ((is_gone or pool.is_guess) and key.model not in awaiting):
                del self._pools[key]
