"""Two families of metrics, the meter of a request, and bounded labels.

`Metrics` is the older family (`nv_llm_http_service_*`): requests, inflight, duration.
`FrontendMetrics` is the current one (`kvmesh_frontend_*`): time to first token, inter-token
latency, token counts, queued against inflight, disconnects, failures by type.
`DeploymentState` holds both and begins requests; `register` chooses which are exposed.

Invariants: a guard or a meter undoes its increments exactly once, however the request ends; a
request counts as failed until `mark_ok`; label values come from the served models, from the
table of routes and from the enumerations here, so a client cannot create series. The caller
supplies the registry; nothing is global. The event loop's thread writes; a scrape may read from
another thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from common.errors import Conflict
from common.service.histogram import (
    SingleThreadHistogram,
    SingleThreadHistogramChild,
    log_buckets,
)
from frontend_svc.errors import ErrorType
from frontend_svc.metrics.gauges import Across, WrittenGauge

MetricsRegistry = CollectorRegistry
Clock = Callable[[], float]
# Returns the models served now; called once a request.
ServedModels = Callable[[], Container[str]]

LEGACY_PREFIX = "nv_llm"
PREFIX = "kvmesh_frontend"
# The label of every model that is not served.
OTHER_MODEL = "other"

DURATION_BUCKETS_S = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_INPUT_TOKENS = (50, 128_000, 12)


class RequestType(StrEnum):
    """Values of the label `request_type`."""

    UNARY = "unary"
    STREAM = "stream"


class Status(StrEnum):
    """Values of the label `status`."""

    SUCCESS = "success"
    ERROR = "error"


def model_label(model: str, served: Container[str]) -> str:
    """Returns `model` if it is served, else `other`: a request body must not create series."""
    return model if model in served else OTHER_MODEL


class _Closing:
    """Calls `close` at the end of `with`."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Metrics:
    """Requests, inflight and duration by model. `model` arguments are label values;
    `DeploymentState` maps the model of a body to one. Children are cached: `labels()` costs more
    than the counting."""

    def __init__(self, prefix: str = LEGACY_PREFIX) -> None:
        service = f"{prefix}_http_service"
        self._requests = Counter(
            f"{service}_requests_total",
            "Total number of LLM requests processed",
            ("model", "endpoint", "request_type", "status"),
            registry=None,
        )
        self._inflight = WrittenGauge(
            f"{service}_inflight_requests", "Number of inflight requests", Across.SUM, ("model",)
        )
        self._durations = Histogram(
            f"{service}_request_duration_seconds",
            "Duration of LLM requests",
            ("model",),
            registry=None,
            buckets=DURATION_BUCKETS_S,
        )
        self._requests_child = cache(self._requests.labels)
        self._inflight_child = cache(self._inflight.labels)
        self._durations_child = cache(self._durations.labels)

    def register(self, registry: MetricsRegistry) -> None:
        _register(registry, self.collectors)

    @property
    def collectors(self) -> tuple[Collector, ...]:
        return self._requests, self._inflight, self._durations

    def inc_request_counter(
        self, model: str, endpoint: str, request_type: RequestType, status: Status
    ) -> None:
        self._requests_child(model, endpoint, request_type, status).inc()

    def inc_inflight_gauge(self, model: str) -> None:
        self._inflight_child(model).inc()

    def dec_inflight_gauge(self, model: str) -> None:
        self._inflight_child(model).dec()

    def observe_duration(self, model: str, duration_s: float) -> None:
        self._durations_child(model).observe(duration_s)

    def create_inflight_guard(
        self, model: str, endpoint: str, streaming: bool, *, clock: Clock = time.monotonic
    ) -> InflightGuard:
        """Counts a request as begun; the caller closes the guard."""
        request_type = RequestType.STREAM if streaming else RequestType.UNARY
        return InflightGuard(self, model, endpoint, request_type, clock)


class InflightGuard(_Closing):
    """One request in flight, from construction to `close`. Close it where the request is owned, not
    in the generator that writes the response: a generator that was never started never reaches its
    `finally`. timer: seconds of `clock` at the start."""

    def __init__(
        self,
        metrics: Metrics,
        model: str,
        endpoint: str,
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
        self.status = Status.SUCCESS

    def close(self) -> None:
        """Counts the request as ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.metrics.dec_inflight_gauge(self.model)
        self.metrics.inc_request_counter(self.model, self.endpoint, self.request_type, self.status)
        self.metrics.observe_duration(self.model, self._clock() - self.timer)


@dataclass(frozen=True, slots=True)
class ModelSeries:
    """All series of one model that a request updates, looked up once. inflight: begun and not
    ended. queued: begun and without a first token yet."""

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


# By attribute of ModelSeries: name, help, and the rule across processes for a gauge, the arguments
# of `log_buckets` for a histogram.
_GAUGES = {
    "inflight": ("inflight_requests", "Requests begun and not ended", Across.SUM),
    "queued": ("queued_requests", "Requests begun and without a first token", Across.SUM),
}
_COUNTERS = {
    "disconnected": (
        "disconnected_clients_total",
        "Clients that disconnected before the end of a response",
    ),
    "output_total": ("output_tokens_total", "Tokens generated"),
}
_HISTOGRAMS = {
    "duration": (
        "request_duration_seconds",
        "Time from the start to the end of a request",
        (1, 512, 10),
    ),
    "input_tokens": ("input_sequence_tokens", "Tokens of a prompt", _INPUT_TOKENS),
    "output_tokens": ("output_sequence_tokens", "Tokens of a response", (50, 32_000, 10)),
    "cached_tokens": (
        "cached_tokens",
        "Tokens of a prompt that were in the KV cache",
        _INPUT_TOKENS,
    ),
    "ttft": (
        "time_to_first_token_seconds",
        "Time from the start of a request to its first token",
        (0.001, 480, 18),
    ),
    "itl": ("inter_token_latency_seconds", "Time between tokens of a request", (0.001, 80, 20)),
}


class FrontendMetrics:
    """The current family; `model` arguments are label values, as in `Metrics`."""

    def __init__(self, prefix: str = PREFIX) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", text, ("model", *labels), registry=None)

        started = counter("requests_started_total", "Requests begun", "endpoint", "request_type")
        outcome = ("endpoint", "request_type", "status", "error_type")
        ended = counter("requests_total", "Requests ended", *outcome)
        failures = counter("failures_total", "Requests that failed", "endpoint", "error_type")
        refused = counter("refused_bodies_total", "Bodies refused", "endpoint", "code")
        alias_requests = Counter(
            f"{prefix}_alias_requests_total",
            "Requests to configured aliases by the model that serves them: by weight, or fallback",
            ("alias", "model", "reason"),
            registry=None,
        )
        targets = counter(
            "latency_targets_total", "Latency targets by outcome", "target", "outcome"
        )
        self.websockets = WrittenGauge(
            f"{prefix}_websockets", "Open WebSockets of the Responses API", Across.SUM
        )
        by_model: dict[str, Counter | WrittenGauge | SingleThreadHistogram] = {
            attribute: counter(name, text) for attribute, (name, text) in _COUNTERS.items()
        }
        for attribute, (name, text, across) in _GAUGES.items():
            by_model[attribute] = WrittenGauge(f"{prefix}_{name}", text, across, ("model",))
        for attribute, (name, text, range_) in _HISTOGRAMS.items():
            bounds = log_buckets(*range_)
            by_model[attribute] = SingleThreadHistogram(f"{prefix}_{name}", text, bounds)

        @cache
        def series(model: str) -> ModelSeries:
            children: dict[str, Any] = {a: family.labels(model) for a, family in by_model.items()}
            return ModelSeries(**children)

        totals = (started, ended, failures, refused, targets, alias_requests)
        self.collectors: tuple[Collector, ...] = (*totals, self.websockets, *by_model.values())
        self.model = series
        # Children are cached: see `Metrics`.
        self.started, self.ended = cache(started.labels), cache(ended.labels)
        self.failures, self.refused = cache(failures.labels), cache(refused.labels)
        self.targets = cache(targets.labels)
        self.alias_requests = alias_requests.labels


class CanaryMetrics:
    """Canaries of a frontend; `model` arguments are names of served models."""

    def __init__(self, prefix: str = PREFIX) -> None:
        failures = Counter(
            f"{prefix}_canary_failures_total",
            "Canaries that failed, by what they did not get",
            ("model", "stage"),
            registry=None,
        )
        durations = SingleThreadHistogram(
            f"{prefix}_canary_duration_seconds",
            "Time from the start to the end of a canary that was served",
            log_buckets(0.001, 60, 16),
        )
        self.collectors: tuple[Collector, ...] = (failures, durations)
        self.failures, self.durations = failures.labels, durations.labels

    def register(self, registry: MetricsRegistry) -> None:
        _register(registry, self.collectors)


# Requests on idle capacity, whose waits are no measure of the mesh.
BATCH_ENDPOINT = "batch"


class RequestMeter(_Closing):
    """Counts one request in both families, from construction to `close`. Close it where the request
    is owned; see InflightGuard. `now` arguments are seconds of the clock of the
    `DeploymentState`."""

    def __init__(
        self, guard: InflightGuard, frontend: FrontendMetrics, clock: Clock, trace_id: str = ""
    ) -> None:
        """Counts the request as begun. trace_id: of a sampled trace, for exemplars; "": none."""
        self._guard = guard
        self._frontend = frontend
        self._clock = clock
        self._trace_id = trace_id
        self._model = frontend.model(guard.model)
        self._is_timed = guard.endpoint != BATCH_ENDPOINT
        self._error_type = ErrorType.INTERNAL
        self._is_closed = False
        self._last_s = guard.timer
        self._output_tokens = 0
        frontend.started(guard.model, guard.endpoint, guard.request_type).inc()
        self._model.inflight.inc()
        self._model.queued.inc()

    def prompt(self, tokens: int) -> None:
        self._model.input_tokens.observe(tokens)

    def cached(self, tokens: int) -> None:
        """Records how many prompt tokens were in the KV cache; once a request."""
        self._model.cached_tokens.observe(tokens)

    def tokens(self, count: int, now: float) -> None:
        """Records `count` >= 1 tokens of content, reasoning or tool call. The first call is the
        time to first token. Tokens of one call share the gap."""
        gap_s = now - self._last_s
        self._last_s = now
        if self._output_tokens:
            if self._is_timed:
                self._model.itl.observe(gap_s / count, count)
        else:
            if self._is_timed:
                self._model.ttft.observe_traced(gap_s, self._trace_id)
            self._model.queued.dec()
        self._output_tokens += count

    def mark_ok(self) -> None:
        self._guard.mark_ok()

    def target_ended(self, target: str, outcome: str) -> None:
        """Counts a latency target of the request: one of TARGETS and OUTCOMES of
        `endpoints/latency_targets.py`."""
        self._frontend.targets(self._guard.model, target, outcome).inc()

    def mark_failed(self, error_type: ErrorType, refusal: str | None = None) -> None:
        """Sets the error type of a failed request, which is `internal` without this call. refusal:
        the code of a refused body; None for other failures."""
        self._error_type = error_type
        if refusal is not None:
            self._frontend.refused(self._guard.model, self._guard.endpoint, refusal).inc()

    def mark_disconnected(self) -> None:
        """Counts a client that disconnected before the end of its response; once a request."""
        self._error_type = ErrorType.CANCELLED
        self._model.disconnected.inc()

    def close(self) -> None:
        """Counts the request as ended. Idempotent."""
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
        if self._is_timed:
            model.duration.observe_traced(self._clock() - guard.timer, self._trace_id)
        labels, frontend = (guard.model, guard.endpoint), self._frontend
        if guard.status is Status.SUCCESS:
            self._error_type = ErrorType.NONE
        else:
            frontend.failures(*labels, self._error_type).inc()
        frontend.ended(*labels, guard.request_type, guard.status, self._error_type).inc()


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """Both families over the models served now. served: the only source of `model` label values.
    clock: monotonic seconds."""

    served: ServedModels
    metrics: Metrics = field(default_factory=Metrics)
    frontend: FrontendMetrics = field(default_factory=FrontendMetrics)
    clock: Clock = time.monotonic

    def register(
        self, registry: MetricsRegistry, *, legacy: bool = True, current: bool = True
    ) -> None:
        legacy_collectors = self.metrics.collectors if legacy else ()
        current_collectors = self.frontend.collectors if current else ()
        _register(registry, (*legacy_collectors, *current_collectors))

    def create_inflight_guard(self, model: str, endpoint: str, streaming: bool) -> InflightGuard:
        """Returns a guard of the older family only. model: as named by a body."""
        label = model_label(model, self.served())
        return self.metrics.create_inflight_guard(label, endpoint, streaming, clock=self.clock)

    def begin(self, model: str, endpoint: str, streaming: bool, trace_id: str = "") -> RequestMeter:
        """Returns a meter of both families. model: as named by a body. trace_id: see
        RequestMeter."""
        guard = self.create_inflight_guard(model, endpoint, streaming)
        return RequestMeter(guard, self.frontend, self.clock, trace_id)


def _register(registry: MetricsRegistry, collectors: Sequence[Collector]) -> None:
    registered: list[Collector] = []
    for collector in collectors:
        try:
            registry.register(collector)
        except ValueError as error:
            for earlier in registered:
                registry.unregister(earlier)
            raise Conflict(f"metrics are registered already: {error}") from error
        registered.append(collector)
