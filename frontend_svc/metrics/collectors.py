"""Collectors that read the frontend's state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, get_args

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from common.registry.instances import Instance, Role, Service
from common.service.base import ROUTABLE_TEXT
from frontend_svc.members import Members
from frontend_svc.metrics.families import ServedModels
from frontend_svc.metrics.gauges import Across, GaugeFamily
from frontend_svc.metrics.hit_drift import DriftStats

_Family: TypeAlias = CounterMetricFamily | GaugeFamily


class _Counter(NamedTuple):
    """Declares a counter."""

    name: str
    text: str

    def family(self, prefix: str, labels: Sequence[str] = ()) -> CounterMetricFamily:
        return CounterMetricFamily(f"{prefix}_{self.name}", self.text, labels=labels)


class _Gauge(NamedTuple):
    """Declares a gauge."""

    name: str
    text: str
    across: Across

    def family(self, prefix: str, labels: Sequence[str] = ()) -> GaugeFamily:
        return GaugeFamily(f"{prefix}_{self.name}", self.text, self.across, labels=labels)


class ModelConfigCollector(Collector):
    """What the workers of each served model advertise. A size that no worker advertises has no
    sample. prefix: of the metric names."""

    SUMS = ("total_kv_blocks", "max_num_seqs", "max_num_batched_tokens")
    MINIMA = ("context_length", "block_size")

    def __init__(self, members: Members, served: ServedModels, prefix: str) -> None:
        self._members = members
        self._served = served
        self._prefix = prefix

    def collect(self) -> Iterator[GaugeFamily]:
        served = self._served()
        workers: dict[str, list[Instance]] = {}
        for worker in self._members.snapshot.of("worker"):
            if worker.model in served:
                workers.setdefault(worker.model, []).append(worker)
        count = self._gauge("workers", "Workers that serve the model")
        for model, found in workers.items():
            count.add_metric((model,), len(found))
        yield count
        for names, aggregate, text in (
            (self.SUMS, sum, "sum over its workers"),
            (self.MINIMA, min, "minimum of its workers"),
        ):
            for name in names:
                gauge = self._gauge(name, f"{name} of the model, {text}")
                for model, found in workers.items():
                    values = [v for w in found if (v := getattr(w, name)) is not None]
                    if values:
                        gauge.add_metric((model,), aggregate(values))
                yield gauge

    def _gauge(self, name: str, text: str) -> GaugeFamily:
        return GaugeFamily(f"{self._prefix}_model_{name}", text, Across.MAX, labels=("model",))


class MemberCollector(Collector):
    """How many members are registered, by role: the service, or the legs that a worker runs."""

    ROLES = (*(name for name in get_args(Service) if name != "worker"), *get_args(Role))

    def __init__(self, members: Members, prefix: str) -> None:
        self._members = members
        self._prefix = prefix

    def collect(self) -> Iterator[GaugeFamily]:
        counts = dict.fromkeys(self.ROLES, 0)
        for member in self._members.snapshot.instances.values():
            counts[member.role if member.service == "worker" else member.service] += 1
        text = "Registered members by role: the service, or the legs that a worker runs"
        family = _Gauge("members", text, Across.MAX).family(self._prefix, ("role",))
        for role, count in counts.items():
            family.add_metric((role,), count)
        yield family


class HitDriftCollector(Collector):
    """Predicted and actual cached tokens by worker. A worker that has left has no samples."""

    LABELS = ("model", "worker", "dp_rank")
    METRICS: tuple[_Counter | _Gauge, ...] = (
        _Counter("kv_predicted_cached_tokens", "Prompt tokens predicted to be cached"),
        _Counter("kv_actual_cached_tokens", "Prompt tokens that were cached"),
        _Counter("kv_predicted_requests", "Requests with a compared prediction"),
        _Gauge(
            "kv_drift_ratio",
            "Share of cached tokens predicted wrongly in the last minute, 0 to 1",
            Across.MAX,
        ),
        _Gauge("kv_degraded", "1 if kv_drift_ratio is above kv_drift_max", Across.MAX),
    )

    def __init__(
        self,
        drift_stats: Callable[[], Iterable[tuple[tuple[str, str, str], DriftStats]]],
        prefix: str,
    ) -> None:
        self._drift_stats = drift_stats
        self._prefix = prefix

    def collect(self) -> Iterator[_Family]:
        families = [metric.family(self._prefix, self.LABELS) for metric in self.METRICS]
        for labels, stats in self._drift_stats():
            values = (stats.predicted, stats.actual, stats.requests, stats.ratio, stats.is_degraded)
            for family, value in zip(families, values, strict=True):
                family.add_metric(labels, float(value))
        yield from families


class RecordCollector(Collector):
    """Counts of each file of records. counts: written and dropped records by file."""

    def __init__(self, counts: Callable[[], Mapping[str, tuple[int, int]]], prefix: str) -> None:
        self._counts = counts
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily]:
        texts = {"written": "Records written", "dropped": "Records lost: queue full, disk error"}
        for index, (name, text) in enumerate(texts.items()):
            metric = f"{self._prefix}_records_{name}"
            family = CounterMetricFamily(metric, text, labels=("file",))
            for file, counts in self._counts().items():
                family.add_metric((file,), counts[index])
            yield family


class StoreCollector(Collector):
    """Responses that the batch service did not take. count: of this process."""

    def __init__(self, count: Callable[[], int], prefix: str) -> None:
        self._count = count
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "Stored responses that are in memory only, because the batch service did not take"
        family = CounterMetricFamily(f"{self._prefix}_responses_not_durable", f"{text} them")
        family.add_metric((), self._count())
        yield family


class CircuitCollector(Collector):
    """Open circuits of workers by cause. counts: of each cause."""

    def __init__(self, counts: Callable[[], Mapping[str, int]], prefix: str) -> None:
        self._counts = counts
        self._prefix = prefix

    def collect(self) -> Iterator[GaugeFamily]:
        gauge = _Gauge("open_circuits", "Open circuits of workers, by cause", Across.MAX)
        family = gauge.family(self._prefix, ("cause",))
        for cause, count in self._counts().items():
            family.add_metric((cause,), count)
        yield family


class CanaryCollector(Collector):
    """The newest result of each model's canaries. read: by model, whether it was a success, and
    the seconds since the last one; None if there was none."""

    def __init__(
        self, read: Callable[[], Mapping[str, tuple[bool, float | None]]], prefix: str
    ) -> None:
        self._read = read
        self._prefix = prefix

    def collect(self) -> Iterator[GaugeFamily]:
        text = "1 if the newest canary of the model was served"
        success = _Gauge("canary_success", text, Across.MIN).family(self._prefix, ("model",))
        text = "Time since a canary of the model was served"
        age = _Gauge("canary_age_seconds", text, Across.MAX).family(self._prefix, ("model",))
        for model, (is_success, age_s) in self._read().items():
            success.add_metric((model,), float(is_success))
            if age_s is not None:
                age.add_metric((model,), age_s)
        yield success
        yield age


class WaitCollector(Collector):
    """Requests that wait for a worker, by model. counts: of each configured model, and of others
    for which requests wait."""

    def __init__(self, counts: Callable[[], Mapping[str, int]], prefix: str) -> None:
        self._counts = counts
        self._prefix = prefix

    def collect(self) -> Iterator[GaugeFamily]:
        text = "Requests that wait because no worker of the model can serve them"
        gauge = _Gauge("model_awaiting_worker_requests", text, Across.SUM)
        family = gauge.family(self._prefix, ("model",))
        for model, count in self._counts().items():
            family.add_metric((model,), count)
        yield family


class ResilienceCollector(Collector):
    """What this frontend did to save requests. read_values: one value for each of METRICS."""

    METRICS: tuple[_Counter | _Gauge, ...] = (
        _Counter("retries", "Attempts after the first"),
        _Counter("retries_refused", "Attempts after overload beyond the retry budget"),
        _Counter("unrouted", "Placements without a router"),
        _Gauge("rerouted_requests", "Requests tried again, without a token", Across.SUM),
        _Gauge(
            "rerouted_waiting_requests",
            "Requests that wait for a permit to be tried again",
            Across.SUM,
        ),
        _Gauge(
            "awaiting_worker_requests",
            "Requests that wait because no worker of their model can serve them",
            Across.SUM,
        ),
        _Gauge("excluded_workers", "Workers that get no requests now", Across.MAX),
        _Gauge("routable", ROUTABLE_TEXT, Across.MIN),
    )

    def __init__(self, read_values: Callable[[], Iterable[float]], prefix: str) -> None:
        self._read_values = read_values
        self._prefix = prefix

    def collect(self) -> Iterator[_Family]:
        for metric, value in zip(self.METRICS, self._read_values(), strict=True):
            family = metric.family(self._prefix)
            family.add_metric((), value)
            yield family
