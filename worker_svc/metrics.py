"""The worker's metrics, read from the runner and the engine at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from common.kv.load import Load
from worker_svc.serving.runner import Runner

PREFIX = "kvmesh_worker"
# Outcomes of requests, and the runner's other counters.
OUTCOMES = (
    *("accepted", "rejected", "finished", "stopped", "failed", "closed"),
    *("stops_forced", "aborts_deferred"),
)
_GAUGES: dict[str, tuple[str, Callable[[Load], float]]] = {
    "running_requests": ("Requests being computed", lambda load: load.running),
    "waiting_requests": ("Requests accepted and not yet scheduled", lambda load: load.waiting),
    "waiting_tokens": ("Prompt tokens waiting for prefill", lambda load: load.waiting_tokens),
    "kv_used_blocks": ("KV blocks of running requests", lambda load: load.kv_used_blocks),
    "kv_total_blocks": ("Total KV blocks", lambda load: load.kv_total_blocks or 0),
    "rooms_open": ("KV handoffs in progress", lambda load: load.rooms_open),
    "engine_step": ("Engine steps since start", lambda load: load.engine_step),
}


class RunnerCollector(Collector):
    """All metrics of one worker; `dp_rank` is the only label without a fixed set of values."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        requests = CounterMetricFamily(
            f"{PREFIX}_requests", "Requests by outcome", labels=("outcome",)
        )
        for outcome in OUTCOMES:
            requests.add_metric((outcome,), self._runner.counters[outcome])
        yield requests
        probes = CounterMetricFamily(
            f"{PREFIX}_canaries", "Probes of an idle engine, by result", labels=("result",)
        )
        failed = self._runner.counters["canaries_failed"]
        probes.add_metric(("ok",), self._runner.counters["canaries"] - failed)
        probes.add_metric(("failed",), failed)
        yield probes
        yield GaugeMetricFamily(
            f"{PREFIX}_open_requests", "Requests admitted and not ended", self._runner.open_requests
        )
        engine = CounterMetricFamily(
            f"{PREFIX}_engine", "Counters of the engine, by name", labels=("name",)
        )
        for name, count in sorted(self._runner.counts().items()):
            if name.startswith("engine_"):
                engine.add_metric((name.removeprefix("engine_"),), count)
        yield engine
        loads = self._runner.engine.loads()
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=("dp_rank",))
            for load in loads:
                gauge.add_metric((str(load.dp_rank),), value(load))
            yield gauge


def worker_registry(runner: Runner) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RunnerCollector(runner))
    return registry
