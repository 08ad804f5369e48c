"""A pool of workers whose number changes, in virtual time (pure).

Fast enough for days: a request costs a few microseconds, since its course is computed when it
arrives. A worker computes prompts in order of arrival, with one token for each running request in
each step, as the sim engine does with one prompt a step:

    prompt_s = base_s * steps + prefill_token_s * tokens + decode_seq_s * requests * steps
    itl_s = 1 / ((1 - u) / (base_s + decode_seq_s * requests) + u / prompt_s)

u: share of time with a prompt, last minute.

A request goes to the worker that is free first. A worker that leaves ends its requests first. The
test of this module compares it with `ReplayMesh`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.scaling.pool import PoolSample
from replay.engine import WorkerSettings
from replay.trace import TraceRequest

# Of the share of time with a prompt.
_USE_S = 60.0


@dataclass(slots=True)
class _Worker:
    """One worker. ends: of its requests, as (end, KV tokens). use: share of time with prompts,
    decayed over _USE_S."""

    ready_at: float
    free_at: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    kv_tokens: int = 0
    use: float = 0.0
    used_at: float = 0.0
    is_leaving: bool = False

    def end_requests(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            self.kv_tokens -= heapq.heappop(self.ends)[1]

    def add_use(self, now: float, busy_s: float) -> float:
        """Adds time with a prompt; returns the share after it."""
        self.use = self.use * math.exp((self.used_at - now) / _USE_S) + busy_s / _USE_S
        self.used_at = now
        return min(1.0, self.use)


@dataclass(slots=True)
class Served:
    """The course of one request."""

    at_s: float
    ttft_s: float
    itl_s: float


class ElasticPool:
    """Workers that come and go."""

    def __init__(self, settings: WorkerSettings, workers: int, start_s: float) -> None:
        """Begins with so many idle workers. start_s: seconds until a further one serves."""
        self._settings = settings
        self._timing = settings.timing
        self._start_s = start_s
        self._workers = [_Worker(0.0) for _ in range(workers)]
        self._tokens = 0
        self._recent: list[Served] = []
        # A heap of the first tokens to come: time and TTFT.
        self._first_tokens: list[tuple[float, float]] = []
        self.worker_s = 0.0
        self._now = 0.0

    @property
    def target(self) -> int:
        """Workers that are there or start, those that leave excepted."""
        return sum(not worker.is_leaving for worker in self._workers)

    def present(self, now: float) -> int:
        """Returns the number of workers that serve."""
        return sum(not w.is_leaving and w.ready_at <= now for w in self._workers)

    def scale(self, replicas: int, now: float) -> None:
        """Starts workers, or lets the newest ones leave."""
        staying = [worker for worker in self._workers if not worker.is_leaving]
        for _ in range(replicas - len(staying)):
            self._workers.append(_Worker(now + self._start_s, free_at=now + self._start_s))
        for worker in staying[replicas:]:
            worker.is_leaving = True

    def advance(self, now: float) -> None:
        """Lets time pass: counts the time of all workers, and removes those that have left."""
        self.worker_s += len(self._workers) * (now - self._now)
        self._now = now
        for worker in self._workers:
            worker.end_requests(now)
        self._workers = [w for w in self._workers if w.ends or not w.is_leaving]

    def serve(self, request: TraceRequest) -> Served:
        """Computes the course of a request that arrives. A worker serves, or starts."""
        now, timing, settings = request.at_s, self._timing, self._settings
        worker = min(
            (w for w in self._workers if not w.is_leaving),
            key=lambda w: w.free_at if w.free_at > now else 0.0,
        )
        worker.end_requests(now)
        running = len(worker.ends)
        steps = -(-request.input_tokens // settings.max_num_batched_tokens)
        prompt_s = steps * timing.step_s(0, running, worker.kv_tokens) + timing.prefill_s(
            request.input_tokens
        )
        begin = max(now, worker.free_at)
        worker.free_at = begin + prompt_s
        use = worker.add_use(now, prompt_s)
        idle_step_s = timing.step_s(0, running + 1, worker.kv_tokens)
        itl_s = 1 / ((1 - use) / idle_step_s + use * steps / prompt_s)
        tokens = request.input_tokens + request.output_tokens
        worker.kv_tokens += tokens
        heapq.heappush(worker.ends, (worker.free_at + itl_s * request.output_tokens, tokens))
        self._tokens += request.input_tokens
        served = Served(now, worker.free_at - now, itl_s)
        heapq.heappush(self._first_tokens, (worker.free_at, served.ttft_s))
        self._recent.append(served)
        return served

    def sample(self, now: float, interval_s: float, drain_s: float) -> PoolSample:
        """Returns what the workers report of the last `interval_s`. drain_s: see PoolSample."""
        self.advance(now)
        settings = self._settings
        serving = [w for w in self._workers if not w.is_leaving and w.ready_at <= now]
        tokens, self._tokens = self._tokens, 0
        arrived: list[float] = []
        while self._first_tokens and self._first_tokens[0][0] <= now:
            arrived.append(heapq.heappop(self._first_tokens)[1])
        itls = [served.itl_s for served in self._recent]
        self._recent = []
        if not serving:
            return PoolSample(0, 0, in_flight=len(self._first_tokens))
        capacity = len(serving) * interval_s
        work_s = self._timing.prefill_s(tokens)
        waiting_s = sum(max(0.0, w.free_at - now) for w in serving)
        blocks = sum(w.kv_tokens for w in serving) / settings.block_size
        running = sum(len(w.ends) for w in serving)
        return PoolSample(
            len(serving),
            len(serving),
            prefill=work_s / capacity + waiting_s / (len(serving) * drain_s),
            kv=blocks / (settings.total_blocks * len(serving)),
            requests=running / (settings.max_num_seqs * len(serving)),
            ttft_s=percentile(arrived, 0.95),
            itl_s=sum(itls) / len(itls) if itls else None,
            in_flight=running,
        )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the value below which `share` of the values lie; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
