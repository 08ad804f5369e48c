"""Rules that choose the number of workers: that of KVMesh, and others for comparison (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from common.scaling.pool import PoolSample, ScalingSettings
from common.scaling.scaler import PoolScaler
from worker_svc.engines.sim.timing import Timing


class Rule(Protocol):
    """Chooses a count at each sample."""

    def choose(self, sample: PoolSample, traffic: Traffic, now: float) -> int: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """What arrived since the sample before: what a planner outside the mesh reads."""

    requests: int
    input_tokens: int
    output_tokens: int
    interval_s: float


class MeshRule:
    """The rule of the router."""

    def __init__(self, settings: ScalingSettings) -> None:
        self._scaler = PoolScaler("aggregated", settings)

    def choose(self, sample: PoolSample, traffic: Traffic, now: float) -> int:
        return self._scaler.advise(sample, now).replicas


class ConstantRule:
    """Always the same number."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def choose(self, sample: PoolSample, traffic: Traffic, now: float) -> int:
        return self._replicas


# The interval at which NVIDIA Dynamo's planner adjusts its counts.
ADJUSTMENT_S = 180.0


class PlannerRule:
    """The throughput-based rule of NVIDIA Dynamo's planner, as its design page describes it:

        correction = measured TTFT / TTFT of the profile, at most 1 in the formula
        replicas = ceil(requests * input tokens / interval * correction / tokens per worker and s)

    once an interval, with the traffic of the last one as the prediction. The throughput of a worker
    is the highest one at which the profile meets the target. An interval without traffic changes
    nothing.
    """

    def __init__(self, timing: Timing, settings: ScalingSettings) -> None:
        self._timing = timing
        self._settings = settings
        self._traffic: list[Traffic] = []
        self._ttfts: list[float] = []
        self._replicas: int | None = None

    def choose(self, sample: PoolSample, traffic: Traffic, now: float) -> int:
        if self._replicas is None:
            self._replicas = sample.present
        self._traffic.append(traffic)
        if sample.ttft_s is not None:
            self._ttfts.append(sample.ttft_s)
        interval_s = sum(one.interval_s for one in self._traffic)
        if interval_s < ADJUSTMENT_S:
            return self._replicas
        requests = sum(one.requests for one in self._traffic)
        tokens = sum(one.input_tokens for one in self._traffic)
        if requests and self._ttfts:
            expected_s = self._timing.step_s(tokens // requests, 1, 0)
            correction = min(1.0, sum(self._ttfts) / len(self._ttfts) / expected_s)
            # A profile runs one prompt after the other: a worker that is always busy.
            worker_tokens_per_s = tokens / requests / expected_s
            replicas = math.ceil(tokens / interval_s * correction / worker_tokens_per_s)
            self._replicas = max(1, min(self._settings.ceiling, replicas))
        self._traffic, self._ttfts = [], []
        return self._replicas
