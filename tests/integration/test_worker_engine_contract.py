"""A running worker keeps the contract with its engine: gRPC calls in, calls of the engine out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from common.errors import InternalError, PromptTooLong, Unavailable
from common.registry.registry import MemoryRegistry, MemoryStore
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from kvmesh.types.v1 import request_pb2
from tests.kit.apps import living
from tests.kit.engines import RecordingEngine, Script
from tests.kit.local_mesh import NS, local_mesh
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines import contract
from worker_svc.engines.contract import (
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
    usage,
)

U32_MAX = 2**32 - 1
SIZES: dict[str, Any] = {
    "context_length": 8192,
    "kv_cache_block_size": 32,
    "total_kv_blocks": 100,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 512,
}


class Worker:
    """A running worker with this engine and a channel to it."""

    def __init__(self, app: WorkerApp, engine: RecordingEngine, store: MemoryStore) -> None:
        self.app = app
        self.engine = engine
        self.registry = MemoryRegistry(store)
        self.channel = rpc.channel(app.address)
        self.stub = engine_pb2_grpc.EngineServiceStub(self.channel)

    def call(self, request_id: str = "r") -> Any:
        request = request_pb2.PreprocessedRequest(token_ids=[1, 2, 3])
        message = pb.GenerateRequest(request=request, request_id=request_id)
        return self.stub.Generate(message, timeout=WAIT_S)

    async def generate(self, request_id: str = "r") -> list[pb.GenerateResponse]:
        """All messages of a Generate call. Raises its MeshError."""
        call = self.call(request_id)
        try:
            async with rpc.cancelling(call):
                return await rest(call)
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from error

    async def abort(self, request_id: str) -> None:
        await rpc.unary(self.stub.Abort, pb.AbortRequest(request_id=request_id), timeout_s=WAIT_S)

    async def info(self) -> pb.GetInfoResponse:
        info: pb.GetInfoResponse = await rpc.unary(
            self.stub.GetInfo, pb.GetInfoRequest(), timeout_s=WAIT_S
        )
        return info


async def rest(call: Any) -> list[pb.GenerateResponse]:
    """The messages of a call that were not read yet."""
    messages = []
    # Ends: the call has a time limit.
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@asynccontextmanager
async def working(engine: RecordingEngine, **settings: Any) -> AsyncIterator[Worker]:
    store = MemoryStore()
    config = WorkerConfig(registry="memory", canary_idle_s=0.0, **settings)
    app = WorkerApp(config, registry=MemoryRegistry(store), engine=engine)
    async with living(app):
        worker = Worker(app, engine, store)
        async with worker.channel:
            yield worker


def yields(*outputs: LLMEngineOutput) -> Script:
    """A script with these chunks."""

    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        for output in outputs:
            yield output

    return script


async def until_stopped(
    request: PreprocessedRequest, ctx: GenerateContext
) -> AsyncGenerator[LLMEngineOutput, None]:
    """A script that yields a token and ends when its request is stopped."""
    yield chunk.token(7)
    await ctx.stopped()
    yield chunk.cancelled()


# The context.


@pytest.mark.row("S4-01", "S4-02", "S4-08", "S4-29")
async def test_an_engine_sees_the_stop_of_its_request_through_the_context() -> None:
    seen: list[tuple[str, bool]] = []

    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        seen.append((ctx.id, ctx.is_stopped))
        yield chunk.token(7)
        await ctx.stopped()
        seen.append((ctx.id, ctx.is_stopped))
        yield chunk.cancelled()

    async with working(RecordingEngine(script)) as worker:
        call = worker.call("abc")
        async with rpc.cancelling(call):
            assert list((await call.read()).token_ids) == [7]
            await worker.abort("abc")
            last = (await rest(call))[-1]
        assert last.finish_reason == request_pb2.FINISH_REASON_CANCELLED
        assert seen == [("abc", False), ("abc", True)]


@pytest.mark.row("S4-08")
async def test_an_engine_can_stop_and_kill_its_own_request() -> None:
    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        ctx.stop_generating() if ctx.id == "stop" else ctx.kill()
        await ctx.stopped()
        if ctx.id == "kill":
            await ctx.killed()
        yield chunk.cancelled()

    async with working(RecordingEngine(script)) as worker:
        for request_id in ("stop", "kill"):
            (last,) = await worker.generate(request_id)
            assert last.finish_reason == request_pb2.FINISH_REASON_CANCELLED


@pytest.mark.row("S4-03", "S4-36")
async def test_a_context_outlives_the_stream() -> None:
    kept: list[EngineContext] = []

    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        kept.append(ctx)
        yield chunk.stop()

    async with working(RecordingEngine(script)) as worker:
        await worker.generate("gone")
        (ctx,) = kept
        assert (ctx.id, ctx.is_stopped) == ("gone", False)


@pytest.mark.row("S4-04", "S4-05", "S4-06", "S4-07")
@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
async def test_the_first_token_signal_exists_on_decode_only_and_fires_by_itself(
    role: str,
) -> None:
    fired: list[bool | None] = []

    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        sender = ctx.first_token

        def record() -> None:
            fired.append(None if sender is None else sender.is_set())

        record()
        if ctx.id == "side channel":
            ctx.notify_first_token()
            ctx.notify_first_token()
            record()
        yield chunk.token(7)
        record()
        yield chunk.stop()

    engine = RecordingEngine(script)
    async with working(engine, role=role) as worker:
        await worker.generate("stream")
        await worker.generate("side channel")
    if role == "decode":
        assert fired == [False, True, False, True, True]
    else:
        assert fired == [None] * 5


# What a worker advertises.


@pytest.mark.row("S4-09", "S4-10", "S4-18", "S4-20")
async def test_what_an_engine_does_not_report_is_absent_and_never_zero() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("context_length", "kv_cache_block_size"))
    async with working(RecordingEngine(**nothing)) as worker:
        info = await worker.info()
        (entry,) = (await worker.registry.snapshot(NS)).of("worker")
    assert info.model == entry.model == "m", "the name of the model, without a served name"
    for name in ("context_length", "total_kv_blocks", "max_num_seqs", "max_num_batched_tokens"):
        assert not info.HasField(name), name
        assert getattr(entry, name) is None
    assert not info.HasField("kv_block_size")
    assert not info.HasField("bootstrap_host")
    assert (entry.block_size, entry.bootstrap_host, entry.bootstrap_port) == (None, None, None)


@pytest.mark.row("S4-11", "S4-13", "S4-14", "S4-15", "S4-10")
async def test_what_an_engine_reports_is_advertised() -> None:
    engine = RecordingEngine(served_model_name="public", **SIZES)
    async with working(engine) as worker:
        info = await worker.info()
        (entry,) = (await worker.registry.snapshot(NS)).of("worker")
    assert info.model == entry.model == "public"
    assert (info.kv_block_size, entry.block_size) == (32, 32)
    for name, size in SIZES.items():
        if name != "kv_cache_block_size":
            assert getattr(info, name) == getattr(entry, name) == size


@pytest.mark.row("S4-16", "S4-17", "S4-19")
@pytest.mark.parametrize(
    ("reported", "published"),
    [
        ({"bootstrap_host": "10.0.0.1", "bootstrap_port": 65535}, ("10.0.0.1", 65535)),
        ({"bootstrap_host": "10.0.0.1"}, (None, None)),
        ({"bootstrap_port": 7000}, (None, None)),
    ],
)
async def test_a_handoff_address_is_published_with_host_and_port_or_not_at_all(
    reported: dict[str, Any], published: tuple[str | None, int | None]
) -> None:
    async with working(RecordingEngine(**reported), role="prefill") as worker:
        info = await worker.info()
        (entry,) = (await worker.registry.snapshot(NS)).of("worker")
    assert (entry.bootstrap_host, entry.bootstrap_port) == published
    assert info.HasField("bootstrap_host") is (published[0] is not None)


@pytest.mark.row("S4-12")
async def test_requests_of_an_engine_without_blocks_are_spread_without_kv_routing() -> None:
    engines = [RecordingEngine(kv_cache_block_size=None) for _ in range(2)]
    async with (
        local_mesh() as bed,
        bed.router(),
        bed.worker(engines[0]) as app,
        bed.worker(engines[1]),
    ):
        await until(lambda: len(bed.frontend._models.workers("m")) == 2, "both workers are known")
        for _ in range(8):
            assert (await bed.complete(prompt=[5] * 64)).status_code == 200
        assert (app._instance().kv_index, app._instance().block_size) == ("none", None)
        counts = [len(engine.requests) for engine in engines]
    assert counts == [4, 4], "equal prompts do not meet on one worker"


# The life cycle.


@pytest.mark.row("S4-21", "S4-40", "S4-43", "S4-47")
async def test_the_engine_is_started_used_aborted_drained_and_cleaned_up_once() -> None:
    engine = RecordingEngine(until_stopped)
    async with working(engine) as worker:
        call = worker.call("one")
        async with rpc.cancelling(call):
            await call.read()
            await worker.abort("one")
            assert await rest(call)
    assert engine.calls == ["start", "generate", "abort", "closed", "drain", "cleanup"]


@pytest.mark.row("S4-23")
async def test_the_engine_receives_the_id_of_its_worker() -> None:
    engine = RecordingEngine()
    async with working(engine) as worker:
        assert engine.worker_ids == [(await worker.info()).worker_id]


@pytest.mark.row("S4-26")
async def test_a_worker_joins_when_its_slow_engine_has_started_and_logs_the_time() -> None:
    class SlowEngine(RecordingEngine):
        """Takes a while to start."""

        async def start(self, worker_id: int) -> Any:
            # Sleep: the engine starts slowly.
            await asyncio.sleep(0.2)
            return await super().start(worker_id)

    with capture_logs() as logs:
        async with working(SlowEngine()) as worker:
            assert await worker.generate()
    (line,) = [line for line in logs if line["event"] == "engine_started"]
    assert line["s"] >= 0.2


@pytest.mark.row("S4-41")
async def test_a_failing_drain_is_logged_and_the_engine_is_cleaned_up() -> None:
    class Undrainable(RecordingEngine):
        """Fails to drain."""

        async def drain(self) -> None:
            await super().drain()
            raise RuntimeError("a defect of the engine")

    engine = Undrainable()
    with capture_logs() as logs:
        async with working(engine) as worker:
            assert await worker.generate()
    assert engine.calls[-2:] == ["drain", "cleanup"]
    assert [line for line in logs if "drain" in line["event"]]


# The stream.


@pytest.mark.row("S4-22", "S4-28")
async def test_requests_run_concurrently_on_one_engine() -> None:
    both = asyncio.Barrier(2)

    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(1 if ctx.id == "one" else 2)
        await both.wait()
        yield chunk.stop()

    async with working(RecordingEngine(script)) as worker:
        responses = await asyncio.gather(worker.generate("one"), worker.generate("two"))
    tokens = [[t for message in messages for t in message.token_ids] for messages in responses]
    assert tokens == [[1], [2]]


@pytest.mark.row("S4-27")
async def test_generate_is_a_stream_of_chunks_or_a_typed_error() -> None:
    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if ctx.id == "refused":
            raise PromptTooLong("3 tokens are too many", field="token_ids")
        yield chunk.token(7)
        if ctx.id == "broken":
            raise Unavailable("the engine ran out of memory")
        yield chunk.stop()

    async with working(RecordingEngine(script)) as worker:
        assert [t for message in await worker.generate("good") for t in message.token_ids] == [7]
        with pytest.raises(PromptTooLong, match="too many"):
            await worker.generate("refused")
        call = worker.call("broken")
        assert list((await call.read()).token_ids) == [7]
        with pytest.raises(grpc.aio.AioRpcError, match="out of memory"):
            await call.read()


@pytest.mark.row("S4-30", "S4-48", "S4-54")
async def test_only_the_last_message_has_a_finish_reason() -> None:
    async with working(RecordingEngine(yields(chunk.token(42), chunk.stop()))) as worker:
        first, last = await worker.generate()
    assert list(first.token_ids) == [42]
    # Unset fields do not appear.
    assert [field.name for field, _ in first.ListFields()] == ["token_ids"]
    assert last.finish_reason == request_pb2.FINISH_REASON_STOP
    assert not last.token_ids


@pytest.mark.row("S4-49")
@pytest.mark.parametrize(
    ("terminal", "reason"),
    [
        (chunk.cancelled(), request_pb2.FINISH_REASON_CANCELLED),
        (chunk.stop(), request_pb2.FINISH_REASON_STOP),
        (chunk.length(), request_pb2.FINISH_REASON_LENGTH),
    ],
)
async def test_a_terminal_chunk_has_its_finish_reason(
    terminal: LLMEngineOutput, reason: int
) -> None:
    async with working(RecordingEngine(yields(terminal))) as worker:
        (last,) = await worker.generate()
    assert last.finish_reason == reason


@pytest.mark.row("S4-33", "S4-49")
async def test_an_error_chunk_is_an_internal_error_with_its_message() -> None:
    async with working(RecordingEngine(yields(chunk.error("out of paper")))) as worker:
        with pytest.raises(InternalError, match="out of paper"):
            await worker.generate()


@pytest.mark.row("S4-50", "S4-51", "S4-52", "S4-55")
async def test_a_terminal_chunk_can_carry_tokens_and_usage() -> None:
    output = chunk.length().with_tokens([4]).with_tokens([1, 2, 3]).with_usage(usage(10, 3))
    async with working(RecordingEngine(yields(output))) as worker:
        (last,) = await worker.generate()
    assert list(last.token_ids) == [1, 2, 3]
    assert last.finish_reason == request_pb2.FINISH_REASON_LENGTH
    assert last.usage.total_tokens == 13


@pytest.mark.row("S4-34", "S4-53", "S4-56", "S4-57")
@pytest.mark.parametrize(
    ("prompt", "completion", "total"), [(7, 11, 18), (U32_MAX, 10, U32_MAX), (10, U32_MAX, U32_MAX)]
)
async def test_the_total_of_a_usage_saturates_and_has_no_details(
    prompt: int, completion: int, total: int
) -> None:
    output = chunk.stop().with_usage(usage(prompt, completion))
    async with working(RecordingEngine(yields(output))) as worker:
        (last,) = await worker.generate()
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (prompt, completion)
    assert last.usage.total_tokens == total
    assert not last.usage.HasField("prompt_tokens_details")
    assert not last.usage.HasField("completion_tokens_details")


@pytest.mark.row("S4-58", "S4-59", "S4-60", "S4-61", "S4-62")
async def test_an_engine_needs_the_names_of_one_module_only() -> None:
    seen: list[contract.PreprocessedRequest] = []

    async def script(
        request: contract.PreprocessedRequest, ctx: contract.GenerateContext
    ) -> AsyncGenerator[contract.LLMEngineOutput, None]:
        seen.append(request)
        if ctx.id == "refused":
            raise contract.InvalidRequest("no", "token_ids")
        assert isinstance(ctx, contract.EngineContext)
        yield contract.LLMEngineOutput(
            finish_reason=contract.FinishReason.LENGTH,
            completion_usage=contract.CompletionUsage(
                prompt_tokens=1, completion_tokens=2, total_tokens=3
            ),
        )

    message = request_pb2.PreprocessedRequest(
        token_ids=[1],
        stop_conditions=request_pb2.StopConditions(max_tokens=3),
        sampling_options=request_pb2.SamplingOptions(seed=4),
        output_options=request_pb2.OutputOptions(logprobs=1),
        bootstrap_info=request_pb2.BootstrapInfo(
            bootstrap_host="h", bootstrap_port=1, bootstrap_room=2
        ),
        prefill_result=request_pb2.PrefillResult(disaggregated_params_json='{"a": 1}'),
    )
    async with working(RecordingEngine(script)) as worker:
        call = worker.stub.Generate(pb.GenerateRequest(request=message), timeout=WAIT_S)
        (last,) = [response async for response in call]
        with pytest.raises(contract.InvalidRequest):
            await worker.generate("refused")
    assert last.usage.total_tokens == 3
    request = seen[0]
    assert request.stop_conditions == contract.StopConditions(max_tokens=3)
    assert request.sampling_options == contract.SamplingOptions(seed=4)
    assert request.output_options == contract.OutputOptions(logprobs=1)
    assert request.bootstrap_info == contract.BootstrapInfo("h", 1, 2)
    assert request.prefill_result == contract.PrefillResult({"a": 1})
