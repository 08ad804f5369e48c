"""How many workers the load of a sample needs, by role (pure).

Work is a number of workers: present workers times their share in use, divided by the share that
leaves room for the targets. It does not depend on how many workers are present, so it is also what
N - 1 workers would have to do. Latency is not proportional to the number of workers; it can only
ask for a step up, and forbid a step down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.registry.instances import Role
from common.scaling.pool import PoolSample, Reason, ScalingSettings

# Shares of what a worker can do at most. The wait for a server that is busy for the share u is
# u / (1 - u) services on average: 4 at 0.8.
PREFILL_SHARE_MAX = 0.8
KV_SHARE_MAX = 0.85
REQUESTS_SHARE_MAX = 0.9
# Below this share of all of them more workers do not make tokens faster.
IDLE_SHARE = 0.3
# Above this share of KV blocks or batches, requests wait for room.
FULL_SHARE = 0.95
# A step up because of late tokens, as a share of the present workers.
LATE_STEP = 0.25


@dataclass(frozen=True, slots=True)
class Need:
    """What the load of a pool needs."""

    work: float
    """Number of workers by the signal that needs most; it has no upper limit."""

    work_reason: Reason
    late: int
    """Number of workers because of late tokens; 0: none is late."""

    late_reason: Reason
    is_full: bool
    """Whether requests wait for KV blocks or for a place in a batch, or soon will."""


def _need(
    sample: PoolSample,
    shares: Mapping[Reason, float],
    latencies: Mapping[Reason, tuple[float | None, float]],
) -> Need:
    """Returns the need by shares of their limits, and by latencies with their targets."""
    reason = max(shares, key=lambda name: shares[name])
    work, late, late_reason = sample.present * shares[reason], 0, Reason.STEADY
    if shares[reason] > IDLE_SHARE:
        for name, (seconds, target_s) in latencies.items():
            if seconds is not None and seconds > target_s:
                late, late_reason = math.ceil(sample.present * (1 + LATE_STEP)), name
                break
    is_full = max(sample.kv, sample.requests) > FULL_SHARE
    return Need(work, reason, late, late_reason, is_full)


def _first_token(
    sample: PoolSample, settings: ScalingSettings
) -> dict[Reason, tuple[float | None, float]]:
    target_s = settings.ttft_target_s
    return {
        Reason.QUEUE: (sample.queue_s, target_s),
        Reason.TTFT: (sample.ttft_s, target_s),
    }


def prefill_need(sample: PoolSample, settings: ScalingSettings) -> Need:
    """Returns the need of workers that compute prompts."""
    shares = {Reason.PREFILL: sample.prefill / PREFILL_SHARE_MAX}
    return _need(sample, shares, _first_token(sample, settings))


def decode_need(sample: PoolSample, settings: ScalingSettings) -> Need:
    """Returns the need of workers that generate tokens."""
    shares = {
        Reason.KV: sample.kv / KV_SHARE_MAX,
        Reason.REQUESTS: sample.requests / REQUESTS_SHARE_MAX,
    }
    return _need(sample, shares, {Reason.ITL: (sample.itl_s, settings.itl_target_s)})


def aggregated_need(sample: PoolSample, settings: ScalingSettings) -> Need:
    """Returns the need of workers that do both."""
    shares = {
        Reason.PREFILL: sample.prefill / PREFILL_SHARE_MAX,
        Reason.KV: sample.kv / KV_SHARE_MAX,
        Reason.REQUESTS: sample.requests / REQUESTS_SHARE_MAX,
    }
    itl = {Reason.ITL: (sample.itl_s, settings.itl_target_s)}
    return _need(sample, shares, _first_token(sample, settings) | itl)


NEEDS: Mapping[Role, Callable[[PoolSample, ScalingSettings], Need]] = {
    "aggregated": aggregated_need,
    "prefill": prefill_need,
    "decode": decode_need,
}


def can_lose_one(sample: PoolSample, settings: ScalingSettings) -> bool:
    """Returns whether the latencies of a sample stay within the targets with one worker fewer:

        ttft' = ttft * (1 - u) / (1 - u')    u: prefill share, u' = u * N / (N - 1)
        itl'  = itl * N / (N - 1)

    The first is the response time of a queue with one server, the second an upper bound: a part of
    each step does not depend on the number of requests. A latency above its target that hardly any
    load causes does not matter.
    """
    present = sample.present
    if present <= 1:
        return True
    growth = present / (present - 1)
    busy = max(sample.prefill, sample.kv, sample.requests)
    if busy <= IDLE_SHARE * (present - 1) / present:
        return True
    if sample.ttft_s is not None:
        left = 1 - sample.prefill * growth
        if left <= 0 or sample.ttft_s * (1 - sample.prefill) / left > settings.ttft_target_s:
            return False
    return sample.itl_s is None or sample.itl_s * growth <= settings.itl_target_s
