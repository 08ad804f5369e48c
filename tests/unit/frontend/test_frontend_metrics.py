from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import httpx
import pytest
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from common.errors import Conflict
from common.registry.instances import Instance, Snapshot
from common.service.histogram import SingleThreadHistogram, log_buckets
from frontend_svc.edge.asgi import Receive, Scope, Send
from frontend_svc.endpoints.plain import PlainEndpoint
from frontend_svc.errors import ErrorType
from frontend_svc.members import Members
from frontend_svc.metrics import families
from frontend_svc.metrics.collectors import (
    CircuitCollector,
    ModelConfigCollector,
    ResilienceCollector,
)
from frontend_svc.metrics.families import (
    DURATION_BUCKETS_S,
    DeploymentState,
    FrontendMetrics,
    InflightGuard,
    Metrics,
    RequestType,
    Status,
)
from frontend_svc.routes.dispatch import Dispatcher
from frontend_svc.routes.handlers import MetricsHandler
from frontend_svc.routes.table import METRICS, ROUTES

CHAT = "chat_completions"


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def state(clock: FakeClock) -> DeploymentState:
    return DeploymentState(lambda: {"m"}, clock=clock)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def series_value(metrics: Metrics, name: str, *labels: str) -> float:
    """The value of one series of the older family; 0: it does not exist."""
    values = {
        (one.name, *one.labels.values()): one.value
        for collector in metrics.collectors
        for family in collector.collect()
        for one in family.samples
    }
    return values.get((f"nv_llm_http_service_{name}", *labels), 0)


def in_flight(metrics: Metrics, model: str) -> float:
    return series_value(metrics, "inflight_requests", model)


def counts(state: DeploymentState, status: Status, model: str = "m", kind: str = "unary") -> float:
    labels = (model, CHAT, kind, status)
    return series_value(state.metrics, "requests_total", *labels)


@pytest.mark.row("S3-01", "S3-02", "S3-31")
def test_the_status_labels_are_success_and_error() -> None:
    assert list(Status) == ["success", "error"]
    assert str(Status.SUCCESS) == "success"
    assert str(Status.ERROR) == "error"


@pytest.mark.row("S3-03", "S3-04", "S3-30")
def test_the_request_type_labels_are_stream_and_unary() -> None:
    assert str(RequestType.STREAM) == "stream"
    assert str(RequestType.UNARY) == "unary"
    assert len(RequestType) == 2


@pytest.mark.row("S3-27", "S3-28")
def test_the_endpoint_labels_are_completions_and_chat_completions() -> None:
    labels = {route.path: route.label for route in ROUTES}
    assert labels["/v1/completions"] == "completions"
    assert labels["/v1/chat/completions"] == "chat_completions"


@pytest.mark.row("S3-05")
def test_the_prefix_is_nv_llm_unless_another_is_given() -> None:
    def names(metrics: Metrics) -> set[str]:
        registry = CollectorRegistry()
        metrics.register(registry)
        return {family.name for family in registry.collect()}

    assert names(Metrics()) == {
        "nv_llm_http_service_requests",
        "nv_llm_http_service_inflight_requests",
        "nv_llm_http_service_request_duration_seconds",
    }
    assert all(name.startswith("mine_http_service_") for name in names(Metrics("mine")))


@pytest.mark.row("S3-06", "S3-07", "S3-08")
def test_each_collector_has_its_name_type_help_and_labels(registry: CollectorRegistry) -> None:
    metrics = Metrics()
    metrics.register(registry)
    metrics.create_inflight_guard("m", CHAT, True).close()
    families = {family.name: family for family in registry.collect()}

    requests = families["nv_llm_http_service_requests"]
    (total,) = [one for one in requests.samples if one.name.endswith("_total")]
    assert (requests.type, requests.documentation) == (
        "counter",
        "Total number of LLM requests processed",
    )
    assert total.name == "nv_llm_http_service_requests_total"
    assert list(total.labels.items()) == [
        ("model", "m"),
        ("endpoint", "chat_completions"),
        ("request_type", "stream"),
        ("status", "error"),
    ]
    inflight = families["nv_llm_http_service_inflight_requests"]
    assert (inflight.type, inflight.documentation) == ("gauge", "Number of inflight requests")
    assert inflight.samples[0].labels == {"model": "m"}
    duration = families["nv_llm_http_service_request_duration_seconds"]
    assert (duration.type, duration.documentation) == ("histogram", "Duration of LLM requests")
    assert {name for one in duration.samples for name in one.labels} == {"model", "le"}


@pytest.mark.row("S3-09")
def test_the_duration_buckets_are_exactly_the_documented_ones(
    registry: CollectorRegistry,
) -> None:
    metrics = Metrics()
    metrics.register(registry)
    metrics.create_inflight_guard("m", CHAT, True).close()
    text = generate_latest(registry).decode()
    bounds = [
        one.labels["le"]
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == "nv_llm_http_service_request_duration_seconds_bucket"
    ]
    assert [float(bound) for bound in bounds] == [*DURATION_BUCKETS_S, float("inf")]
    assert DURATION_BUCKETS_S == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)


@pytest.mark.row("S3-10")
def test_a_scrape_after_one_request_has_every_name(
    state: DeploymentState, registry: CollectorRegistry, clock: FakeClock
) -> None:
    state.register(registry, current=False)
    with state.create_inflight_guard("m", CHAT, False) as guard:
        clock.now += 3.0
        guard.mark_ok()
    lines = generate_latest(registry).decode().splitlines()
    prefix = "nv_llm_http_service_"
    for line in (
        f'{prefix}requests_total{{endpoint="chat_completions",model="m",'
        'request_type="unary",status="success"} 1.0',
        f'{prefix}inflight_requests{{model="m"}} 0.0',
        f'{prefix}request_duration_seconds_bucket{{le="2.0",model="m"}} 0.0',
        f'{prefix}request_duration_seconds_bucket{{le="4.0",model="m"}} 1.0',
        f'{prefix}request_duration_seconds_bucket{{le="+Inf",model="m"}} 1.0',
        f'{prefix}request_duration_seconds_count{{model="m"}} 1.0',
        f'{prefix}request_duration_seconds_sum{{model="m"}} 3.0',
    ):
        assert line in lines


@pytest.mark.row("S3-15")
def test_registering_twice_is_an_error_and_changes_nothing(registry: CollectorRegistry) -> None:
    Metrics().register(registry)
    before = [family.name for family in registry.collect()]
    assert len(before) == 3
    with pytest.raises(Conflict, match="nv_llm_http_service_requests"):
        Metrics().register(registry)
    assert [family.name for family in registry.collect()] == before


def test_a_name_conflict_of_the_last_collector_registers_none(
    registry: CollectorRegistry,
) -> None:
    registry.register(
        SingleThreadHistogram("nv_llm_http_service_request_duration_seconds", "x", (1.0,))
    )
    with pytest.raises(Conflict):
        Metrics().register(registry)
    assert len(list(registry.collect())) == 1


@pytest.mark.row("S3-16")
def test_the_registry_type_is_exported_and_no_global_registry_is_used(
    state: DeploymentState, registry: CollectorRegistry
) -> None:
    from prometheus_client import REGISTRY

    assert families.MetricsRegistry is CollectorRegistry
    state.register(registry)
    assert "nv_llm_http_service" not in generate_latest(REGISTRY).decode()


@pytest.mark.row("S3-17", "S3-18", "S3-20")
def test_a_new_guard_is_counted_timed_and_an_error(
    state: DeploymentState, clock: FakeClock
) -> None:
    guard = state.create_inflight_guard("m", CHAT, False)
    assert isinstance(guard, InflightGuard)
    assert guard.metrics is state.metrics
    assert (guard.model, guard.endpoint, guard.request_type) == ("m", CHAT, RequestType.UNARY)
    assert (guard.status, guard.timer) == (Status.ERROR, clock.now)
    assert in_flight(state.metrics, "m") == 1


@pytest.mark.row("S3-19")
def test_the_streaming_flag_chooses_the_request_type(state: DeploymentState) -> None:
    assert state.create_inflight_guard("m", CHAT, True).request_type is RequestType.STREAM
    assert state.create_inflight_guard("m", CHAT, False).request_type is RequestType.UNARY


@pytest.mark.row("S3-21")
def test_a_guard_marked_ok_is_a_success(state: DeploymentState) -> None:
    with state.create_inflight_guard("m", CHAT, False) as guard:
        guard.mark_ok()
        assert guard.status is Status.SUCCESS
    assert (counts(state, Status.SUCCESS), counts(state, Status.ERROR)) == (1, 0)


def returns(guard: InflightGuard) -> None:
    with guard:
        guard.mark_ok()


def raises(guard: InflightGuard) -> None:
    with contextlib.suppress(RuntimeError), guard:
        raise RuntimeError("in the handler")


def is_cancelled(guard: InflightGuard) -> None:
    async def handler() -> None:
        with guard:
            await asyncio.Event().wait()

    async def cancel() -> None:
        task = asyncio.create_task(handler())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def loses_client(guard: InflightGuard) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        with guard:
            yield b"data: 1"
            yield b"data: 2"
            guard.mark_ok()

    async def disconnect() -> None:
        stream = chunks()
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(disconnect())


def closes_twice(guard: InflightGuard) -> None:
    with guard:
        guard.close()
    guard.close()


@pytest.mark.row("S3-22")
@pytest.mark.parametrize(
    ("end", "status"),
    [
        (returns, Status.SUCCESS),
        (raises, Status.ERROR),
        (is_cancelled, Status.ERROR),
        (loses_client, Status.ERROR),
        (closes_twice, Status.ERROR),
    ],
)
def test_a_guard_counts_exactly_once_on_every_end(
    end: Callable[[InflightGuard], None],
    status: Status,
    state: DeploymentState,
    registry: CollectorRegistry,
) -> None:
    state.register(registry)
    end(state.create_inflight_guard("m", CHAT, False))
    assert in_flight(state.metrics, "m") == 0
    assert counts(state, status) == 1
    assert counts(state, Status.SUCCESS) + counts(state, Status.ERROR) == 1
    name = "nv_llm_http_service_request_duration_seconds_count"
    assert sample(registry, name, model="m") == 1


@pytest.mark.row("S3-23")
def test_an_unmarked_guard_is_an_error(state: DeploymentState) -> None:
    with state.create_inflight_guard("m", CHAT, False):
        pass
    assert (counts(state, Status.SUCCESS), counts(state, Status.ERROR)) == (0, 1)


@pytest.mark.row("S3-24")
def test_an_exception_before_the_first_byte_is_an_error(state: DeploymentState) -> None:
    def first_byte() -> bytes:
        raise ConnectionError("no worker")

    def handler() -> Iterator[bytes]:
        with state.create_inflight_guard("m", CHAT, False) as guard:
            yield first_byte()
            guard.mark_ok()

    with pytest.raises(ConnectionError):
        next(handler())
    assert (counts(state, Status.ERROR), in_flight(state.metrics, "m")) == (1, 0)


@pytest.mark.row("S3-25")
def test_the_inflight_gauge_is_the_number_of_open_guards(state: DeploymentState) -> None:
    guards = []
    for alive in range(1, 6):
        guards.append(state.create_inflight_guard("m", CHAT, alive % 2 == 0))
        assert in_flight(state.metrics, "m") == alive
    for alive in reversed(range(5)):
        guards.pop(alive // 2).close()
        assert in_flight(state.metrics, "m") == alive


@pytest.mark.row("S3-26")
def test_the_duration_is_in_seconds_of_a_monotonic_clock(
    state: DeploymentState, registry: CollectorRegistry, clock: FakeClock
) -> None:
    import time

    assert DeploymentState(lambda: set()).clock is time.monotonic
    state.register(registry)
    with state.create_inflight_guard("m", CHAT, False):
        clock.now += 0.25
    name = "nv_llm_http_service_request_duration_seconds_sum"
    assert sample(registry, name, model="m") == pytest.approx(0.25)


async def send(encode: Callable[[], bytes], method: str = "GET") -> httpx.Response:
    """Returns the response of the route of the metrics."""
    handler = MetricsHandler(lambda _: (encode(), CONTENT_TYPE_PLAIN_0_0_4), METRICS.path)
    endpoint = PlainEndpoint(METRICS, handler.scrape)
    dispatcher = Dispatcher([(METRICS, endpoint)])

    async def without_keys(scope: Scope, receive: Receive, send: Send) -> None:
        await dispatcher({**scope, "state": {}}, receive, send)

    transport = httpx.ASGITransport(app=without_keys)
    async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
        return await client.request(method, METRICS.path)


@pytest.mark.row("S3-35")
async def test_a_scrape_is_the_text_of_the_given_registry_only(
    state: DeploymentState, registry: CollectorRegistry
) -> None:
    state.register(registry)
    state.begin("m", CHAT, True).close()
    other = CollectorRegistry()
    other.register(SingleThreadHistogram("elsewhere", "x", (1.0,)))
    response = await send(partial(generate_latest, registry))
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.content == generate_latest(registry)
    assert b"kvmesh_frontend_requests_total" in response.content
    assert b"elsewhere" not in response.content


class BrokenCollector(Collector):
    def describe(self) -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily("broken", "breaks when scraped")]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        raise RuntimeError("no value")


@pytest.mark.row("S3-36")
async def test_a_registry_that_cannot_be_encoded_returns_500(registry: CollectorRegistry) -> None:
    registry.register(BrokenCollector())
    response = await send(partial(generate_latest, registry))
    assert (response.status_code, response.text) == (500, "Failed to encode metrics")


@pytest.mark.row("S3-37")
async def test_metrics_that_are_not_utf8_return_500() -> None:
    response = await send(lambda: b"model \xff 1")
    assert (response.status_code, response.text) == (500, "Failed to encode metrics")


@pytest.mark.row("S3-38")
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "HEAD"])
async def test_only_get_is_served(registry: CollectorRegistry, method: str) -> None:
    response = await send(partial(generate_latest, registry), method)
    assert (response.status_code, response.headers["allow"]) == (405, "GET")


@pytest.mark.row("S3-39")
@pytest.mark.parametrize(("legacy", "current"), [(True, True), (True, False), (False, True)])
def test_either_family_can_be_exposed_or_both(
    state: DeploymentState, registry: CollectorRegistry, legacy: bool, current: bool
) -> None:
    state.register(registry, legacy=legacy, current=current)
    state.begin("m", CHAT, True).close()
    text = generate_latest(registry).decode()
    assert ("nv_llm_http_service_requests_total{" in text) is legacy
    assert ("kvmesh_frontend_requests_total{" in text) is current


def test_a_name_conflict_in_one_family_exposes_neither(
    state: DeploymentState, registry: CollectorRegistry
) -> None:
    registry.register(SingleThreadHistogram("kvmesh_frontend_cached_tokens", "x", (1.0,)))
    with pytest.raises(Conflict, match="kvmesh_frontend_cached_tokens"):
        state.register(registry)
    assert len(list(registry.collect())) == 1


@pytest.mark.row("S3-40")
def test_first_token_gaps_and_token_counts_are_observed(
    state: DeploymentState, registry: CollectorRegistry, clock: FakeClock
) -> None:
    state.register(registry)
    with state.begin("m", CHAT, True) as meter:
        meter.prompt(100)
        meter.cached(64)
        meter.tokens(1, clock.now + 0.5)
        meter.tokens(4, clock.now + 0.7)
        meter.mark_ok()
    name = "kvmesh_frontend_"
    for metric, expected_sum, expected_count in (
        ("time_to_first_token_seconds", 0.5, 1),
        ("inter_token_latency_seconds", 0.2, 4),
        ("input_sequence_tokens", 100, 1),
        ("output_sequence_tokens", 5, 1),
        ("cached_tokens", 64, 1),
    ):
        assert sample(registry, f"{name}{metric}_sum", model="m") == pytest.approx(expected_sum)
        assert sample(registry, f"{name}{metric}_count", model="m") == expected_count
    assert sample(registry, f"{name}output_tokens_total", model="m") == 5
    # The four tokens share 0.2 s.
    gaps = f"{name}inter_token_latency_seconds_bucket"
    assert sample(registry, gaps, model="m", le="0.035") == 0
    assert sample(registry, gaps, model="m", le="0.064") == 4


def test_the_newest_sampled_request_of_a_bucket_is_its_exemplar(
    state: DeploymentState, registry: CollectorRegistry, clock: FakeClock
) -> None:
    state.register(registry)
    for trace_id, ttft_s in (("aa", 0.5), ("bb", 0.5), ("", 0.5), ("cc", 100.0)):
        with state.begin("m", CHAT, True, trace_id) as meter:
            clock.now += ttft_s
            meter.tokens(1, clock.now)
    text = openmetrics.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    for name in ("time_to_first_token_seconds", "request_duration_seconds"):
        pattern = rf'^kvmesh_frontend_{name}_bucket.* # {{trace_id="(\w+)"}} (\S+) '
        found = re.findall(pattern, text, re.M)
        assert found == [("bb", "0.5"), ("cc", "100.0")]


@pytest.mark.row("S3-41")
def test_queued_ends_with_the_first_token_and_inflight_with_the_request(
    state: DeploymentState, registry: CollectorRegistry, clock: FakeClock
) -> None:
    state.register(registry)

    def gauges() -> tuple[float | None, float | None]:
        return (
            sample(registry, "kvmesh_frontend_queued_requests", model="m"),
            sample(registry, "kvmesh_frontend_inflight_requests", model="m"),
        )

    first, second = state.begin("m", CHAT, True), state.begin("m", CHAT, True)
    assert gauges() == (2, 2)
    first.tokens(1, clock.now)
    first.tokens(1, clock.now)
    assert gauges() == (1, 2)
    first.close()
    assert gauges() == (1, 1)
    second.close()
    second.close()
    assert gauges() == (0, 0)


@pytest.mark.row("S3-42", "S3-44")
def test_disconnects_and_failures_are_counted_by_type(
    state: DeploymentState, registry: CollectorRegistry
) -> None:
    state.register(registry)
    with state.begin("m", CHAT, True) as meter:
        meter.mark_disconnected()
    with state.begin("m", CHAT, True) as meter:
        meter.mark_failed(ErrorType.OVERLOAD)
    with contextlib.suppress(RuntimeError), state.begin("m", CHAT, True):
        raise RuntimeError("a bug")
    with state.begin("m", CHAT, True) as meter:
        meter.mark_ok()

    assert sample(registry, "kvmesh_frontend_disconnected_clients_total", model="m") == 1

    def failures(error_type: str) -> float | None:
        labels = {"model": "m", "endpoint": "chat_completions", "error_type": error_type}
        return sample(registry, "kvmesh_frontend_failures_total", **labels)

    assert [failures(kind) for kind in ("cancelled", "overload", "internal")] == [1, 1, 1]
    assert failures("") is None
    labels = {"endpoint": "chat_completions", "request_type": "stream", "model": "m"}
    ok = {**labels, "status": "success", "error_type": ""}
    assert sample(registry, "kvmesh_frontend_requests_total", **ok) == 1
    assert sample(registry, "kvmesh_frontend_requests_started_total", **labels) == 4


@pytest.mark.row("S3-45")
def test_ten_thousand_junk_models_make_one_label(
    state: DeploymentState, registry: CollectorRegistry
) -> None:
    state.register(registry)

    def series() -> int:
        return sum(len(family.samples) for family in registry.collect())

    state.begin("m", CHAT, True).close()
    state.begin("junk", CHAT, True).close()
    before = series()
    for junk in range(10_000):
        state.begin(f"junk-{junk}", CHAT, True).close()
    assert series() == before
    count = counts(state, Status.ERROR, "other", RequestType.STREAM)
    assert count == 10_001


def test_a_request_keeps_its_label_when_its_model_is_removed(clock: FakeClock) -> None:
    served = {"m"}
    state = DeploymentState(lambda: served, clock=clock)
    guard = state.create_inflight_guard("m", CHAT, False)
    served.clear()
    guard.close()
    assert in_flight(state.metrics, "m") == 0
    assert in_flight(state.metrics, "other") == 0


def test_log_buckets_start_at_zero_and_keep_two_digits() -> None:
    assert log_buckets(1, 512, 10) == (0, 1, 2, 4, 8, 16, 32, 64, 130, 260, 510)
    assert log_buckets(0.001, 10, 5) == (0, 0.001, 0.01, 0.1, 1, 10)


def test_the_histogram_is_encoded_like_that_of_prometheus(
    registry: CollectorRegistry,
) -> None:
    from prometheus_client import Histogram

    bounds = (0.0, 0.5, 1.0, 10.0)
    own, reference_histogram = (
        SingleThreadHistogram("h", "same", bounds),
        Histogram("h", "same", ("model",), registry=None, buckets=bounds),
    )
    for value in (0.0, 0.2, 0.5, 0.500001, 1.0, 9.0, 11.0):
        own.labels("m").observe(value)
        reference_histogram.labels("m").observe(value)
    registry.register(own)
    reference = CollectorRegistry()
    reference.register(reference_histogram)

    def lines(registry: CollectorRegistry) -> list[str]:
        text = generate_latest(registry).decode()
        return sorted(line for line in text.splitlines() if "_created" not in line)

    assert lines(registry) == lines(reference)


def test_the_current_prefix_is_an_argument(registry: CollectorRegistry) -> None:
    for collector in FrontendMetrics("mine").collectors:
        registry.register(collector)
    assert {family.name.split("_")[0] for family in registry.collect()} == {"mine"}


@pytest.mark.row("S3-43")
def test_advertised_sizes_are_gauges_and_missing_ones_have_no_sample() -> None:
    def worker(number: int, **sizes: int) -> Instance:
        return Instance(
            id=number,
            namespace="n",
            service="worker",
            stable_name=f"w{number}",
            address="127.0.0.1:1",
            model="m",
            **sizes,  # type: ignore[arg-type]
        )

    snapshot = Snapshot().next_snapshot(
        [
            worker(1, total_kv_blocks=100, context_length=4096),
            worker(2, total_kv_blocks=50, context_length=2048),
        ]
    )
    registry = CollectorRegistry()
    registry.register(ModelConfigCollector(Members(snapshot), lambda: {"m"}, "kvmesh_frontend"))

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"kvmesh_frontend_model_{name}", {"model": "m"})

    assert value("workers") == 2
    assert value("total_kv_blocks") == 150
    assert value("context_length") == 2048
    assert value("max_num_seqs") is None


def test_resilience_stats_are_read_at_each_scrape() -> None:
    unrouted = 0
    registry = CollectorRegistry()
    registry.register(ResilienceCollector(lambda: (0, 0, unrouted, 0, 0, 2, 1, True), "p"))
    for unrouted in (3, 7):
        assert registry.get_sample_value("p_unrouted_total") == unrouted
        assert registry.get_sample_value("p_excluded_workers") == 1
        assert registry.get_sample_value("p_awaiting_worker_requests") == 2


def test_open_circuits_are_counted_by_cause() -> None:
    registry = CollectorRegistry()
    registry.register(CircuitCollector(lambda: {"lost": 2, "failing": 1}, "p"))
    assert registry.get_sample_value("p_open_circuits", {"cause": "lost"}) == 2
    assert registry.get_sample_value("p_open_circuits", {"cause": "failing"}) == 1
