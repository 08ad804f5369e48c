"""The cheapest workers that meet targets on a trace, by replay (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from random import Random
from typing import Any

from replay.engine import WorkerSettings
from replay.mesh import MeshSettings, ReplayMesh, ReplayResult
from replay.plan.speeds import Speeds
from replay.policies import POLICIES
from replay.report import percentile
from replay.trace import TraceRequest

# A worker that is busy for a greater share of the time cannot meet a target.
_BUSY_MAX = 1.0
# Replays behind a prediction. In all but the first, each request arrives up to _JITTER_S later: a
# real mesh meets the same requests at slightly other times, and equal workers in another order.
REPLAYS = 5
_JITTER_S = 0.02


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers: aggregated ones, or prefill and decode workers."""

    aggregated: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def workers(self) -> int:
        return self.aggregated + self.prefill + self.decode

    def __str__(self) -> str:
        if self.aggregated:
            return f"{self.aggregated} aggregated"
        return f"{self.prefill} prefill + {self.decode} decode"


@dataclass(frozen=True, slots=True)
class Targets:
    """95th percentiles in seconds; None: any."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """Latencies of a fleet in seconds; ITL is the mean of each request. Without a request that has
    one, a latency is NaN. Percentiles are of all replays together."""

    fleet: Fleet
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    unanswered: int
    ttft_p95_range_s: tuple[float, float]
    """Of the single replays."""

    itl_p95_range_s: tuple[float, float]
    """Of the single replays."""

    def meets(self, targets: Targets) -> bool:
        return (
            not self.unanswered
            and _is_within(self.ttft_p95_s, targets.ttft_s)
            and _is_within(self.itl_p95_s, targets.itl_s)
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields; None for NaN, which JSON does not have."""
        fields: dict[str, Any] = asdict(self)
        for name, value in fields.items():
            if isinstance(value, float):
                fields[name] = None if math.isnan(value) else value
            elif isinstance(value, tuple):
                fields[name] = [None if math.isnan(one) else one for one in value]
        return fields


def _is_within(value: float, target: float | None) -> bool:
    """Returns whether a latency meets a target; that of no request meets any."""
    return target is None or math.isnan(value) or value <= target


@dataclass(frozen=True, slots=True)
class _Latencies:
    """Of one replay, in order of size."""

    ttfts: list[float]
    itls: list[float]
    unanswered: int


def predict(
    fleet: Fleet,
    requests: Sequence[TraceRequest],
    speeds: Speeds,
    worker: WorkerSettings,
    replays: int = REPLAYS,
) -> tuple[Prediction, ReplayResult]:
    """Returns the latencies of a fleet, and the first replay. worker: its timing and its steps are
    replaced."""
    sized = replace(
        worker,
        max_num_batched_tokens=speeds.chunk_tokens,
        is_mixed=speeds.is_mixed,
        timing=speeds.timing,
    )
    results: list[ReplayResult] = []
    for seed in range(1, replays + 1):
        settings = MeshSettings(
            workers=fleet.workers, prefill_workers=fleet.prefill, worker=sized, seed=seed
        )
        arrivals = requests if seed == 1 else _jittered(requests, seed)
        results.append(ReplayMesh(settings, POLICIES["kv"]).run(arrivals))
    found = [_latencies(result, speeds) for result in results]
    ttfts = sorted(value for one in found for value in one.ttfts)
    itls = sorted(value for one in found for value in one.itls)
    ttft_p95s = [percentile(one.ttfts, 0.95) for one in found]
    itl_p95s = [percentile(one.itls, 0.95) for one in found]
    prediction = Prediction(
        fleet,
        percentile(ttfts, 0.5),
        percentile(ttfts, 0.95),
        percentile(itls, 0.5),
        percentile(itls, 0.95),
        max(one.unanswered for one in found),
        (min(ttft_p95s), max(ttft_p95s)),
        (min(itl_p95s), max(itl_p95s)),
    )
    return prediction, results[0]


def _latencies(result: ReplayResult, speeds: Speeds) -> _Latencies:
    done = [one for one in result.outcomes if one.end_s is not None and one.ttft_s is not None]
    return _Latencies(
        sorted((one.ttft_s or 0.0) + speeds.outside_s for one in done),
        sorted(
            ((one.end_s or 0.0) - one.at_s - (one.ttft_s or 0.0)) / (one.output_tokens - 1)
            for one in done
            if one.output_tokens > 1
        ),
        len(result.outcomes) - len(done),
    )


def _jittered(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    rng = Random(seed)
    later = [replace(one, at_s=one.at_s + rng.uniform(0.0, _JITTER_S)) for one in requests]
    return sorted(later, key=lambda one: one.at_s)


def search(
    requests: Sequence[TraceRequest],
    speeds: Speeds,
    worker: WorkerSettings,
    targets: Targets,
    workers_max: int,
    *,
    splits: bool,
) -> Iterator[Prediction]:
    """Yields the predictions of fleets from the smallest on; ends with the smallest size at which
    one meets the targets, or at `workers_max`. splits: also prefill and decode workers."""
    # A fleet that is far from the targets is replayed once.
    far = Targets(*(None if target is None else 2 * target for target in astuple(targets)))
    for count in range(fewest(requests, speeds, targets), workers_max + 1):
        is_met = False
        for fleet in fleets(count, splits=splits):
            prediction, _ = predict(fleet, requests, speeds, worker, replays=1)
            if prediction.meets(far):
                prediction, _ = predict(fleet, requests, speeds, worker)
            yield prediction
            is_met |= prediction.meets(targets)
        if is_met:
            return


def fleets(count: int, *, splits: bool) -> Iterator[Fleet]:
    """Yields the fleets of a size."""
    yield Fleet(aggregated=count)
    if splits:
        for prefill in range(1, count):
            yield Fleet(prefill=prefill, decode=count - prefill)


def fewest(requests: Sequence[TraceRequest], speeds: Speeds, targets: Targets) -> int:
    """Returns a lower bound of the workers, by the prompts that share nothing with others: the last
    one may take until the target of TTFT."""
    if targets.ttft_s is None:
        return 1
    span_s = max(1.0, requests[-1].at_s + targets.ttft_s)
    known: set[int] = set()
    tokens = 0
    for request in requests:
        new = sum(name not in known for name in request.hash_ids)
        known.update(request.hash_ids)
        blocks = len(request.hash_ids)
        tokens += round(request.input_tokens * (new / blocks if blocks else 1.0))
    return max(1, int(tokens * speeds.prefill_token_s / span_s / _BUSY_MAX))


def cheapest(predictions: Sequence[Prediction], targets: Targets) -> Prediction | None:
    """Returns the smallest fleet that meets the targets, of equal ones the one with the lowest
    TTFT; None if none does."""
    fits = [one for one in predictions if one.meets(targets)]
    return min(fits, key=lambda one: (one.fleet.workers, one.ttft_p95_s), default=None)
