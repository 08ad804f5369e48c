"""What GET /metrics of a running frontend shows of the requests that it served."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from common.errors import Unavailable
from frontend_svc.metrics.collectors import ModelConfigCollector
from tests.kit.engines import RecordingEngine
from tests.kit.local_mesh import COMPLETIONS, LocalMesh, local_mesh, registration
from tests.kit.waiting import WAIT_S, until
from worker_svc.engines.contract import (
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
    usage,
)

LEGACY, CURRENT = "nv_llm_http_service", "kvmesh_frontend"
STEP_S = 0.3


class Gate:
    """A script that yields tokens once its gate opens, or fails. delay_s: before each token."""

    def __init__(self, *, is_open: bool = True, delay_s: float = 0.0) -> None:
        self.opened = asyncio.Event()
        if is_open:
            self.opened.set()
        self.error: Exception | None = None
        self.delay_s = delay_s

    async def __call__(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        await self.opened.wait()
        if self.error is not None:
            raise self.error
        for token in (300, 301, 302):
            # Sleep: the pace of the engine.
            await asyncio.sleep(self.delay_s)
            yield chunk.token(token)
        yield chunk.length().with_usage(usage(len(request.token_ids), 3))


def samples_of(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        yield from family.samples


async def value(bed: LocalMesh, name: str, **labels: str) -> float | None:
    """The sum of the samples with these labels; None if there is none."""
    found = [
        one.value
        for one in samples_of(await bed.scrape())
        if one.name == name and labels.items() <= one.labels.items()
    ]
    return sum(found) if found else None


async def requests_total(bed: LocalMesh, **labels: str) -> float:
    return await value(bed, f"{LEGACY}_requests_total", model="m", **labels) or 0.0


async def in_flight(bed: LocalMesh) -> float | None:
    return await value(bed, f"{LEGACY}_inflight_requests", model="m")


async def has_in_flight(bed: LocalMesh, count: int) -> None:
    async def is_reached() -> bool:
        return await in_flight(bed) == count

    await until(is_reached, f"{count} requests are in flight")


@pytest.mark.row("S3-01", "S3-02", "S3-31")
@pytest.mark.row("S3-03", "S3-04")
async def test_the_status_and_type_of_each_request_are_labels() -> None:
    gate = Gate()
    async with local_mesh() as bed, bed.router(), bed.worker(RecordingEngine(gate)):
        assert (await bed.complete()).status_code == 200
        assert (await bed.complete(stream=True)).status_code == 200
        assert (await bed.complete(max_tokens=5000)).status_code == 400
        text = await bed.scrape()
    found = {
        (one.labels["request_type"], one.labels["status"]): one.value
        for one in samples_of(text)
        if one.name == f"{LEGACY}_requests_total" and one.labels["model"] == "m"
    }
    assert found == {
        ("unary", "success"): 1,
        ("stream", "success"): 1,
        ("unary", "error"): 1,
    }


@pytest.mark.row("S3-19", "S3-27", "S3-28", "S3-30")
async def test_the_endpoint_and_the_streaming_flag_are_labels() -> None:
    async with local_mesh() as bed, bed.router(), bed.worker(RecordingEngine(Gate())):
        await bed.chat(stream=True)
        await bed.chat()
        await bed.chat()
        await bed.complete(stream=True)
        counted = {
            (endpoint, kind): await requests_total(bed, endpoint=endpoint, request_type=kind)
            for endpoint in ("chat_completions", "completions")
            for kind in ("unary", "stream")
        }
    assert counted == {
        ("chat_completions", "stream"): 1,
        ("chat_completions", "unary"): 2,
        ("completions", "stream"): 1,
        ("completions", "unary"): 0,
    }


@pytest.mark.row("S3-06", "S3-07", "S3-08", "S3-09", "S3-10")
async def test_a_scrape_after_one_request_has_the_documented_families() -> None:
    async with local_mesh() as bed, bed.router(), bed.worker(RecordingEngine(Gate())):
        await bed.complete()
        text = await bed.scrape()
    families = {one.name: one for one in text_string_to_metric_families(text)}
    names = {name for name in families if name.startswith("nv_llm")}
    assert {name for name in names if not name.endswith("_created")} == {
        f"{LEGACY}_requests",
        f"{LEGACY}_inflight_requests",
        f"{LEGACY}_request_duration_seconds",
    }
    assert f"# HELP {LEGACY}_requests_total Total number of LLM requests processed" in text
    assert f"# HELP {LEGACY}_inflight_requests Number of inflight requests" in text
    assert f"# HELP {LEGACY}_request_duration_seconds Duration of LLM requests" in text
    (total,) = [
        one for one in families[f"{LEGACY}_requests"].samples if one.name.endswith("_total")
    ]
    assert set(total.labels) == {"model", "endpoint", "request_type", "status"}
    gauge, duration = (
        families[f"{LEGACY}_inflight_requests"],
        families[f"{LEGACY}_request_duration_seconds"],
    )
    assert (gauge.type, [one.labels for one in gauge.samples]) == ("gauge", [{"model": "m"}])
    assert (duration.type, {name for one in duration.samples for name in one.labels}) == (
        "histogram",
        {"model", "le"},
    )
    bounds = [one.labels["le"] for one in duration.samples if one.name.endswith("_bucket")]
    assert [float(bound) for bound in bounds] == [
        *(0, 1, 2, 4, 8, 16, 32, 64, 128, 256),
        float("inf"),
    ]
    lines = text.splitlines()
    assert f'{LEGACY}_request_duration_seconds_count{{model="m"}} 1.0' in lines


@pytest.mark.row("S3-05")
async def test_the_older_family_keeps_its_prefix_and_the_current_one_has_the_configured() -> None:
    async with (
        local_mesh(metrics_prefix="mine") as bed,
        bed.router(),
        bed.worker(RecordingEngine(Gate())),
    ):
        await bed.complete()
        assert await value(bed, "mine_requests_total", model="m") == 1
        assert await requests_total(bed) == 1
        assert f"{CURRENT}_requests" not in await bed.scrape()


@pytest.mark.row("S3-15")
def test_a_prefix_whose_names_are_taken_stops_the_start_with_a_conflict(tmp_path: Path) -> None:
    flags = ["--registry-path", str(tmp_path), "--http-port=0", f"--metrics-prefix={LEGACY}"]
    done = subprocess.run(
        [sys.executable, "-m", "frontend_svc", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]},
    )
    assert done.returncode == 1
    assert "metrics are registered already: Duplicated timeseries" in done.stdout + done.stderr
    assert f"{LEGACY}_requests" in done.stdout + done.stderr


@pytest.mark.row("S3-12", "S3-16", "S3-35")
async def test_each_frontend_counts_its_own_requests_by_one() -> None:
    async with (
        local_mesh() as bed,
        bed.router(),
        bed.worker(RecordingEngine(Gate())),
        local_mesh(bed.connect) as other,
    ):
        await other.serves("m")
        for expected in range(4):
            assert await requests_total(bed) == expected
            assert (await bed.complete()).status_code == 200
        assert await requests_total(other) == 0
        response = await bed.http.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.row("S3-14", "S3-20", "S3-25")
async def test_the_gauge_is_the_number_of_requests_in_flight() -> None:
    gate = Gate(is_open=False)
    async with local_mesh() as bed, bed.router(), bed.worker(RecordingEngine(gate)):
        async with asyncio.TaskGroup() as tasks:
            for count in range(1, 6):
                tasks.create_task(bed.complete(stream=count % 2 == 0))
                await has_in_flight(bed, count)
                assert await requests_total(bed) == 0
            gate.opened.set()
        assert await in_flight(bed) == 0
        assert await requests_total(bed, status="success") == 5


@pytest.mark.row("S3-17", "S3-21", "S3-23", "S3-24")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_is_an_error_and_the_next_request_a_success(
    stream: bool,
) -> None:
    gate, kind = Gate(), "stream" if stream else "unary"
    async with local_mesh() as bed, bed.router(), bed.worker(RecordingEngine(gate)):
        gate.error = RuntimeError("a defect of the engine")
        assert (await bed.complete(stream=stream)).status_code == 500
        gate.error = None
        assert (await bed.complete(stream=stream)).status_code == 200
        for status in ("error", "success"):
            labels = {"endpoint": "completions", "request_type": kind, "status": status}
            assert await requests_total(bed, **labels) == 1
        assert await in_flight(bed) == 0
        assert await value(bed, f"{LEGACY}_request_duration_seconds_count", model="m") == 2


async def disconnect(bed: LocalMesh, *, stream: bool) -> None:
    """Sends a request and closes the connection once it is in flight."""
    body = {"model": "m", "prompt": [5, 6], "stream": stream}
    async with httpx.AsyncClient(base_url=bed.http.base_url, trust_env=False) as client:
        sending = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await has_in_flight(bed, 1)
        sending.cancel()
        await asyncio.wait([sending], timeout=WAIT_S)


@pytest.mark.row("S3-22")
async def test_every_end_of_a_request_counts_exactly_once() -> None:
    gate = Gate()
    async with (
        local_mesh(request_timeout_s=1.0) as bed,
        bed.router(),
        bed.worker(RecordingEngine(gate)),
    ):
        counted = 0
        for stream in (False, True):
            assert (await bed.complete(stream=stream)).status_code == 200
            gate.error = Unavailable("the engine is busy")
            assert (await bed.complete(stream=stream)).status_code >= 500
            gate.error = None
            gate.opened.clear()
            assert (await bed.complete(stream=stream)).status_code == 504, "the deadline"
            await disconnect(bed, stream=stream)
            gate.opened.set()
            await has_in_flight(bed, 0)
            counted += 4
            assert await requests_total(bed) == counted
            duration = f"{LEGACY}_request_duration_seconds_count"
            assert await value(bed, duration, model="m") == counted
        assert await requests_total(bed, status="success") == 2


@pytest.mark.row("S3-26", "S3-40")
async def test_durations_and_latencies_are_seconds_and_tokens_are_counted() -> None:
    gate = Gate(delay_s=STEP_S)
    async with local_mesh() as bed, bed.router(), bed.worker(RecordingEngine(gate)):
        began = asyncio.get_running_loop().time()
        assert (await bed.complete(stream=True)).status_code == 200
        elapsed_s = asyncio.get_running_loop().time() - began
        sums = {
            name: await value(bed, f"{name}_sum", model="m") or 0.0
            for name in (
                f"{LEGACY}_request_duration_seconds",
                f"{CURRENT}_time_to_first_token_seconds",
                f"{CURRENT}_inter_token_latency_seconds",
                f"{CURRENT}_input_sequence_tokens",
                f"{CURRENT}_output_sequence_tokens",
            )
        }
        gaps = await value(bed, f"{CURRENT}_inter_token_latency_seconds_count", model="m")
    duration, ttft, itl, n_input, n_output = sums.values()
    assert 3 * STEP_S <= duration <= elapsed_s
    assert STEP_S <= ttft <= duration - STEP_S
    # The first token and the gaps make the duration.
    assert STEP_S <= itl <= duration - ttft + 1e-6
    assert (n_input, n_output, gaps) == (3, 3, 2)


@pytest.mark.row("S3-41", "S3-42", "S3-44")
async def test_queued_requests_disconnects_and_failures_have_metrics() -> None:
    gate = Gate(is_open=False)
    async with local_mesh() as bed, bed.router(), bed.worker(RecordingEngine(gate)):
        sending = asyncio.create_task(bed.complete())
        await has_in_flight(bed, 1)
        assert await value(bed, f"{CURRENT}_queued_requests", model="m") == 1
        assert await value(bed, f"{CURRENT}_inflight_requests", model="m") == 1
        gate.opened.set()
        await sending
        assert await value(bed, f"{CURRENT}_queued_requests", model="m") == 0
        gate.opened.clear()
        await disconnect(bed, stream=True)
        await has_in_flight(bed, 0)
        assert await value(bed, f"{CURRENT}_disconnected_clients_total", model="m") == 1
        gate.opened.set()
        gate.error = RuntimeError("a defect of the engine")
        await bed.complete()
        await bed.complete(max_tokens=5000)
        for kind in ("cancelled", "internal", "validation"):
            failures = await value(bed, f"{CURRENT}_failures_total", model="m", error_type=kind)
            assert failures == 1, kind


@pytest.mark.row("S3-41")
async def test_a_request_with_a_first_token_is_in_flight_and_not_queued() -> None:
    async def endless(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(300)
        await ctx.stopped()
        yield chunk.cancelled()

    async with local_mesh() as bed, bed.router(), bed.worker(RecordingEngine(endless)):
        body = {"model": "m", "prompt": [5, 6], "stream": True}
        async with bed.http.stream("POST", COMPLETIONS, json=body) as response:
            parts = response.aiter_bytes()  # A collected iterator closes the connection.
            await anext(parts)
            assert await value(bed, f"{CURRENT}_queued_requests", model="m") == 0
            assert await value(bed, f"{CURRENT}_inflight_requests", model="m") == 1
        await has_in_flight(bed, 0)


@pytest.mark.row("S3-43")
async def test_the_sizes_that_workers_advertise_are_gauges() -> None:
    sizes: dict[str, Any] = {"total_kv_blocks": 100, "max_num_batched_tokens": 512}
    engines = [RecordingEngine(**sizes), RecordingEngine(**{**sizes, "total_kv_blocks": 50})]
    async with local_mesh() as bed, bed.worker(engines[0]), bed.worker(engines[1]):

        async def has_both() -> bool:
            return await value(bed, f"{CURRENT}_model_workers", model="m") == 2

        await until(has_both, "the frontend has both workers")
        expected = {
            "total_kv_blocks": 150,
            "max_num_batched_tokens": 1024,
            "context_length": 4096,
            "block_size": 16,
            "max_num_seqs": None,
        }
        for name, size in expected.items():
            assert await value(bed, f"{CURRENT}_model_{name}", model="m") == size


@pytest.mark.row("S3-45")
async def test_unknown_model_names_make_one_label_value() -> None:
    async with local_mesh() as bed, bed.worker(RecordingEngine(Gate())):
        assert (await bed.complete(model="junk")).status_code == 404
        before = len(list(samples_of(await bed.scrape())))
        for number in range(50):
            assert (await bed.complete(model=f"junk-{number}")).status_code == 404
        text = await bed.scrape()
        assert len(list(samples_of(text))) == before
        assert "junk" not in text
        total = await value(bed, f"{LEGACY}_requests_total", model="other", status="error")
        assert total == 51


@pytest.mark.row("S3-32", "S3-38")
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "HEAD"])
async def test_metrics_are_served_at_slash_metrics_for_get_only(method: str) -> None:
    async with local_mesh() as bed:
        assert (await bed.http.get("/metrics")).status_code == 200
        assert (await bed.http.request(method, "/metrics")).status_code == 405


@pytest.mark.row("S3-36")
async def test_a_collector_that_fails_makes_the_scrape_a_500(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: ModelConfigCollector) -> Iterator[Any]:
        raise RuntimeError("no value")

    async with local_mesh() as bed:
        monkeypatch.setattr(ModelConfigCollector, "collect", fail)
        response = await bed.http.get("/metrics")
        assert (response.status_code, response.text) == (500, "Failed to encode metrics")


@pytest.mark.row("S3-37")
async def test_a_label_that_is_not_utf_8_makes_the_scrape_a_500() -> None:
    async with local_mesh() as bed:
        unpaired = registration(9, model="\ud800", meta={"model_type": "Chat"})
        async with bed.joined(unpaired):

            async def fails() -> bool:
                response = await bed.http.get("/metrics")
                return (response.status_code, response.text) == (500, "Failed to encode metrics")

            await until(fails, "the scrape fails")


@pytest.mark.row("S3-39")
@pytest.mark.parametrize(
    ("families", "present", "absent"),
    [("legacy", LEGACY, CURRENT), ("current", CURRENT, LEGACY)],
)
async def test_a_family_of_request_metrics_can_be_switched_off(
    families: str, present: str, absent: str
) -> None:
    engine = RecordingEngine(Gate())
    async with local_mesh(metrics_families=families) as bed, bed.router(), bed.worker(engine):
        assert (await bed.complete()).status_code == 200
        names = {one.name for one in samples_of(await bed.scrape())}
    counters = {f"{family}_requests_total" for family in (present, absent)}
    assert counters & names == {f"{present}_requests_total"}


@pytest.mark.row("S3-33")
async def test_the_metrics_have_the_configured_path() -> None:
    async with local_mesh(metrics_path="/internal/metrics") as bed:
        assert (await bed.http.get("/internal/metrics")).status_code == 200
        assert (await bed.http.get("/metrics")).status_code == 404
