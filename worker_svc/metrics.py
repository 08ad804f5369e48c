"""The worker's metrics, read from the runner and the engine at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry

from common.kv.load import Load
from common.service.state_metrics import Reading, StateCollector, counter, gauge
from worker_svc.serving.runner import Runner
from worker_svc.serving.usage_details import CACHED, DRAFTS

PREFIX = "kvmesh_worker"
# Outcomes of requests, and the runner's other counters.
OUTCOMES = (
    *("accepted", "rejected", "finished", "stopped", "failed", "closed"),
    *("stops_forced", "aborts_deferred", "stalled", "invalid_output"),
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


def read_runner(runner: Runner) -> Iterator[Reading]:
    """Yields the metrics of one worker; `dp_rank` is the only label without a fixed set of
    values."""
    counters = runner.counters
    outcomes = {outcome: counters[outcome] for outcome in OUTCOMES}
    yield counter("requests", "Requests by outcome", outcomes, label="outcome")
    failed = counters["canaries_failed"]
    probes = {"ok": counters["canaries"] - failed, "failed": failed}
    yield counter("canaries", "Probes of an idle engine, by result", probes, label="result")
    loads = {"ok": counters["adapters_placed"], "failed": counters["adapters_failed"]}
    yield counter("adapter_loads", "Loads of placed adapters, by result", loads, label="result")
    cached = {tier: counters[f"cached_tokens_{tier}"] for tier in CACHED}
    text = "Prompt tokens of ended requests that were in the KV cache, by tier"
    yield counter("cached_tokens", text, cached, label="tier")
    drafts = {result: counters[f"draft_tokens_{result}"] for result in DRAFTS}
    text = "Drafted tokens of speculative decoding in ended requests, by result"
    yield counter("draft_tokens", text, drafts, label="result")
    text = "Legs of requests that failed because of their handoff, by reason"
    failures = {reason.lower(): count for reason, count in runner.handoff_failures.items()}
    yield counter("handoff_failures", text, failures, label="reason")
    is_failing = bool(runner.engine_failure)
    yield gauge("engine_failing", "1 if the engine fails its probes", is_failing)
    yield gauge("open_requests", "Requests admitted and not ended", runner.open_requests)
    engine = {
        name.removeprefix("engine_"): count
        for name, count in sorted(runner.counts().items())
        if name.startswith("engine_")
    }
    yield counter("engine", "Counters of the engine, by name", engine, label="name")
    ranks = runner.engine.loads()
    for name, (text, value) in _GAUGES.items():
        yield gauge(name, text, {str(rank.dp_rank): value(rank) for rank in ranks}, label="dp_rank")


def worker_registry(runner: Runner) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(StateCollector(PREFIX, partial(read_runner, runner)))
    return registry
