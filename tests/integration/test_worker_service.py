"""A worker over a real gRPC socket, through its whole life cycle, with fake engines and the sim."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.errors import (
    Conflict,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    NotFound,
    PromptTooLong,
    Unavailable,
    Unimplemented,
    WorkerLost,
)
from common.kv.load import Load
from common.registry.instances import Instance
from common.registry.registry import Lease, MemoryRegistry, MemoryStore
from common.request.preprocessed import FinishReason, StopConditions, TokenLogprob, TraceLink
from common.request.token_stream import Hello, RequestFrame, Terminal
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from common.service.health import MEMBER_SERVICE
from common.service.lifecycle import Lifecycle, ServiceInfo
from common.service.lifecycle import run as run_lifecycle
from common.wire.preprocessed import to_proto
from common.wire.token_stream import request_frame_to_proto
from frontend_svc.workers.breaker import Cause
from frontend_svc.workers.connection import WorkerConnection
from frontend_svc.workers.transport import GrpcDialer
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from kvmesh.types.v1 import request_pb2
from tests.kit.apps import living
from tests.kit.requests import leg_request, preprocessed_request
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import SERVICE_NAME, WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)
from worker_svc.engines.echo import EchoConfig, EchoEngine
from worker_svc.engines.sim.config import SIM_MODEL_DIR, SimConfig, load_sim_model
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.serving.attach_server import AttachServer
from worker_svc.serving.runner import Runner
from worker_svc.serving.service import EngineServicer
from worker_svc.tracing import GenerateSpans

NS = "default"
FREED_S = 0.25  # Limit for freeing slot and compute.
# ABORT_GRACE_S leaves 0.1 s of it; a busy machine may exceed that in single runs.
TRIES = 5
FRONTEND = 99


class Unmoved:
    """An engine that ignores stops."""

    def failed(self, worker_id: int, reason: str, cause: Cause = Cause.LOST) -> None:
        pass

    def progressed(self, worker_id: int) -> None:
        pass

    def engine_recovered(self, worker_id: int) -> None:
        pass


class FakeEngine:
    """Acts by the request id, and records its calls.

    good: two tokens. wait: a token, then waits for a stop. deaf: a token, then ignores stops.
    refuse: a typed error. late, endless: contract violations. gate: a token, the rest once `gate`
    is set.
    start, drain and cleanup: actions at these calls, by default none.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[object]] | None = None,
        drain: Callable[[], Awaitable[object]] | None = None,
        cleanup: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.steps: list[str] = []
        self.worker_id = 0
        self.aborted: list[str] = []
        self.closed: list[str] = []
        self.gate = asyncio.Event()
        self._on = {"start": start, "drain": drain, "cleanup": cleanup}

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        on = self._on[name]
        if on is not None:
            await on()

    async def start(self, worker_id: int) -> EngineConfig:
        self.worker_id = worker_id
        await self._step("start")
        return EngineConfig(model="fake", context_length=100, kv_cache_block_size=16)

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        kind = ctx.id.partition("-")[0]
        try:
            if kind == "refuse":
                raise PromptTooLong("101 tokens are too many", field="token_ids")
            yield chunk.token(7)
            if kind == "endless":
                return
            if kind == "wait":
                await ctx.stopped()
                yield chunk.cancelled()
                return
            if kind == "deaf":
                await asyncio.Event().wait()
            if kind == "gate":
                await self.gate.wait()
            yield chunk.token(8)
            yield chunk.stop()
            if kind == "late":
                yield chunk.token(9)
        finally:
            self.closed.append(ctx.id)

    async def abort(self, ctx: GenerateContext) -> None:
        self.aborted.append(ctx.id)

    async def drain(self) -> None:
        await self._step("drain")

    async def cleanup(self) -> None:
        await self._step("cleanup")

    def loads(self) -> Sequence[Load]:
        return (Load(engine_step=1),)


class Worker:
    """A running worker and a channel to it."""

    def __init__(self, app: WorkerApp) -> None:
        self.app = app
        self.channel = rpc.channel(app.address)
        self.stub = engine_pb2_grpc.EngineServiceStub(self.channel)

    async def unary(self, method: str, message: Any) -> Any:
        return await rpc.unary(getattr(self.stub, method), message, timeout_s=WAIT_S)

    def generate(
        self,
        request_id: str,
        preprocessed: PreprocessedRequest | None = None,
        timeout_s: float = WAIT_S,
    ) -> Any:
        message = pb.GenerateRequest(
            request=to_proto(preprocessed_request() if preprocessed is None else preprocessed),
            request_id=request_id,
        )
        return self.stub.Generate(message, timeout=timeout_s)

    async def counters(self) -> dict[str, int]:
        return dict((await self.unary("GetInfo", pb.GetInfoRequest())).counters)

    async def open_slots(self) -> int:
        load: pb.GetLoadResponse = await self.unary("GetLoad", pb.GetLoadRequest())
        return load.open_slots

    async def freed_in_s(self) -> float:
        """Seconds until peers see no open slot."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def are_free() -> bool:
            return not await self.open_slots()

        await until(are_free, "all slots are freed")
        return loop.time() - began

    @asynccontextmanager
    async def attached(self, stream_seq: int = 1) -> AsyncIterator[WorkerConnection]:
        """A frontend's end of Attach, as in production."""
        hello = Hello(FRONTEND, self.app.instance_id, stream_seq)
        connection = WorkerConnection(hello, self.app.address, GrpcDialer(), Unmoved())
        task = asyncio.create_task(connection.run())
        try:
            yield connection
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=WAIT_S)


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    """All messages of a Generate call. Raises its MeshError."""
    messages = []
    try:
        async with rpc.cancelling(call):
            # Ends: the call has a time limit.
            while (message := await call.read()) is not grpc.aio.EOF:
                messages.append(message)
    except grpc.aio.AioRpcError as error:
        raise mesh_error_from_rpc(error) from error
    return messages


@asynccontextmanager
async def working(engine: LLMEngine | None = None, **settings: Any) -> AsyncIterator[Worker]:
    """A worker with this engine, by default as configured, without registration."""
    config = WorkerConfig(registry="memory", **settings)
    app = WorkerApp(config, registry=MemoryRegistry(MemoryStore()), engine=engine)
    async with living(app, registered=False):
        worker = Worker(app)
        async with worker.channel:
            yield worker


class Sink:
    """Records the events of a slot."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.token_ids: list[int] = []
        self.end: Terminal | None = None
        self.error: MeshError | None = None
        self.first = asyncio.Event()
        self.ended = asyncio.Event()

    def accepted(self) -> None:
        self.events.append("accepted")

    def rejected(self, error: MeshError) -> None:
        self._failed("rejected", error)

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self.events.append("tokens")
        self.token_ids += token_ids
        self.first.set()

    def chunk(self, json: bytes) -> None:
        raise AssertionError("no pass-through here")

    def terminal(self, terminal: Terminal) -> None:
        self.events.append("terminal")
        self.end, self.error = terminal, terminal.error
        self.ended.set()

    def lost(self, error: MeshError) -> None:
        self._failed("lost", error)

    def _failed(self, event: str, error: MeshError) -> None:
        self.events.append(event)
        self.error = error
        self.ended.set()

    async def begun(self) -> Sink:
        async with asyncio.timeout(WAIT_S):
            await self.first.wait()
        return self

    async def over(self) -> Sink:
        async with asyncio.timeout(WAIT_S):
            await self.ended.wait()
        return self


# -- Generate and the other calls -------------------------------------------------------------


async def test_generate_returns_the_engines_output() -> None:
    model = load_sim_model(SIM_MODEL_DIR)
    truth = TokenOracle(model.word_ids, model.eos_ids[0])
    async with working(speedup=0.0) as worker:
        preprocessed = preprocessed_request(
            stop_conditions=StopConditions(max_tokens=40, ignore_eos=True)
        )
        messages = await read_all(worker.generate("r", preprocessed))
        found = [token for message in messages for token in message.token_ids]
        assert found == truth.continue_tokens([1, 2, 3], 40, ignore_eos=True)
        assert [m.finish_reason for m in messages[:-1]] == [0] * (len(messages) - 1)
        assert messages[-1].finish_reason == request_pb2.FINISH_REASON_LENGTH
        assert messages[-1].usage.completion_tokens == 40
        assert (await worker.counters())["finished"] == 1


@pytest.mark.row("S4-32")
async def test_a_typed_error_arrives_typed_through_generate() -> None:
    async with working(FakeEngine()) as worker:
        call = worker.generate("refuse")
        with pytest.raises(PromptTooLong) as caught:
            await read_all(call)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.field == "token_ids"
        assert (await worker.counters())["failed"] == 1


@pytest.mark.row("S4-35")
@pytest.mark.parametrize("breach", ["late", "endless"])
async def test_a_contract_violation_is_an_internal_error_of_that_call_only(breach: str) -> None:
    engine = FakeEngine()
    async with working(engine) as worker:
        other = asyncio.create_task(read_all(worker.generate("gate")))
        call = worker.generate(breach)
        with pytest.raises(InternalError):
            await read_all(call)
        assert await call.code() is grpc.StatusCode.INTERNAL
        engine.gate.set()
        assert [t for m in await other for t in m.token_ids] == [7, 8]


@pytest.mark.row("S4-38", "S4-39")
async def test_cancelling_generate_frees_the_slot_in_time_and_aborts_nothing() -> None:
    engine = FakeEngine()
    async with working(engine) as worker:
        call = worker.generate("deaf")
        assert list((await call.read()).token_ids) == [7]
        assert await worker.open_slots() == 1
        call.cancel()
        assert await worker.freed_in_s() < FREED_S
        assert engine.closed == ["deaf"]
        assert engine.aborted == []
        assert (await worker.counters())["closed"] == 1


async def test_cancelling_generate_in_a_silent_prefill_frees_the_sims_slot_in_time() -> None:
    async with working(speedup=0.001) as worker:
        call = worker.generate("r")
        await until(lambda: worker.app.runner.open_requests == 1, "the worker has the request")
        call.cancel()
        assert await worker.freed_in_s() < FREED_S
        load = worker.app.engine.loads()[0]
        assert (load.running, load.waiting) == (0, 0)


async def test_generate_without_a_deadline_ends_at_the_workers_default() -> None:
    engine = FakeEngine()
    runner = Runner(engine)
    instance = Instance(1, NS, "worker", "", "127.0.0.1:1", model="fake")
    servicer = EngineServicer(
        runner,
        AttachServer(1, runner),
        lambda: instance,
        EngineConfig(),
        "fake",
        None,
        generate_timeout_max_s=0.05,
    )
    server = rpc.server()
    port = rpc.bind(server, "127.0.0.1", 0)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(request=to_proto(preprocessed_request()), request_id="wait")
        )
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(read_all(call), WAIT_S)
    await server.stop(None)
    assert engine.aborted == ["wait"]


async def test_abort_ends_a_request_by_its_id() -> None:
    engine = FakeEngine()
    async with working(engine) as worker:
        call = worker.generate("wait")
        await call.read()
        reply: pb.AbortResponse = await worker.unary(
            "Abort", pb.AbortRequest(request_id="wait", reason="test")
        )
        assert reply.aborted == 1
        assert [m.finish_reason for m in await read_all(call)] == [
            request_pb2.FINISH_REASON_CANCELLED
        ]
        assert engine.aborted == ["wait"]
        again: pb.AbortResponse = await worker.unary("Abort", pb.AbortRequest(request_id="wait"))
        assert again.aborted == 0


async def test_abort_requires_a_request_id() -> None:
    async with working(FakeEngine()) as worker:
        with pytest.raises(InvalidRequest) as caught:
            await worker.unary("Abort", pb.AbortRequest())
        assert caught.value.field == "request_id"


@pytest.mark.row("S4-25")
async def test_get_info_returns_the_identity_of_the_worker() -> None:
    engine = FakeEngine()
    async with working(engine, stable_name="w0", host="127.0.0.1") as worker:
        info: pb.GetInfoResponse = await worker.unary("GetInfo", pb.GetInfoRequest())
        assert info.worker_id == engine.worker_id == worker.app.instance_id
        assert (info.stable_name, info.model, info.role) == ("w0", "fake", "aggregated")
        assert (info.context_length, info.kv_block_size, info.draining) == (100, 16, False)
        assert not info.HasField("total_kv_blocks")
        assert len(info.card_checksum) == 64


@pytest.mark.row("S1-01")
async def test_get_load_counts_requests_of_attach_and_generate() -> None:
    async with working(FakeEngine()) as worker, worker.attached() as frontend:
        sink = Sink()
        frontend.submit(leg_request("deaf-1"), sink)
        call = worker.generate("deaf-2")
        await call.read()
        await sink.begun()
        load: pb.GetLoadResponse = await worker.unary("GetLoad", pb.GetLoadRequest())
        assert load.open_slots == 2
        assert [row.engine_step for row in load.loads] == [1]
        call.cancel()


async def test_artifacts_arrive_complete_with_their_checksum() -> None:
    async with working(FakeEngine()) as worker:
        call = worker.stub.GetArtifact(pb.GetArtifactRequest(name="tokenizer.json"), timeout=WAIT_S)
        chunks = [part async for part in call]
        data = b"".join(part.data for part in chunks)
        assert data == (SIM_MODEL_DIR / "tokenizer.json").read_bytes()
        assert (chunks[0].sha256, chunks[0].size) == (hashlib.sha256(data).hexdigest(), len(data))


@pytest.mark.parametrize(
    ("method", "message", "error"),
    [
        ("GetArtifact", pb.GetArtifactRequest(name="no-such"), NotFound),
        ("ListKvBlocks", pb.ListKvBlocksRequest(), Unimplemented),
    ],
)
async def test_unavailable_streams_end_with_a_typed_error(
    method: str, message: Any, error: type[MeshError]
) -> None:
    async with working(FakeEngine()) as worker:
        with pytest.raises(error):
            await read_all(getattr(worker.stub, method)(message, timeout=WAIT_S))


async def test_embeddings_are_unimplemented() -> None:
    async with working(FakeEngine()) as worker:
        with pytest.raises(Unimplemented):
            await worker.unary("Embed", pb.EmbedRequest())


async def test_health_reports_the_engine_service() -> None:
    """Without a registration, no peer can route to the worker: the process is not ready."""
    serving, not_serving = (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )
    expected = {SERVICE_NAME: serving, MEMBER_SERVICE: serving, "": not_serving}
    async with working(FakeEngine()) as worker:
        stub: Any = health_pb2_grpc.HealthStub(worker.channel)
        for service, status in expected.items():
            request = health_pb2.HealthCheckRequest(service=service)
            reply = await rpc.unary(stub.Check, request, timeout_s=WAIT_S)
            assert reply.status == status, service


# -- Attach -----------------------------------------------------------------------------------


async def open_attach(worker: Worker, hello: Hello) -> Any:
    call = worker.stub.Attach()
    await call.write(request_frame_to_proto(RequestFrame(hello=hello)))
    return call


async def drained(call: Any) -> Any:
    """Reads a call to its end and returns its status."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await call.code()


async def test_attach_to_another_workers_id_is_a_failed_precondition() -> None:
    async with working(FakeEngine()) as worker:
        call = await open_attach(worker, Hello(FRONTEND, worker.app.instance_id + 1, 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert mesh_error_from_rpc(caught.value).reason == "WRONG_WORKER"


async def test_a_newer_stream_replaces_the_older_and_closes_its_generators() -> None:
    engine = FakeEngine()
    async with working(engine) as worker, worker.attached(1) as older:
        sink = Sink()
        older.submit(leg_request("deaf"), sink)
        await sink.begun()
        async with worker.attached(2) as newer:
            other = Sink()
            newer.submit(leg_request("good"), other)
            assert (await sink.over()).events[-1] == "lost"
            assert sink.error is not None
            assert sink.error.reason == "REPLACED"
            assert (await other.over()).token_ids == [7, 8]
        assert engine.aborted == []
        assert set(engine.closed) == {"deaf", "good"}


async def test_a_stream_ends_between_two_writes_in_every_case() -> None:
    began, gate = asyncio.Event(), asyncio.Event()
    frames = [RequestFrame(hello=Hello(FRONTEND, 1, 1)), RequestFrame(hello=Hello(FRONTEND, 1, 2))]
    written: list[str] = []

    async def read() -> RequestFrame | None:
        if len(frames) == 1:
            await began.wait()
        return frames.pop(0)

    async def write(frame: object) -> None:
        began.set()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            written.append("cut")
            raise
        written.append("whole")

    serving = asyncio.create_task(AttachServer(1, Runner(FakeEngine())).serve(read, write))
    await until(lambda: not frames, "the second hello, a breach, is read")
    gate.set()
    with pytest.raises(InvalidRequest, match=r"rule \(a\)"):
        await asyncio.wait_for(serving, WAIT_S)
    assert written == ["whole"]


async def test_a_late_older_stream_is_rejected_without_side_effects() -> None:
    engine = FakeEngine()
    async with working(engine) as worker, worker.attached(2) as newer:
        sink = Sink()
        newer.submit(leg_request("gate"), sink)
        await sink.begun()
        call = await open_attach(worker, Hello(FRONTEND, worker.app.instance_id, 1))
        assert await drained(call) is grpc.StatusCode.FAILED_PRECONDITION
        engine.gate.set()
        assert (await sink.over()).token_ids == [7, 8]


@pytest.mark.row("S4-38", "S4-39")
async def test_a_closed_stream_closes_all_its_generators_in_time_and_aborts_none() -> None:
    engine = FakeEngine()
    async with working(engine) as worker:
        async with worker.attached() as frontend:
            sinks = [Sink() for _ in range(8)]
            for number, sink in enumerate(sinks):
                frontend.submit(leg_request(f"deaf-{number}"), sink)
            for sink in sinks:
                await sink.begun()
            assert await worker.open_slots() == 8
        assert await worker.freed_in_s() < FREED_S
        assert len(engine.closed) == 8
        assert engine.aborted == []
        assert (await worker.counters())["closed"] == 8


@pytest.mark.row("S4-39")
async def test_a_request_that_arrives_as_its_stream_fails_leaves_no_state() -> None:
    loop = asyncio.get_running_loop()
    came: asyncio.Future[RequestFrame] = loop.create_future()
    failed: asyncio.Future[None] = loop.create_future()
    reading = [came]
    runner = Runner(FakeEngine())

    async def read() -> RequestFrame | None:
        if len(reading) == 1:
            reading.append(came)
            return RequestFrame(hello=Hello(FRONTEND, 1, 1))
        return await came

    async def write(frame: object) -> None:
        await failed

    serving = asyncio.create_task(AttachServer(1, runner).serve(read, write))
    await until(lambda: len(reading) == 2, "the hello is read")
    # In this order in one loop turn, the slot's task is cancelled before its first step.
    failed.set_exception(WorkerLost("the wire broke", retryable=True))
    came.set_result(RequestFrame(submits=[(1, leg_request("good"))]))
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(serving, WAIT_S)
    assert dict(runner.counters) == {"accepted": 1, "closed": 1}
    assert runner.open_requests == 0


@pytest.mark.row("S4-39")
async def test_requests_that_end_with_their_stream_leave_no_state() -> None:
    engine = FakeEngine()
    async with working(engine) as worker:
        for seq in range(1, 21):
            async with worker.attached(seq) as frontend:
                frontend.submit(leg_request("deaf"), Sink())
                # Sleep: closed at any moment of the dial, of the request's delivery, and of its
                # first steps.
                await asyncio.sleep(0.0005 * seq)
        # A request may still be in delivery when its stream has ended.
        counters = worker.app.runner.counters
        await until(lambda: counters["accepted"] == counters["closed"], "all are closed")
        await worker.app.runner.wait_idle()


@pytest.mark.row("S2-21", "S2-22", "S2-23", "S2-24")
async def test_the_span_of_a_request_has_its_link_unless_that_is_malformed() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    links = {
        "good-1": TraceLink(trace_id, span_id),
        "good-2": TraceLink("z", ""),
        "good-3": TraceLink(trace_id[1:], span_id),
        "good-4": TraceLink(trace_id, span_id + "0"),
    }
    async with working(FakeEngine()) as worker, worker.attached() as frontend:
        spans = GenerateSpans("fake", "aggregated")
        spans._tracer = provider.get_tracer("test")
        worker.app.runner.spans = spans
        for name, link in links.items():
            sink, request = Sink(), preprocessed_request(migration_link=link)
            caller = f"00-{trace_id}-{'1' * 16}-01"
            frontend.submit(leg_request(name, request=request, traceparent=caller), sink)
            assert (await sink.over()).token_ids == [7, 8]
    found = {
        (span.attributes or {})["request_id"]: [
            (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links
        ]
        for span in exporter.get_finished_spans()
    }
    assert found == {"good-1": [(trace_id, span_id)], "good-2": [], "good-3": [], "good-4": []}


@pytest.mark.row("S4-29", "S4-37")
async def test_an_aborted_slot_gets_its_terminal_and_the_engine_an_abort() -> None:
    engine = FakeEngine()
    async with working(engine) as worker, worker.attached() as frontend:
        for kind in ("wait", "deaf"):
            took_s = []
            for number in range(TRIES):
                sink = Sink()
                slot = frontend.submit(leg_request(f"{kind}-{number}"), sink)
                await sink.begun()
                began = asyncio.get_running_loop().time()
                frontend.abort(slot, "client_gone")
                await sink.over()
                took_s.append(asyncio.get_running_loop().time() - began)
                assert sink.end is not None
                assert sink.end.finish_reason is FinishReason.CANCELLED
                assert engine.aborted.pop() == f"{kind}-{number}"
            assert min(took_s) < FREED_S
        assert engine.aborted == []


@pytest.mark.row("S4-31", "S4-32", "S4-35")
@pytest.mark.parametrize(
    ("kind", "error"),
    [("refuse", PromptTooLong), ("late", InternalError), ("endless", InternalError)],
)
async def test_a_failed_slot_ends_with_its_typed_error_and_the_stream_continues(
    kind: str, error: type[MeshError]
) -> None:
    async with working(FakeEngine()) as worker, worker.attached() as frontend:
        failing, other = Sink(), Sink()
        frontend.submit(leg_request(kind), failing)
        frontend.submit(leg_request("good"), other)
        assert type((await failing.over()).error) is error
        assert failing.events[-1] == "terminal"
        assert (await other.over()).error is None


@pytest.mark.slow
async def test_the_worker_enforces_the_deadline_of_a_submit() -> None:
    engine = FakeEngine()
    async with working(engine) as worker, worker.attached() as frontend:
        sink = Sink()
        frontend.submit(leg_request("deaf", timeout_s=0.05), sink)
        await sink.over()
        assert type(sink.error) is DeadlineExceeded
        assert engine.closed == ["deaf"]
        assert await worker.open_slots() == 0


async def test_rejections_over_attach_carry_whether_another_worker_may_be_tried() -> None:
    async with working(FakeEngine()) as worker, worker.attached() as frontend:
        mismatched, late = Sink(), Sink()
        frontend.submit(
            leg_request("good", request=preprocessed_request(card_checksum="other")), mismatched
        )
        await mismatched.over()
        worker.app.runner.is_draining = True
        frontend.submit(leg_request("good"), late)
        await late.over()
    assert (mismatched.events, late.events) == (["rejected"], ["rejected"])
    assert mismatched.error is not None
    assert (mismatched.error.reason, mismatched.error.retryable) == ("CARD_MISMATCH", False)
    assert late.error is not None
    assert (late.error.reason, late.error.retryable) == ("DRAINING", True)


async def test_a_drain_sends_the_last_frames_completely_and_then_closes_the_stream() -> None:
    engine = FakeEngine()
    async with working(engine) as worker, worker.attached() as frontend:
        sinks = [Sink() for _ in range(64)]
        for number, sink in enumerate(sinks):
            frontend.submit(leg_request(f"gate-{number}"), sink)
        for sink in sinks:
            await sink.begun()
        drain = asyncio.create_task(worker.app.drain(WAIT_S))
        await until(lambda: worker.app.runner.is_draining, "the drain begins")
        engine.gate.set()
        assert await drain == []
        for sink in sinks:
            assert (await sink.over()).events[-1] == "terminal"
            assert sink.token_ids == [7, 8]
        await until(lambda: frontend.is_closed, "the stream is closed")


@pytest.mark.slow
async def test_requests_that_outlive_the_drain_are_cut_and_logged() -> None:
    engine = FakeEngine()
    async with working(engine) as worker, worker.attached() as frontend:
        sink = Sink()
        frontend.submit(leg_request("deaf"), sink)
        await sink.begun()
        cut = await worker.app.drain(0.01)
        assert cut[0] == "1 requests"
        await sink.over()
        assert isinstance(sink.error, WorkerLost | Unavailable)
        assert sink.error.retryable  # so that a frontend migrates it
        assert engine.closed == ["deaf"]


# -- Life cycle -------------------------------------------------------------------------------


class NotingRegistry(MemoryRegistry):
    """Records discovery events in the engine's list of steps."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__(MemoryStore())
        self._steps = steps

    async def register(self, instance: Instance) -> Lease:
        self._steps.append("register")
        return NotingLease(await super().register(instance), self._steps)

    async def close(self) -> None:
        self._steps.append("registry closed")
        await super().close()


class NotingLease:
    def __init__(self, lease: Lease, steps: list[str]) -> None:
        self._lease = lease
        self._steps = steps

    @property
    def instance(self) -> Instance:
        return self._lease.instance

    async def update(self, instance: Instance) -> None:
        await self._lease.update(instance)

    async def close(self) -> None:
        self._steps.append("deregister")
        await self._lease.close()


class LivingWorker(WorkerApp):
    """Gives a test access to the lifecycle."""

    lifecycle: Lifecycle | None = None

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        self.lifecycle = lifecycle
        return await super().start(lifecycle)


@asynccontextmanager
async def lived(engine: FakeEngine) -> AsyncIterator[tuple[LivingWorker, asyncio.Task[int]]]:
    """A worker in `lifecycle.run`, with the task that returns its exit status."""
    registry = NotingRegistry(engine.steps)
    app = LivingWorker(WorkerConfig(registry="memory"), registry=registry, engine=engine)
    task = asyncio.create_task(run_lifecycle(app, notice_s=0.0, drain_s=0.2, signals=False))
    try:
        yield app, task
    finally:
        if app.lifecycle is not None:
            app.lifecycle.drain("test over")
        await asyncio.wait([task], timeout=WAIT_S)
        assert task.done(), "the worker does not end"


async def ended(app: LivingWorker, task: asyncio.Task[int]) -> int:
    """Ends a ready worker; returns its exit status."""
    await until(lambda: app.lifecycle is not None, "it begins")
    assert app.lifecycle is not None
    async with asyncio.timeout(WAIT_S):
        await app.lifecycle.ready()
        app.lifecycle.drain("test")
        return await task


@pytest.mark.row("S4-21", "S4-40", "S4-43", "S4-47")
async def test_shutdown_leaves_discovery_then_drains_then_cleans_up_once() -> None:
    engine = FakeEngine()
    async with lived(engine) as (app, task):
        assert await ended(app, task) == 0
    assert engine.steps == [
        *("start", "register", "deregister", "drain", "cleanup", "registry closed")
    ]


@pytest.mark.row("S4-24")
async def test_generate_works_before_the_worker_is_registered() -> None:
    async with working(FakeEngine()) as worker:
        assert await worker.app._registry.snapshot(NS) == await worker.app._registry.snapshot(NS)
        assert not (await worker.app._registry.snapshot(NS)).instances
        messages = await read_all(worker.generate("good"))
        assert [t for m in messages for t in m.token_ids] == [7, 8]


@pytest.mark.row("S4-26")
async def test_a_start_may_take_long_and_registration_waits_for_it() -> None:
    gate = asyncio.Event()
    engine = FakeEngine(start=gate.wait)
    async with lived(engine) as (app, task):
        await until(lambda: engine.steps == ["start"], "the engine starts")
        assert app.address == ""
        gate.set()
        assert await ended(app, task) == 0
    assert engine.steps[:2] == ["start", "register"]


@pytest.mark.row("S4-41")
async def test_a_failed_drain_is_logged_and_the_shutdown_continues() -> None:
    async def fail() -> None:
        raise RuntimeError("a transfer is stuck")

    engine = FakeEngine(drain=fail)
    async with lived(engine) as (app, task):
        assert await ended(app, task) == 0
    assert engine.steps[-3:] == ["drain", "cleanup", "registry closed"]


@pytest.mark.row("S4-40", "S4-42")
async def test_a_drain_waits_for_transfers_while_health_and_registry_work() -> None:
    seen: list[object] = []

    async def transfers() -> None:
        assert app.lifecycle is not None
        seen.append(app.runner.is_draining)
        snapshot = await app._registry.snapshot(NS)  # discovery still works,
        seen.append(len(snapshot.instances))  # and has removed this worker

    engine = FakeEngine(drain=transfers)
    async with lived(engine) as (app, task):
        assert await ended(app, task) == 0
    assert seen == [True, 0]


@pytest.mark.row("S4-44", "S4-47")
async def test_cleanup_follows_a_start_that_failed() -> None:
    async def fail() -> None:
        raise Conflict("the device is in use")

    engine = FakeEngine(start=fail)
    async with lived(engine) as (_, task):
        assert await asyncio.wait_for(task, WAIT_S) == 1
    assert engine.steps == ["start", "cleanup", "registry closed"]


@pytest.mark.row("S4-44", "S4-47")
async def test_cleanup_follows_a_cancelled_start() -> None:
    engine = FakeEngine(start=asyncio.Event().wait)
    async with lived(engine) as (app, task):
        await until(lambda: engine.steps == ["start"], "the engine starts")
        assert app.lifecycle is not None
        app.lifecycle.drain("SIGTERM")
        await asyncio.wait_for(task, WAIT_S)
    assert engine.steps == ["start", "cleanup", "registry closed"]


@pytest.mark.row("S4-45")
async def test_cleanup_is_not_called_for_an_engine_that_was_never_started() -> None:
    engine = FakeEngine()
    app = WorkerApp(
        WorkerConfig(registry="memory"), registry=NotingRegistry(engine.steps), engine=engine
    )
    await app.close()
    assert engine.steps == ["registry closed"]


async def test_a_failed_cleanup_is_logged_and_the_registry_is_closed_nevertheless() -> None:
    async def fail() -> None:
        raise RuntimeError("stuck")

    engine = FakeEngine(cleanup=fail)
    async with lived(engine) as (app, task):
        assert await ended(app, task) == 1
    assert engine.steps[-2:] == ["cleanup", "registry closed"]


@pytest.mark.row("S4-46")
@pytest.mark.parametrize("make", [lambda: SimEngine(SimConfig()), lambda: EchoEngine(EchoConfig())])
async def test_a_second_cleanup_of_our_engines_does_nothing(make: Callable[[], LLMEngine]) -> None:
    for is_started in (True, False):
        engine = make()
        if is_started:
            await engine.start(1)
        await engine.cleanup()
        await engine.cleanup()


@pytest.mark.slow
@pytest.mark.row("S4-37", "S4-38")
async def test_shutdown_closes_running_requests_without_abort() -> None:
    engine = FakeEngine()
    async with lived(engine) as (app, task):
        await until(lambda: app.lifecycle is not None, "it begins")
        assert app.lifecycle is not None
        await app.lifecycle.ready()
        async with rpc.channel(app.address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            call = stub.Generate(
                pb.GenerateRequest(request=to_proto(preprocessed_request()), request_id="deaf")
            )
            await call.read()
            app.lifecycle.drain("test")
            assert await asyncio.wait_for(task, WAIT_S) == 0
            call.cancel()
    assert engine.closed == ["deaf"]
    assert engine.aborted == []
