"""gRPC over real sockets: options, security, errors, deadlines, tracing, drain."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from common import errors
from common.rpc import authentication, call_context, interceptors
from common.rpc import channel as rpc
from common.rpc.interceptors import TIME_KEY
from common.rpc.status import (
    STATUS_DETAILS_KEY,
    map_rpc_errors,
    mesh_error_from_rpc,
    mesh_error_to_status,
)
from common.runtime import telemetry
from common.runtime.config import ServiceConfig
from common.runtime.otlp import OtlpEndpoint
from common.runtime.span_export import (
    BATCH_SPANS_MAX,
    EXPORT_TIMEOUT_S,
    QUEUE_SPANS_MAX,
    ClientFiles,
    ExportQueue,
    open_queue,
    shut_down,
)
from common.runtime.tasks import TaskGroup
from common.service.health import ThreadedHealthServer
from common.service.metrics_server import serve_metrics
from tests.integration.rpc_bed import Handler, echo, serving

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"
SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def health_stub(channel: grpc.Channel | grpc.aio.Channel | None) -> Any:
    """Any: the stub's methods have no types."""
    assert channel is not None
    return health_pb2_grpc.HealthStub(channel)


def unary_stream(channel: grpc.aio.Channel, name: str) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    method: Any = channel.unary_stream(f"/test.Echo/{name}")
    return cast("grpc.aio.UnaryStreamCall[bytes, bytes]", method(b""))


def raising(error: BaseException) -> Handler:
    async def handle(_request: bytes, _context: object) -> bytes:
        raise error

    return handle


# Errors


EXAMPLES: tuple[errors.MeshError, ...] = (
    errors.InvalidRequest("must be positive", "max_tokens", metadata={"given": "-1"}),
    errors.Unsupported("logit_bias", "the engine has no hook for it"),
    errors.PromptTooLong("9 tokens do not fit into 8", "prompt", metadata={"limit": "8"}),
    errors.NotFound("no such worker"),
    errors.UnknownModel("größe/llama"),
    errors.Conflict("another incarnation", reason="OTHER_INCARNATION"),
    errors.Unauthenticated("no token"),
    errors.PermissionDenied("not you"),
    errors.Overloaded(1.25, "queue full"),
    errors.Unavailable("no decode worker", 0.5, reason="NO_DECODE_WORKER"),
    errors.WorkerLost(retryable=True),
    errors.WorkerLost("guided decoding cannot move", retryable=False),
    errors.DeadlineExceeded(),
    errors.RequestCancelled(reason="SLOW_READER"),
    errors.Unimplemented("not here"),
    errors.InternalError("books below zero"),
)


def test_every_error_class_has_an_example_and_a_status() -> None:
    assert {type(error) for error in EXAMPLES} == set(errors.MESH_ERROR_CLASSES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: f"{error.reason}-{error.retryable}")
async def test_the_client_receives_an_error_as_it_was_raised(
    shape: str, error: errors.MeshError
) -> None:
    async with serving(raising(error)) as service:
        with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.call(shape)
    assert [line["event"] for line in logs] == ["rpc_failed"] * isinstance(
        error, errors.InternalError
    )
    assert caught.value.code().value[0] == errors.STATUS_CODE_BY_ERROR[type(error)]
    got = mesh_error_from_rpc(caught.value)
    assert type(got) is type(error)
    assert vars(got) == {**vars(error), "retryable": error.retryable}


async def test_an_unexpected_exception_is_logged_and_not_exposed() -> None:
    async with serving(raising(ValueError("password=hunter2"))) as service:
        with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.call("unary_unary", metadata=(("x-request-id", "r-1"),))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "hunter2" not in str(caught.value.details()) + str(caught.value.trailing_metadata())
    bug = mesh_error_from_rpc(caught.value)
    assert isinstance(bug, errors.InternalError)
    assert bug.metadata["request_id"] == "r-1"
    (line,) = [line for line in logs if line["event"] == "rpc_failed"]
    assert "hunter2" in str(line["exc_info"])


async def test_an_error_out_of_a_task_group_keeps_its_class() -> None:
    async def handle(_request: bytes, _context: object) -> bytes:
        async with TaskGroup() as group:
            group.create_task(_raise(errors.Overloaded(2.0)))
        return b""

    async with serving(handle) as service:
        with pytest.raises(errors.Overloaded) as caught, map_rpc_errors():
            await service.call("unary_unary")
    assert caught.value.retry_after_s == 2.0


async def _raise(error: Exception) -> None:
    raise error


async def test_a_handlers_own_abort_passes_through() -> None:
    async def handle(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "own status")
        return b""

    async with serving(handle) as service:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.call("unary_unary")
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS
    assert isinstance(mesh_error_from_rpc(caught.value), errors.InternalError)


HUGE = errors.InvalidRequest(
    "ä" * 100_000, "f" * 50_000, metadata={f"{n}" * 500: "€" * 50_000 for n in range(10, 99)}
)


async def test_a_huge_error_is_truncated_and_still_received() -> None:
    async with serving(raising(HUGE)) as service:
        with pytest.raises(errors.InvalidRequest) as caught, map_rpc_errors():
            await service.call("unary_unary")
    assert caught.value.message.startswith("äää")
    assert caught.value.message.endswith("…")


def test_the_largest_status_fits_into_the_header_limit_of_any_grpc_client() -> None:
    _, status = mesh_error_to_status(HUGE)
    percent_encoded = 3 * len(status.message.encode())
    base64 = len(status.SerializeToString()) * 4 / 3
    assert percent_encoded + base64 < 7500


async def test_an_error_with_invalid_unicode_is_received() -> None:
    error = errors.InvalidRequest("bad \ud800", "a\ud800", metadata={"k": "\ud800"})
    async with serving(raising(error)) as service:
        with pytest.raises(errors.InvalidRequest) as caught, map_rpc_errors():
            await service.call("unary_unary")
    assert (caught.value.message, caught.value.field) == ("bad ?", "a?")


async def test_an_unreachable_peer_is_unavailable_and_retryable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound but not listening: connections are refused.
        async with rpc.channel(f"127.0.0.1:{taken.getsockname()[1]}") as channel:
            with pytest.raises(errors.Unavailable) as caught:
                await rpc.unary(channel.unary_unary("/test.Echo/x"), b"", timeout_s=5)
    assert caught.value.retryable


async def test_a_write_on_a_connection_that_was_reset_is_not_an_internal_error() -> None:
    def reset(listener: socket.socket) -> None:
        listener.settimeout(10)
        peer, _ = listener.accept()
        with peer:
            peer.sendall(bytes.fromhex("000000040000000000"))  # SETTINGS of HTTP/2
            peer.recv(65_536)
            # Without lingering, a close is a reset.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    found = set[str]()
    # The write is in progress in nearly all attempts, and between two writes in the others.
    for _ in range(50):
        if "the connection was reset" in found:
            break
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with rpc.channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
                call: Any = channel.stream_stream("/test.Echo/stream_stream")()
                async with asyncio.timeout(10), TaskGroup() as tasks:
                    tasks.create_task(asyncio.to_thread(reset, listener))
                    try:
                        while True:
                            await call.write(bytes(1_000_000))
                    except grpc.aio.AioRpcError as error:
                        got = mesh_error_from_rpc(error)
                        assert isinstance(got, errors.Unavailable), got
                        found.add(got.message)
                    except asyncio.InvalidStateError:
                        pass
    assert "the connection was reset" in found


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unimplemented),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
        (grpc.StatusCode.INTERNAL, errors.Unavailable),
    ],
)
def test_a_status_without_details_becomes_the_nearest_error_class(
    code: grpc.StatusCode, cls: type[errors.MeshError]
) -> None:
    none = grpc.aio.Metadata()
    got = mesh_error_from_rpc(grpc.aio.AioRpcError(code, none, none, None))
    assert type(got) is cls
    assert got.message == code.name
    assert got.retryable == cls.retryable


async def test_garbage_in_the_status_details_falls_back_to_the_code() -> None:
    async def handle(_request: bytes, context: Any) -> bytes:
        trailing = ((STATUS_DETAILS_KEY, b"\xff\xff\xff"),)
        await context.abort(grpc.StatusCode.NOT_FOUND, "gone", trailing)
        return b""

    async with serving(handle) as service:
        with pytest.raises(errors.NotFound, match="gone"), map_rpc_errors():
            await service.call("unary_unary")


# Messages


async def test_messages_above_grpcs_default_limit_pass_in_both_directions() -> None:
    async with serving(echo) as service:
        for shape in ("unary_unary", "stream_stream"):
            replies = await service.call(shape, bytes(6 << 20))
            assert len(replies[-1]) == 6 << 20


@pytest.mark.slow
async def test_a_message_over_the_limit_is_a_bad_request_not_an_overload() -> None:
    async with serving(echo) as service:
        with pytest.raises(errors.InvalidRequest) as caught, map_rpc_errors():
            await service.call("unary_unary", bytes(rpc.MESSAGE_BYTES_MAX + 1))
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


# Deadlines, cancellation, request ids


async def test_calls_without_a_deadline_get_a_limit_and_others_forward_the_remaining_time() -> None:
    left: list[float] = []

    async def handle(request: bytes, _context: object) -> bytes:
        left.append(call_context.remaining_time_s(1000.0))
        return request

    async with serving(handle) as service:
        await service.call("unary_unary", timeout=None)
        await service.call("unary_stream", timeout=None)
        await service.call("unary_unary", timeout=5.0)
    # A lower bound, independent of delays: gRPC rounds up.
    assert 5.1 < left[0] <= interceptors.UNARY_TIMEOUT_S
    assert left[1] == 1000.0  # The limit of the stream is longer.
    assert 0.0 < left[2] <= 5.1


async def test_the_time_limit_ends_a_unary_call_but_not_a_long_lived_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interceptors, "UNARY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(interceptors, "STREAM_TIMEOUT_S", 0.05)
    release = asyncio.Event()

    async def handle(request: bytes, _context: object) -> bytes:
        await release.wait()
        return request

    async with serving(handle) as service:
        for shape in ("unary_unary", "unary_stream"):
            with pytest.raises(errors.DeadlineExceeded), map_rpc_errors():
                await service.call(shape, timeout=None)
        async with rpc.cancelling(service.method("unary_stream", "Attach")(b"hi")) as stream:
            assert await stream.read() == b"first"
            with pytest.raises(errors.DeadlineExceeded), map_rpc_errors():
                await service.call("unary_unary", timeout=None)
            release.set()
            assert await stream.read() == b"hi"


@pytest.mark.parametrize("shape", SHAPES)
async def test_leaving_the_cancelling_scope_ends_the_handler_and_runs_its_cleanup(
    shape: str,
) -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def handle(_request: bytes, _context: object) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()
        return b""

    async with serving(handle) as service:
        sent = iter([b"hi"]) if shape.startswith("stream") else b"hi"
        async with rpc.cancelling(service.method(shape)(sent)) as call:
            await asyncio.wait_for(started.wait(), 5)
        await asyncio.wait_for(cleaned.wait(), 5)
        assert call.cancelled()
        assert await service.calls.wait_idle(5) == []


async def test_a_generator_cancelled_between_two_messages_cleans_up_in_its_own_task() -> None:
    seen: dict[str, object] = {}

    async def endless(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        seen["task"] = asyncio.current_task()
        try:
            while True:
                yield bytes(
                    1 << 20
                )  # Flow control blocks the writer in the server, not in this process.
        finally:
            seen["cleanup"] = asyncio.current_task()

    server = rpc.server(calls=(calls := interceptors.RunningCalls()))
    handler: Any = grpc.unary_stream_rpc_method_handler(endless)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", {"endless": handler}),)
    )
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        async with rpc.cancelling(unary_stream(channel, "endless")) as call:
            await call.read()
        assert await calls.wait_idle(5) == []
    await server.stop(None)
    assert seen["cleanup"] is seen["task"]


async def test_a_request_id_is_reused_or_created_and_reaches_logs_and_outgoing_calls() -> None:
    seen: list[str | None] = []

    async def handle(request: bytes, _context: object) -> bytes:
        seen.append(call_context.request_id())
        seen.append(dict(call_context.outgoing_metadata())["x-request-id"])
        return request

    async with serving(handle) as service:
        await service.call("unary_unary", metadata=(("x-request-id", "from-http"),))
        await service.call("unary_unary")
        await service.call("unary_unary", metadata=(("x-request-id", "a b"),))
    assert seen[:2] == ["from-http", "from-http"]
    assert seen[2] == seen[3] != seen[4] == seen[5]
    assert all(made and len(made) == 32 for made in seen[2:])
    assert call_context.request_id() is None


# Security


async def test_a_wrong_or_missing_token_is_rejected_and_the_right_one_passes() -> None:
    security = rpc.Security(token="s3cret")
    async with serving(echo, security=security) as service:
        for shape in SHAPES:
            assert (await service.call(shape))[-1] == b"hi"
        assert await rpc.unary(service.method("unary_unary"), b"hi", timeout_s=5) == b"hi"
    for other in (rpc.PLAINTEXT, rpc.Security(token="s3cret!")):
        async with serving(echo, security=security, client=other) as service:
            for shape in SHAPES:
                for metadata in ((), (("authorization", "Bearer s3cret"),)):
                    with pytest.raises(errors.Unauthenticated), map_rpc_errors():
                        await service.call(shape, metadata=metadata)


async def test_health_and_reflection_stay_open_on_loopback() -> None:
    async with serving(echo, security=rpc.Security(token="s3cret")) as service:
        check = health_stub(service.channel)
        reply = await check.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast("grpc.Channel", service.channel))
        query = reflection_pb2.ServerReflectionRequest(list_services="*")
        async with rpc.cancelling(stub.ServerReflectionInfo(iter([query]))) as call:
            listed = (await call.read()).list_services_response.service
    assert {"test.Echo", "grpc.health.v1.Health"} <= {service.name for service in listed}


async def test_responses_to_health_checks_carry_the_clock_of_the_process() -> None:
    async with serving(echo, security=rpc.Security(token="s3cret")) as service:
        before_ms = time.time() * 1000
        call = health_stub(service.channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        await call
        trailing = dict(await call.trailing_metadata())
        assert before_ms - 1 <= int(trailing[TIME_KEY]) <= time.time() * 1000 + 1


def test_only_peers_on_this_host_count_as_local() -> None:
    local = ("ipv4:127.0.0.1:5", "ipv6:%5B::1%5D:5", "ipv6:[::1]:5", "unix:/tmp/s", "unix:")
    remote = ("ipv4:10.0.0.7:5", "ipv6:%5B2001:db8::1%5D:5", "", "localhost.evil:1")
    assert [authentication.is_local_peer(peer) for peer in local] == [True] * len(local)
    assert [authentication.is_local_peer(peer) for peer in remote] == [False] * len(remote)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "some-name"])
async def test_an_open_bind_without_token_or_tls_is_rejected(host: str) -> None:
    server = rpc.server()
    with pytest.raises(errors.InvalidRequest) as caught:
        rpc.bind(server, host, 0)
    assert caught.value.field == "host"
    await server.stop(None)


@pytest.mark.parametrize("security", [rpc.Security(token="t"), rpc.Security(insecure=True)])
async def test_an_open_bind_is_allowed_with_a_token_or_on_request(security: rpc.Security) -> None:
    server = rpc.server(security=security)
    assert rpc.bind(server, "0.0.0.0", 0, security=security) > 0
    await server.start()
    await server.stop(None)


async def test_with_mutual_tls_only_a_peer_with_a_certificate_is_served(
    certificates: dict[str, rpc.Security],
) -> None:
    good = certificates["good"]
    assert good.uses_mutual_tls
    assert "PRIVATE" not in repr(good)
    async with serving(echo, security=good) as service:
        assert await service.call("unary_unary") == [b"hi"]
    for other_peer in (rpc.PLAINTEXT, certificates["other"]):
        async with serving(echo, security=good, client=other_peer) as service:
            with pytest.raises(errors.Unavailable), map_rpc_errors():
                await service.call("unary_unary")


async def test_a_taken_port_is_a_conflict_and_never_shared() -> None:
    async with serving(echo) as service:
        other = rpc.server()
        with pytest.raises(errors.Conflict, match=str(service.port)) as rejected:
            rpc.bind(other, "127.0.0.1", service.port)
        await other.stop(None)
    assert rejected.value.field == "port"
    assert rejected.value.message.endswith("(--host, --port): Address already in use")


def test_the_error_for_a_taken_health_port_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(errors.Conflict, match=rf":{port} \(--host, --health-port\)") as raised:
            ThreadedHealthServer("127.0.0.1", port)
    assert raised.value.field == "health_port"


def test_the_error_for_a_taken_metrics_port_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(errors.Conflict, match=rf":{port} \(--metrics-port\): Address"):
            serve_metrics(CollectorRegistry(), "127.0.0.1", port)


async def test_the_error_for_a_host_of_another_machine_has_the_reason() -> None:
    security = rpc.Security(insecure=True)
    server = rpc.server(security=security)
    with pytest.raises(errors.Conflict, match=r"192\.0\.2\.1:0 \(--host, --port\): Cannot assign"):
        rpc.bind(server, "192.0.2.1", 0, security=security)
    await server.stop(None)


def test_the_error_for_an_unreadable_tls_file_names_its_flag(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("x")
    config = ServiceConfig(
        tls_cert_path=tmp_path / "cert.pem",
        tls_key_path=tmp_path / "key.pem",
        tls_ca_path=tmp_path / "cert.pem",
    )
    with pytest.raises(errors.InvalidRequest) as rejected:
        rpc.security_from_config(config)
    assert rejected.value.field == "tls_key_path"
    message = f"--tls-key-path: cannot read {tmp_path}/key.pem: No such file or directory"
    assert rejected.value.message == message


def test_the_error_for_invalid_pem_files_names_their_flags(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("no")
    path = tmp_path / "x.pem"
    config = ServiceConfig(tls_cert_path=path, tls_key_path=path, tls_ca_path=path)
    with pytest.raises(errors.InvalidRequest, match="are --tls-cert-path, --tls-key-path, --tls-"):
        rpc.security_from_config(config)


# Silent streams


async def _hold_silent(server: grpc.aio.Server, hold_s: float) -> float:
    """Seconds until a silent stream ends if pinged every second (the minimum of C-core)."""
    silence = asyncio.Event()

    async def silent(_request: bytes, context: Any) -> None:
        await context.write(b"up")
        await silence.wait()

    handler: Any = grpc.unary_stream_rpc_method_handler(silent)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", {"Attach": handler}),)
    )
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    started = time.monotonic()
    try:
        async with (
            rpc.channel(f"127.0.0.1:{port}", keepalive_s=1.0) as channel,
            rpc.cancelling(unary_stream(channel, "Attach")) as call,
        ):
            assert await call.read() == b"up"
            async with asyncio.timeout(hold_s):
                await call.read()
    except (TimeoutError, grpc.aio.AioRpcError):
        return time.monotonic() - started
    finally:
        silence.set()
        await server.stop(None)
    raise AssertionError("the stream ended by itself")


@pytest.mark.slow
async def test_a_silent_stream_outlives_many_client_pings() -> None:
    hold_s = 7.0
    plain, ours = await asyncio.gather(
        _hold_silent(grpc.aio.server(), hold_s), _hold_silent(rpc.server(), hold_s)
    )
    assert plain < hold_s, "gRPC's defaults did not end the stream: the test may not ping"
    assert ours >= hold_s


# Drain


async def test_stop_lets_running_calls_finish_and_rejects_new_ones() -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def handle(request: bytes, _context: object) -> bytes:
        started.set()
        await release.wait()
        return request

    async with serving(handle) as service:
        assert service.server is not None
        running_call = asyncio.ensure_future(service.call("unary_stream", b"whole"))
        await started.wait()
        stopping = asyncio.ensure_future(rpc.stop(service.server, 5.0, service.calls))
        rejection: errors.MeshError = errors.DeadlineExceeded()
        # Ends: the server is being stopped, which has a limit.
        while isinstance(rejection, errors.DeadlineExceeded):  # Until it rejects new calls.
            with pytest.raises(errors.MeshError) as caught, map_rpc_errors():
                await service.call("unary_unary", b"new", timeout=0.05)
            rejection = caught.value
        assert isinstance(rejection, errors.Unavailable)
        release.set()
        assert await running_call == [b"first", b"whole"]
        assert await asyncio.wait_for(stopping, 5) == []


async def test_stop_returns_the_cancelled_calls_and_awaits_their_cleanup() -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def handle(_request: bytes, _context: object) -> bytes:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(50):  # A cleanup of many loop turns.
                await asyncio.sleep(0)
            cleaned.set()
        return b""

    async with serving(handle) as service:
        assert service.server is not None
        metadata = (("x-request-id", "slow-one"),)
        running_call = asyncio.ensure_future(service.call("unary_unary", metadata=metadata))
        watch = health_stub(service.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await started.wait()
        cut = await rpc.stop(service.server, 0.05, service.calls)
        assert cut == ["/test.Echo/unary_unary slow-one"]
        assert cleaned.is_set()
        with pytest.raises(errors.MeshError), map_rpc_errors():
            await running_call
        watch.cancel()


async def test_a_health_watcher_does_not_delay_a_stop() -> None:
    async with serving(echo) as service:
        assert service.server is not None
        watch = health_stub(service.channel).Watch(health_pb2.HealthCheckRequest())
        async with rpc.cancelling(watch):
            await watch.read()
            started = time.monotonic()
            assert await rpc.stop(service.server, 30.0, service.calls) == []
            assert time.monotonic() - started < 5


async def test_the_health_server_responds_while_the_event_loop_is_blocked() -> None:
    threaded_health = ThreadedHealthServer("127.0.0.1", 0)
    threaded_health.start()
    threaded_health.set("", True)
    replies: list[int] = []

    def query() -> None:
        with grpc.insecure_channel(threaded_health.address) as channel:
            stub = health_stub(channel)
            replies.append(stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status)

    def ask_in_thread() -> None:
        querying = threading.Thread(target=query)
        querying.start()
        querying.join(5)  # On the loop's own thread, so no other callback runs meanwhile.

    ask_in_thread()
    threaded_health.drain()
    threaded_health.set("", True)
    ask_in_thread()
    threaded_health.stop(1.0)
    status = health_pb2.HealthCheckResponse
    assert replies == [status.SERVING, status.NOT_SERVING]


# Tracing


@pytest.fixture
def spans() -> tuple[trace.Tracer, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test"), exporter


def finished(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return list(exporter.get_finished_spans())


async def test_a_sampled_parent_gets_a_server_span_and_the_trace_continues(
    spans: tuple[trace.Tracer, InMemorySpanExporter],
) -> None:
    tracer, exporter = spans
    onward: list[str | None] = []

    async def handle(request: bytes, _context: object) -> bytes:
        onward.append(telemetry.current_traceparent())
        return request

    async with serving(handle, tracer=tracer) as service:
        await service.call("unary_stream", metadata=(("traceparent", SAMPLED),))
    (span,) = finished(exporter)
    assert span.name == "test.Echo/unary_stream"
    assert span.kind is trace.SpanKind.SERVER
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN_ID
    assert span.context is not None
    assert onward == [f"00-{TRACE_ID}-{span.context.span_id:016x}-01"]


async def test_an_unsampled_or_absent_or_malformed_parent_creates_no_span(
    spans: tuple[trace.Tracer, InMemorySpanExporter],
) -> None:
    tracer, exporter = spans
    onward: list[str | None] = []

    async def handle(request: bytes, _context: object) -> bytes:
        onward.append(telemetry.current_traceparent())
        return request

    async with serving(handle, tracer=tracer) as service:
        for value in (UNSAMPLED, None, "00-zz-1-01"):
            await service.call("unary_unary", metadata=(("traceparent", value),) if value else ())
        assert (
            await service.method("unary_stream", "Attach")(
                b"hi", metadata=(("traceparent", SAMPLED),)
            ).read()
            == b"first"
        )
    assert finished(exporter) == []
    assert onward[:3] == [UNSAMPLED, None, None]


async def test_a_failed_call_marks_its_span(
    spans: tuple[trace.Tracer, InMemorySpanExporter],
) -> None:
    tracer, exporter = spans
    async with serving(raising(errors.Overloaded(1.0)), tracer=tracer) as service:
        with pytest.raises(grpc.aio.AioRpcError):
            await service.call("unary_unary", metadata=(("traceparent", SAMPLED),))
    (span,) = finished(exporter)
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "Overloaded"


def test_an_assigned_span_id_is_used_once() -> None:
    exporter = InMemorySpanExporter()
    queue = ExportQueue("memory", exporter)
    provider = telemetry.tracer_provider("prefill", "i-1", [queue], 1.0)
    tracer = provider.get_tracer("test")
    assigned = telemetry.new_span_id()
    with telemetry.assign_next_span_id(assigned):
        tracer.start_span("prefill").end()
        tracer.start_span("other").end()
    with telemetry.assign_next_span_id("not an id"), telemetry.assign_next_span_id(assigned):
        pass
    tracer.start_span("later").end()
    provider.shutdown()
    ids = [f"{span.context.span_id:016x}" for span in exporter.get_finished_spans() if span.context]
    assert ids[0] == assigned
    assert assigned not in ids[1:]
    assert len(ids) == 3


@pytest.mark.row("S2-24")
def test_a_malformed_trace_link_is_ignored_with_a_debug_log() -> None:
    bad = [("", ""), (TRACE_ID, "0" * 16), ("0" * 32, SPAN_ID), (TRACE_ID[:-1], SPAN_ID)]
    bad += [(TRACE_ID, SPAN_ID.upper()), (TRACE_ID, SPAN_ID + "\n"), ("x" * 32, SPAN_ID)]
    with capture_logs() as logs:
        assert [telemetry.link(*ids) for ids in bad] == [None] * len(bad)
    assert [line["log_level"] for line in logs] == ["debug"] * len(bad)
    good = telemetry.link(TRACE_ID, SPAN_ID)
    assert good is not None
    assert f"{good.context.trace_id:032x}" == TRACE_ID
    assert f"{good.context.span_id:016x}" == SPAN_ID


@pytest.mark.parametrize(
    ("header", "usable"),
    [
        (SAMPLED, True),
        (UNSAMPLED, True),
        (SAMPLED.replace("00-", "cc-", 1) + "-more", True),  # A later version may have more fields.
        (SAMPLED + "-more", False),
        (SAMPLED.replace("00-", "ff-", 1), False),
        (SAMPLED.replace(SPAN_ID, "0" * 16), False),
        ("", False),
        (None, False),
    ],
)
def test_a_traceparent_is_parsed_as_specified_by_w3c(header: str | None, usable: bool) -> None:
    assert (telemetry.context_from_traceparent(header) is not None) == usable


# Collector


def _refusing() -> tuple[socket.socket, int]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def _silent() -> tuple[socket.socket, int]:
    listener, port = _refusing()
    listener.listen(8)  # The kernel accepts connections, and no process responds.
    return listener, port


@pytest.mark.slow
@pytest.mark.parametrize("collector", [_refusing, _silent])
def test_a_missing_or_unresponsive_collector_delays_neither_spans_nor_shutdown(
    collector: Callable[[], tuple[socket.socket, int]],
) -> None:
    listener, port = collector()
    with listener:
        queue = open_queue(OtlpEndpoint(f"http://127.0.0.1:{port}"), ClientFiles())
        tracer = telemetry.tracer_provider("test", "i-1", [queue], 1.0).get_tracer("test")
        started = time.monotonic()
        for _ in range(QUEUE_SPANS_MAX * 2):
            tracer.start_span("work").end()
        busy_s = time.monotonic() - started
        started = time.monotonic()
        shut_down([queue], 0.9)
        # Sending all queued spans, or waiting for space in the queue, would take this long.
        waited_s = QUEUE_SPANS_MAX / BATCH_SPANS_MAX * EXPORT_TIMEOUT_S
        assert time.monotonic() - started < waited_s / 2
        assert busy_s < waited_s
        assert queue.exported == 0
        assert queue.dropped >= QUEUE_SPANS_MAX


class Sink(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP receiver that stores its requests."""

    def __init__(self) -> None:
        self.received: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.received.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


TRACED = """
import sys
from opentelemetry import trace
from common.runtime import telemetry
from common.runtime.otlp import OtlpEndpoint
traces = telemetry.setup("worker", "i-7", [OtlpEndpoint(sys.argv[1])], 1.0)
tracer = trace.get_tracer("test")
link = telemetry.link(sys.argv[2], sys.argv[3])
next_id = telemetry.assign_next_span_id(sys.argv[4])
with next_id, tracer.start_as_current_span("decode", links=[link]):
    print(telemetry.current_traceparent())
sys.exit(1 if traces.shutdown(5.0) else 0)
"""


@pytest.mark.slow
def test_a_collector_receives_spans_with_assigned_ids_and_links() -> None:
    sink = Sink()
    collector = grpc.server(ThreadPoolExecutor(1))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # It has no types.
    add(sink, collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    assigned = telemetry.new_span_id()
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", TRACED, f"http://127.0.0.1:{port}", TRACE_ID, SPAN_ID, assigned],
        env={"PYTHONPATH": f"{root / 'protos'}:{root}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    collector.stop(None)
    assert done.returncode == 0, done.stderr
    (request,) = sink.received
    (resource,) = request.resource_spans
    attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert attributes["service.name"] == "worker"
    assert attributes["service.instance.id"] == "i-7"
    (span,) = resource.scope_spans[0].spans
    assert span.span_id.hex() == assigned
    assert done.stdout.split("-")[1:3] == [span.trace_id.hex(), assigned]
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in span.links] == [
        (TRACE_ID, SPAN_ID)
    ]


def test_without_an_endpoint_there_is_no_sdk_provider() -> None:
    traces = telemetry.setup("test", "i-1", [], 1.0)
    assert not traces.queues
    assert not traces.shutdown(0.1)
    assert telemetry.current_traceparent() is None
    assert call_context.outgoing_metadata() == ()
