"""The frontend's metrics: two families of names, one guard a request, and bounded labels.

`Metrics` is the older family (`nv_llm_http_service_*`): requests, inflight, duration.
`FrontendMetrics` is the current one (`kvmesh_frontend_*`): time to first token, inter-token
latency, token counts, queued against inflight, disconnects, failures by type.
`DeploymentState` holds both and begins requests; `register` chooses which are exposed.

Invariants: what a guard or a meter counted up it counts down exactly once, however the request
ends; a failure is assumed until `mark_ok`; label values come from the served models and from the
enumerations here, so a client cannot make a series. Registries are the caller's; nothing is global.

Of several gateway processes each has its own registry. Everything is written by one thread, the
event loop's; a scrape may read from another.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from common.errors import Conflict
from common.registry.instances import Instance, Snapshot
from frontend_svc.core.openai.errors import ErrorType
from frontend_svc.core.peers.hit_drift import DriftStats

MetricsRegistry = CollectorRegistry
Clock = Callable[[], float]
# The models served now; asked once a request.
ServedModels = Callable[[], Container[str]]

LEGACY_PREFIX = "nv_llm"
PREFIX = "kvmesh_frontend"
# The label of every model that is not served.
OTHER_MODEL = "other"

DURATION_BUCKETS_S = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


class Endpoint(StrEnum):
    """Values of the label `endpoint`."""

    COMPLETIONS = "completions"
    CHAT_COMPLETIONS = "chat_completions"

    def as_str(self) -> str:
        return self.value


class RequestType(StrEnum):
    """Values of the label `request_type`."""

    UNARY = "unary"
    STREAM = "stream"

    @classmethod
    def of(cls, streaming: bool) -> RequestType:
        return cls.STREAM if streaming else cls.UNARY

    def as_str(self) -> str:
        return self.value


class Status(StrEnum):
    """Values of the label `status`."""

    SUCCESS = "success"
    ERROR = "error"

    def as_str(self) -> str:
        return self.value


def model_label(model: str, served: Container[str]) -> str:
    """`model` where it is served, else `other`: a body must not make series."""
    return model if model in served else OTHER_MODEL


class Metrics:
    """Requests, inflight and duration by model.

    `model` arguments are label values as they are: `DeploymentState` makes them from what a body
    says. Children are cached, since `labels()` costs more than the counting.
    """

    def __init__(self, prefix: str = LEGACY_PREFIX) -> None:
        service = f"{prefix}_http_service"
        self._requests = Counter(
            f"{service}_requests_total",
            "Total number of LLM requests processed",
            ("model", "endpoint", "request_type", "status"),
            registry=None,
        )
        self._inflight = Gauge(
            f"{service}_inflight_requests",
            "Number of inflight requests",
            ("model",),
            registry=None,
        )
        self._durations = Histogram(
            f"{service}_request_duration_seconds",
            "Duration of LLM requests",
            ("model",),
            registry=None,
            buckets=DURATION_BUCKETS_S,
        )
        self._request_children: dict[tuple[str, ...], Counter] = {}
        self._inflight_children: dict[str, Gauge] = {}
        self._duration_children: dict[str, Histogram] = {}

    def register(self, registry: MetricsRegistry) -> None:
        """Exposes the three collectors; Conflict where one of their names is taken."""
        _register(registry, self.collectors)

    @property
    def collectors(self) -> tuple[Collector, ...]:
        return self._requests, self._inflight, self._durations

    def get_request_counter(
        self, model: str, endpoint: Endpoint, request_type: RequestType, status: Status
    ) -> int:
        """Requests that ended so; asking makes no series."""
        child = self._request_children.get((model, endpoint, request_type, status))
        return 0 if child is None else int(_child_value(child))

    def get_inflight_count(self, model: str) -> int:
        """Guards alive; asking makes no series."""
        child = self._inflight_children.get(model)
        return 0 if child is None else int(_child_value(child))

    def inc_request_counter(
        self, model: str, endpoint: Endpoint, request_type: RequestType, status: Status
    ) -> None:
        labels = (model, endpoint, request_type, status)
        child = self._request_children.get(labels)
        if child is None:
            child = self._request_children[labels] = self._requests.labels(*labels)
        child.inc()

    def inc_inflight_gauge(self, model: str) -> None:
        self._inflight_child(model).inc()

    def dec_inflight_gauge(self, model: str) -> None:
        self._inflight_child(model).dec()

    def observe_duration(self, model: str, duration_s: float) -> None:
        child = self._duration_children.get(model)
        if child is None:
            child = self._duration_children[model] = self._durations.labels(model)
        child.observe(duration_s)

    def create_inflight_guard(
        self, model: str, endpoint: Endpoint, streaming: bool, *, clock: Clock = time.monotonic
    ) -> InflightGuard:
        """Counts a request as begun; whoever holds the guard closes it."""
        return InflightGuard(self, model, endpoint, RequestType.of(streaming), clock)

    def _inflight_child(self, model: str) -> Gauge:
        child = self._inflight_children.get(model)
        if child is None:
            child = self._inflight_children[model] = self._inflight.labels(model)
        return child


class InflightGuard:
    """One request in flight, from construction to `close`, which is also the end of `with`.

    Close it where the request is owned, not in the generator that writes the answer: a generator
    that was never started never reaches its `finally`. timer: seconds of `clock` at the start.
    """

    __slots__ = (
        "_clock",
        "_closed",
        "endpoint",
        "metrics",
        "model",
        "request_type",
        "status",
        "timer",
    )

    def __init__(
        self,
        metrics: Metrics,
        model: str,
        endpoint: Endpoint,
        request_type: RequestType,
        clock: Clock,
    ) -> None:
        self.metrics = metrics
        self.model = model
        self.endpoint = endpoint
        self.request_type = request_type
        self.status = Status.ERROR
        self.timer = clock()
        self._clock = clock
        self._closed = False
        metrics.inc_inflight_gauge(model)

    def mark_ok(self) -> None:
        """The answer is complete; without this the request counts as an error."""
        self.status = Status.SUCCESS

    def close(self) -> None:
        """Ends the request's life in the metrics. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.metrics.dec_inflight_gauge(self.model)
        self.metrics.inc_request_counter(self.model, self.endpoint, self.request_type, self.status)
        self.metrics.observe_duration(self.model, self._clock() - self.timer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def log_buckets(low: float, high: float, count: int) -> tuple[float, ...]:
    """0, then `count` bounds from low to high, evenly spaced in the logarithm, 2 digits each.

    bound(i) = low · (high / low)^(i / (count - 1)). Bounds that round to the same are one.
    """
    assert 0 < low < high, "bounds are positive and ascend"
    assert count > 1, "two ends make two bounds"
    ratio = high / low
    bounds = {_round_to_two_digits(low * ratio ** (step / (count - 1))) for step in range(count)}
    return (0.0, *sorted(bounds))


def _round_to_two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value)))


REQUEST_DURATION_BUCKETS_S = log_buckets(1, 512, 10)
INPUT_TOKEN_BUCKETS = log_buckets(50, 128_000, 12)
OUTPUT_TOKEN_BUCKETS = log_buckets(50, 32_000, 10)
TTFT_BUCKETS_S = log_buckets(0.001, 480, 18)
ITL_BUCKETS_S = log_buckets(0.001, 80, 20)


class SingleThreadHistogramChild:
    """The counts of one model. `observe` costs a bisection and two additions."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """`count` times `value`; a value equal to a bound belongs below it."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, observations at or below it), the last bound is +Inf."""
        total = 0
        buckets = []
        # A copy, so that a scrape in another thread sees counts that add up.
        for bound, count in zip((*self._bounds, math.inf), list(self.counts), strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else repr(float(bound)), float(total)))
        return buckets


class SingleThreadHistogram(Collector):
    """A histogram by model that one thread writes, without locks: it is written once a token.

    prometheus_client's takes 5 locks and a linear search an observation, and cannot take several
    equal ones at once.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(float(bound) for bound in bounds)
        self._children: dict[str, SingleThreadHistogramChild] = {}

    def labels(self, model: str) -> SingleThreadHistogramChild:
        child = self._children.get(model)
        if child is None:
            child = self._children[model] = SingleThreadHistogramChild(self._bounds)
        return child

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """The name alone, by which a registry notices duplicates."""
        return (self._family(),)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = self._family()
        for model, child in list(self._children.items()):
            family.add_metric((model,), child.buckets(), child.total)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=("model",))


@dataclass(frozen=True, slots=True)
class ModelSeries:
    """Everything of one model that a request touches, looked up once."""

    inflight: Gauge
    queued: Gauge
    disconnected: Counter
    output_total: Counter
    duration: SingleThreadHistogramChild
    input_tokens: SingleThreadHistogramChild
    output_tokens: SingleThreadHistogramChild
    cached_tokens: SingleThreadHistogramChild
    ttft: SingleThreadHistogramChild
    itl: SingleThreadHistogramChild


class FrontendMetrics:
    """The current family; `model` arguments are label values as they are, as in `Metrics`.

    inflight: begun and not ended. queued: begun and without a first token yet.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", documentation, ("model", *labels), registry=None)

        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(f"{prefix}_{name}", documentation, ("model",), registry=None)

        def histogram(
            name: str, documentation: str, bounds: Sequence[float]
        ) -> SingleThreadHistogram:
            return SingleThreadHistogram(f"{prefix}_{name}", documentation, bounds)

        self._started = counter(
            "requests_started_total", "Requests begun", "endpoint", "request_type"
        )
        self._requests = counter(
            "requests_total", "Requests ended", "endpoint", "request_type", "status", "error_type"
        )
        self._failures = counter("failures_total", "Requests that failed", "endpoint", "error_type")
        self._disconnected = counter(
            "disconnected_clients_total", "Clients gone before their answer was complete"
        )
        self._output_total = counter("output_tokens_total", "Tokens generated")
        self._inflight = gauge("inflight_requests", "Requests begun and not ended")
        self._queued = gauge("queued_requests", "Requests begun and without a first token")
        self._duration = histogram(
            "request_duration_seconds", "Begin to end of a request", REQUEST_DURATION_BUCKETS_S
        )
        self._input = histogram("input_sequence_tokens", "Tokens of a prompt", INPUT_TOKEN_BUCKETS)
        self._output = histogram(
            "output_sequence_tokens", "Tokens of an answer", OUTPUT_TOKEN_BUCKETS
        )
        self._cached = histogram(
            "cached_tokens", "Tokens of a prompt that were in the KV cache", INPUT_TOKEN_BUCKETS
        )
        self._ttft = histogram(
            "time_to_first_token_seconds", "Begin of a request to its first token", TTFT_BUCKETS_S
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "Gap between tokens of a request", ITL_BUCKETS_S
        )
        self._models: dict[str, ModelSeries] = {}
        self._counter_children: dict[tuple[str, ...], Counter] = {}

    @property
    def collectors(self) -> tuple[Collector, ...]:
        return (
            self._started,
            self._requests,
            self._failures,
            self._disconnected,
            self._output_total,
            self._inflight,
            self._queued,
            self._duration,
            self._input,
            self._output,
            self._cached,
            self._ttft,
            self._itl,
        )

    def model(self, model: str) -> ModelSeries:
        children = self._models.get(model)
        if children is None:
            children = self._models[model] = ModelSeries(
                inflight=self._inflight.labels(model),
                queued=self._queued.labels(model),
                disconnected=self._disconnected.labels(model),
                output_total=self._output_total.labels(model),
                duration=self._duration.labels(model),
                input_tokens=self._input.labels(model),
                output_tokens=self._output.labels(model),
                cached_tokens=self._cached.labels(model),
                ttft=self._ttft.labels(model),
                itl=self._itl.labels(model),
            )
        return children

    def count_started(self, model: str, endpoint: Endpoint, request_type: RequestType) -> None:
        self._counter_child(self._started, "started", model, endpoint, request_type).inc()

    def count_ended(
        self,
        model: str,
        endpoint: Endpoint,
        request_type: RequestType,
        status: Status,
        error_type: ErrorType,
    ) -> None:
        labels = (model, endpoint, request_type, status, error_type)
        self._counter_child(self._requests, "requests", *labels).inc()
        if status is Status.ERROR:
            self._counter_child(self._failures, "failures", model, endpoint, error_type).inc()

    def _counter_child(self, counter: Counter, name: str, *labels: str) -> Counter:
        child = self._counter_children.get((name, *labels))
        if child is None:
            child = self._counter_children[(name, *labels)] = counter.labels(*labels)
        return child


class RequestMeter:
    """What one request tells both families, from construction to `close`, the end of `with`.

    As with InflightGuard, close it where the request is owned. `now` arguments are seconds of the
    clock of the `DeploymentState`.
    """

    __slots__ = (
        "_clock",
        "_endpoint",
        "_error_type",
        "_frontend",
        "_guard",
        "_is_closed",
        "_last_s",
        "_model",
        "_output_tokens",
    )

    def __init__(self, guard: InflightGuard, frontend: FrontendMetrics, clock: Clock) -> None:
        self._guard = guard
        self._frontend = frontend
        self._clock = clock
        self._model = frontend.model(guard.model)
        self._error_type = ErrorType.INTERNAL
        self._is_closed = False
        self._last_s = guard.timer
        self._output_tokens = 0
        frontend.count_started(guard.model, guard.endpoint, guard.request_type)
        self._model.inflight.inc()
        self._model.queued.inc()

    def prompt(self, tokens: int) -> None:
        """The prompt's length; once a request, when it is known."""
        self._model.input_tokens.observe(tokens)

    def cached(self, tokens: int) -> None:
        """How much of the prompt was in the KV cache; once a request, when it is known."""
        self._model.cached_tokens.observe(tokens)

    def tokens(self, count: int, now: float) -> None:
        """`count` ≥ 1 tokens of content, reasoning or tool call have come.

        The first call is the time to first token. Tokens that come together share the gap.
        """
        gap_s = now - self._last_s
        self._last_s = now
        if self._output_tokens:
            self._model.itl.observe(gap_s / count, count)
        else:
            self._model.ttft.observe(gap_s)
            self._model.queued.dec()
        self._output_tokens += count

    def mark_ok(self) -> None:
        """The answer is complete."""
        self._guard.mark_ok()

    def mark_failed(self, error_type: ErrorType) -> None:
        """Why the request is about to end without an answer; `internal` where nobody says."""
        self._error_type = error_type

    def mark_disconnected(self) -> None:
        """The client went away before its answer was complete; once a request."""
        self._error_type = ErrorType.CANCELLED
        self._model.disconnected.inc()

    def close(self) -> None:
        """Ends the request's life in the metrics. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        guard, model = self._guard, self._model
        guard.close()
        model.inflight.dec()
        if self._output_tokens:
            model.output_tokens.observe(self._output_tokens)
            model.output_total.inc(self._output_tokens)
        else:
            model.queued.dec()
        model.duration.observe(self._clock() - guard.timer)
        is_ok = guard.status is Status.SUCCESS
        error_type = ErrorType.NONE if is_ok else self._error_type
        self._frontend.count_ended(
            guard.model, guard.endpoint, guard.request_type, guard.status, error_type
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """Both families over the models served now; where every request begins.

    served: label values of `model` come from here and nowhere else. clock: monotonic seconds.
    """

    served: ServedModels
    metrics: Metrics = field(default_factory=Metrics)
    frontend: FrontendMetrics = field(default_factory=FrontendMetrics)
    clock: Clock = time.monotonic

    def register(
        self, registry: MetricsRegistry, *, legacy: bool = True, current: bool = True
    ) -> None:
        """Exposes either family or both; both always count. Conflict where a name is taken."""
        legacy_collectors = self.metrics.collectors if legacy else ()
        current_collectors = self.frontend.collectors if current else ()
        _register(registry, (*legacy_collectors, *current_collectors))

    def create_inflight_guard(
        self, model: str, endpoint: Endpoint, streaming: bool
    ) -> InflightGuard:
        """A guard of the older family alone, for a model as a body names it."""
        label = model_label(model, self.served())
        return self.metrics.create_inflight_guard(label, endpoint, streaming, clock=self.clock)

    def begin(self, model: str, endpoint: Endpoint, streaming: bool) -> RequestMeter:
        """A meter of both families, for a model as a body names it."""
        guard = self.create_inflight_guard(model, endpoint, streaming)
        return RequestMeter(guard, self.frontend, self.clock)


class ModelConfigCollector(Collector):
    """What the workers of each served model advertise, read when it is scraped.

    Capacities are summed over workers, limits of one request are the smallest; a size that nobody
    advertises has no sample, never zero.
    """

    SUMS = ("total_kv_blocks", "max_num_seqs", "max_num_batched_tokens")
    MINIMA = ("context_length", "block_size")

    def __init__(self, snapshot: Callable[[], Snapshot], served: ServedModels, prefix: str) -> None:
        self._snapshot = snapshot
        self._served = served
        self._prefix = prefix

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        served = self._served()
        workers: dict[str, list[Instance]] = {}
        for worker in self._snapshot().of("worker"):
            if worker.model in served:
                workers.setdefault(worker.model, []).append(worker)
        count = GaugeMetricFamily(
            f"{self._prefix}_model_workers", "Workers that serve the model", labels=("model",)
        )
        for model, found in workers.items():
            count.add_metric((model,), len(found))
        yield count
        for name in (*self.SUMS, *self.MINIMA):
            aggregation = (
                "summed over its workers" if name in self.SUMS else "the least of its workers'"
            )
            gauge = GaugeMetricFamily(
                f"{self._prefix}_model_{name}",
                f"{name} of the model, {aggregation}",
                labels=("model",),
            )
            for model, found in workers.items():
                values = [v for w in found if (v := getattr(w, name)) is not None]
                if values:
                    gauge.add_metric((model,), sum(values) if name in self.SUMS else min(values))
            yield gauge


@dataclass(frozen=True, slots=True)
class LabelledDrift:
    """How predictions about a worker's rank have fared; model and worker are label values."""

    model: str
    worker: str
    dp_rank: int
    stats: DriftStats


class HitDriftCollector(Collector):
    """Predicted against actual cached tokens, by worker; read when it is scraped.

    Only workers that are there have samples: a restarted one begins anew.
    """

    LABELS = ("model", "worker", "dp_rank")

    def __init__(self, drift_stats: Callable[[], Iterable[LabelledDrift]], prefix: str) -> None:
        self._source_drifts = drift_stats
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""

        def counter(name: str, documentation: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"{self._prefix}_{name}", documentation, labels=self.LABELS)

        def gauge(name: str, documentation: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"{self._prefix}_{name}", documentation, labels=self.LABELS)

        predicted = counter("kv_predicted_cached_tokens", "Prompt tokens predicted to be cached")
        actual = counter("kv_actual_cached_tokens", "Prompt tokens that were cached")
        requests = counter("kv_predicted_requests", "Requests whose prediction was compared")
        ratio = gauge("kv_drift_ratio", "Share of cached tokens predicted wrongly, of late, 0 to 1")
        degraded = gauge("kv_degraded", "1 where that is above kv_drift_max")
        for entry in self._source_drifts():
            labels = (entry.model, entry.worker, str(entry.dp_rank))
            stats = entry.stats
            predicted.add_metric(labels, stats.predicted)
            actual.add_metric(labels, stats.actual)
            requests.add_metric(labels, stats.requests)
            ratio.add_metric(labels, stats.ratio)
            degraded.add_metric(labels, float(stats.is_degraded))
        yield from (predicted, actual, requests, ratio, degraded)


@dataclass(frozen=True, slots=True)
class ResilienceStats:
    """What this frontend did so that requests survive; counts since its start.

    lost_s: seconds its own loop has lost. retries, retries_refused: attempts after the first that
    its budget allowed and did not. unrouted: placements without a router. rerouted,
    rerouted_waiting: requests being tried again that have no token yet, and those that wait for
    their turn. left_alone: workers that get no requests.
    """

    stalled_s: float
    retries: int
    retries_refused: int
    unrouted: int
    migrations_active: int
    migrations_waiting: int
    excluded_workers: int


class ResilienceCollector(Collector):
    """Shows `ResilienceStats` as it is at a scrape."""

    def __init__(self, read_stats: Callable[[], ResilienceStats], prefix: str) -> None:
        self._read_stats = read_stats
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""
        now, prefix = self._read_stats(), self._prefix
        yield CounterMetricFamily(
            f"{prefix}_loop_lost_seconds",
            "Time the event loop came round late; peers are not judged for it",
            now.stalled_s,
        )
        yield CounterMetricFamily(f"{prefix}_retries", "Attempts after the first", now.retries)
        yield CounterMetricFamily(
            f"{prefix}_retries_refused", "Attempts beyond the retry budget", now.retries_refused
        )
        yield CounterMetricFamily(f"{prefix}_unrouted", "Placements without a router", now.unrouted)
        yield GaugeMetricFamily(
            f"{prefix}_rerouted_requests",
            "Requests tried again, without a token",
            now.migrations_active,
        )
        yield GaugeMetricFamily(
            f"{prefix}_rerouted_waiting_requests",
            "Requests that wait for their turn to be tried again",
            now.migrations_waiting,
        )
        yield GaugeMetricFamily(
            f"{prefix}_workers_left_alone",
            "Workers that get no requests for now",
            now.excluded_workers,
        )


def _register(registry: MetricsRegistry, collectors: Sequence[Collector]) -> None:
    """All of them or none."""
    registered: list[Collector] = []
    for collector in collectors:
        try:
            registry.register(collector)
        except ValueError as error:
            for earlier in registered:
                registry.unregister(earlier)
            raise Conflict(f"metrics are registered already: {error}") from error
        registered.append(collector)


def _child_value(child: Counter | Gauge) -> float:
    """A child's value, through the only public door."""
    (family,) = child.collect()
    return float(family.samples[0].value)
