"""The cheapest workers that meet targets on a trace, by replay (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from replay.engine import WorkerSettings
from replay.mesh import MeshSettings, ReplayMesh, ReplayResult
from replay.plan.speeds import Speeds
from replay.policies import POLICIES
from replay.report import percentile
from replay.trace import TraceRequest

# A worker that is busy for a greater share of the time cannot meet a target.
_BUSY_MAX = 1.0


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
    """95th percentiles in seconds."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Latencies of a fleet in seconds; ITL is the mean of each request. NaN without a request."""

    fleet: Fleet
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    unanswered: int

    def meets(self, targets: Targets) -> bool:
        is_fast = self.ttft_p95_s <= targets.ttft_s and self.itl_p95_s <= targets.itl_s
        return is_fast and not self.unanswered


def predict(
    fleet: Fleet, requests: Sequence[TraceRequest], speeds: Speeds, worker: WorkerSettings
) -> tuple[Prediction, ReplayResult]:
    """Returns the latencies of a fleet, and the replay. worker: its timing is replaced."""
    sized = WorkerSettings(
        worker.total_blocks,
        worker.block_size,
        worker.max_num_seqs,
        worker.max_num_batched_tokens,
        speeds.timing,
        worker.handoff,
    )
    settings = MeshSettings(workers=fleet.workers, prefill_workers=fleet.prefill, worker=sized)
    result = ReplayMesh(settings, POLICIES["kv"]).run(requests)
    ttfts = sorted(
        one.ttft_s + speeds.outside_s for one in result.outcomes if one.ttft_s is not None
    )
    itls = sorted(
        (one.end_s - one.at_s - one.ttft_s) / (one.output_tokens - 1)
        for one in result.outcomes
        if one.end_s is not None and one.ttft_s is not None and one.output_tokens > 1
    )
    prediction = Prediction(
        fleet,
        percentile(ttfts, 0.5),
        percentile(ttfts, 0.95),
        percentile(itls, 0.5),
        percentile(itls, 0.95) if itls else 0.0,
        sum(one.end_s is None for one in result.outcomes),
    )
    return prediction, result


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
    for count in range(fewest(requests, speeds, targets), workers_max + 1):
        is_met = False
        for fleet in fleets(count, splits=splits):
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
