"""EngineService over gRPC: translates between messages and the runner."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio

from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    NotFound,
    RequestCancelled,
    Unimplemented,
    Unsupported,
)
from common.kv.hashing import hashes_to_bytes
from common.registry.card import ModelCard
from common.registry.instances import Instance
from common.request.embedding import Vector, check_dimensions, load_vector, shorten
from common.request.preprocessed import (
    PreprocessedEmbeddingRequest,
    PreprocessedRequest,
    from_json,
    usage,
)
from common.request.token_stream import LegRequest, RequestFrame, ResponseFrame
from common.rpc.call_context import remaining_time_s, request_id
from common.runtime.tasks import TaskGroup
from common.streams.writer import FrameWriter
from common.wire.kv import TIER_BY_NAME
from common.wire.load import load_to_proto
from common.wire.preprocessed import (
    dataclass_from_proto,
    dataclass_to_proto,
    finish_reason_to_proto,
    from_proto,
)
from common.wire.token_stream import request_frame_from_proto, response_frame_to_proto
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.types.v1 import request_pb2
from worker_svc.engines.contract import EngineConfig, LLMEngineOutput
from worker_svc.kv_events.publisher import Publisher
from worker_svc.serving.attach_server import AttachServer
from worker_svc.serving.runner import Runner

# Limit of a Generate call without a deadline.
GENERATE_TIMEOUT_MAX_S = 600.0
_ARTIFACT_CHUNK = 1 << 20
# The annotation that requests the id of an Embed call.
_REQUEST_ID = "request_id"
_TIER_NAMES = {tier: name for name, tier in TIER_BY_NAME.items()}

# The context is generic over message types; nothing here depends on them.
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(eq=False)
class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    runner: Runner
    attach: AttachServer
    instance: Callable[[], Instance]
    config: EngineConfig
    engine_name: str
    card: ModelCard | None
    publisher: Publisher | None = None
    generate_timeout_max_s: float = GENERATE_TIMEOUT_MAX_S

    # grpc.aio accepts coroutines; the generated types allow generators only.
    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[engine_pb2.AttachRequest], context: Context
    ) -> None:
        async def read() -> RequestFrame | None:
            message = await context.read()
            return None if message is grpc.aio.EOF else request_frame_from_proto(message)

        async def write(frame: ResponseFrame) -> None:
            await context.write(response_frame_to_proto(frame))

        await self.attach.serve(read, write)

    async def Generate(  # type: ignore[override]
        self, request: engine_pb2.GenerateRequest, context: Context
    ) -> None:
        """Runs one request; cancelling the call closes the engine's generator."""
        timeout_s = remaining_time_s(self.generate_timeout_max_s)
        leg_request = LegRequest(
            request_id=request.request_id or request_id() or "",
            timeout_s=timeout_s,
            request=_read_request(request),
        )
        key = self.runner.admit(leg_request)
        outputs: list[LLMEngineOutput] = []
        writer = FrameWriter(partial(_next_generate_response, outputs))

        def emit(output: LLMEngineOutput) -> None:
            outputs.append(output)
            writer.wake()

        async def run_request() -> LLMEngineOutput | None:
            try:
                return await self.runner.run(key, emit)
            except MeshError as error:
                writer.close(error)  # raised between two writes: grpc sends no status during one
                return None
            finally:
                writer.close()

        try:
            async with TaskGroup() as tasks:
                run = tasks.create_task(run_request())
                tasks.create_task(writer.run(context.write))
                _, running = await asyncio.wait([run], timeout=timeout_s)
                if running:
                    await self.runner.abort(key, "deadline")
        finally:
            self.runner.discard(key)
        terminal = run.result()
        assert terminal is not None, "the writer raised its error"
        await context.write(_last_generate_response(terminal))

    async def Abort(
        self, request: engine_pb2.AbortRequest, context: Context
    ) -> engine_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id must not be empty", "request_id")
        reason = request.reason or "abort_rpc"
        aborted = await self.runner.abort_request(request.request_id, reason)
        return engine_pb2.AbortResponse(aborted=aborted)

    async def Embed(
        self, request: engine_pb2.EmbedRequest, context: Context
    ) -> engine_pb2.EmbedResponse:
        """Returns one vector per text. Each text is a request of its own on the engine."""
        if "embedding" not in self.config.kinds:
            raise Unimplemented(f"the {self.engine_name} engine computes no embeddings")
        embedding = _read_embedding(request)
        self._check_embedding(embedding)
        leg_id = request_id() or uuid.uuid4().hex
        try:
            async with asyncio.timeout(remaining_time_s(self.generate_timeout_max_s)):
                async with TaskGroup() as tasks:
                    runs = [
                        tasks.create_task(self._embed(embedding, index, f"{leg_id}-{index}"))
                        for index in range(len(embedding.token_ids))
                    ]
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed on the worker") from None
        is_named = embedding.has_annotation(_REQUEST_ID)
        response = engine_pb2.EmbedResponse(request_id=leg_id if is_named else "")
        for run in runs:
            vector = shorten(run.result(), embedding.dimensions)
            if embedding.encoding_format == "base64":
                response.embeddings.add(values_le=vector.astype("<f4").tobytes())
            else:
                response.embeddings.add(values=vector.tolist())
        tokens = sum(map(len, embedding.token_ids))
        dataclass_to_proto(usage(tokens, 0), response.usage)
        return response

    def _check_embedding(self, embedding: PreprocessedEmbeddingRequest) -> None:
        """Raises InvalidRequest or Unsupported, which name the field."""
        if embedding.encoding_format not in (None, "float", "base64"):
            text = f"encoding_format {embedding.encoding_format!r} is not float or base64"
            raise InvalidRequest(text, "request.encoding_format")
        for annotation in embedding.annotations:
            if annotation != _REQUEST_ID:
                text = f"{annotation!r} is not {_REQUEST_ID!r}, the only annotation of embeddings"
                raise Unsupported("request.annotations", text)
        if not embedding.token_ids:
            raise InvalidRequest("token_ids has no texts", "request.token_ids")
        size, can_shorten = self.config.embedding_size, self.config.shorter_embeddings
        check_dimensions(embedding.dimensions, size, can_shorten=can_shorten)

    async def _embed(
        self, embedding: PreprocessedEmbeddingRequest, index: int, leg_id: str
    ) -> Vector:
        """Runs one text; cancelling it ends its work."""
        request = PreprocessedRequest(
            model=embedding.model,
            token_ids=embedding.token_ids[index],
            card_checksum=embedding.card_checksum,
        )
        leg_request = LegRequest(leg_id, request=request, phase="embedding")
        key = self.runner.admit(leg_request)
        chunks: list[bytes] = []

        def emit(output: LLMEngineOutput) -> None:
            if output.chunk_json is not None:
                chunks.append(output.chunk_json)

        await self.runner.run(key, emit)
        if not chunks:
            raise RequestCancelled("the worker cancelled the request")
        return load_vector(chunks[0])

    async def ListKvBlocks(  # type: ignore[override]
        self, request: engine_pb2.ListKvBlocksRequest, context: Context
    ) -> None:
        """Sends the published sets of a rank, tier by tier; one empty message if they are empty."""
        if self.publisher is None or self.instance().kv_index != "events":
            raise Unimplemented(f"kv_index is {self.instance().kv_index!r}: no block is published")
        source = self.publisher.sources.get(request.dp_rank)
        if source is None:
            raise NotFound(f"unknown dp_rank {request.dp_rank}", field="dp_rank")
        for chunk in source.event_log.snapshot():
            message = engine_pb2.ListKvBlocksResponse(
                epoch=chunk.epoch,
                sequence=chunk.sequence,
                prefix_hashes=hashes_to_bytes(chunk.hashes),
                tier=_TIER_NAMES[chunk.tier],
            )
            await context.write(message)

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: Context
    ) -> engine_pb2.GetInfoResponse:
        """Returns the identity, configuration and counters of the worker."""
        instance, config = self.instance(), self.config
        return engine_pb2.GetInfoResponse(
            worker_id=instance.id,
            stable_name=instance.stable_name,
            model=instance.model,
            card_checksum=instance.card_checksum,
            role=instance.role,
            engine=self.engine_name,
            context_length=config.context_length,
            kv_block_size=config.kv_cache_block_size,
            total_kv_blocks=config.total_kv_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            bootstrap_host=instance.bootstrap_host,
            bootstrap_port=instance.bootstrap_port,
            transfer_group=instance.transfer_group,
            local_prefill=instance.local_prefill,
            kv_index=instance.kv_index,
            kv_index_reason=config.kv_index_reason,
            draining=self.runner.is_draining,
            counters={
                **self.runner.counts(),
                **(self.publisher.metric_values() if self.publisher is not None else {}),
            },
        )

    async def GetLoad(
        self, request: engine_pb2.GetLoadRequest, context: Context
    ) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(
            loads=[load_to_proto(load) for load in self.runner.loads()],
            open_slots=self.runner.open_requests,
            engine_failure=self.runner.engine_failure,
        )

    async def GetArtifact(
        self, request: engine_pb2.GetArtifactRequest, context: Context
    ) -> AsyncIterator[engine_pb2.GetArtifactResponse]:
        """Sends one artifact of the model card from an offset, in chunks."""
        artifact = self.card.artifacts.get(request.name) if self.card is not None else None
        if artifact is None or artifact.inline is None:
            raise NotFound(f"the card has no artifact {request.name!r}", field="name")
        data, first = artifact.inline, request.offset
        if first > len(data):
            raise InvalidRequest(
                f"offset {first} is past the end of {request.name} ({len(data)} bytes)", "offset"
            )
        for at in range(first, max(first + 1, len(data)), _ARTIFACT_CHUNK):
            chunk = engine_pb2.GetArtifactResponse(data=data[at : at + _ARTIFACT_CHUNK])
            if at == first:
                chunk.sha256, chunk.size = artifact.sha256, artifact.size
            yield chunk


def _read_request(message: engine_pb2.GenerateRequest) -> PreprocessedRequest:
    if not message.request_json:
        return from_proto(message.request)
    _check_single_form(message)
    return from_json(PreprocessedRequest, message.request_json)


def _read_embedding(message: engine_pb2.EmbedRequest) -> PreprocessedEmbeddingRequest:
    if not message.request_json:
        return dataclass_from_proto(PreprocessedEmbeddingRequest, message.request, "request")
    _check_single_form(message)
    return from_json(PreprocessedEmbeddingRequest, message.request_json)


def _check_single_form(message: engine_pb2.GenerateRequest | engine_pb2.EmbedRequest) -> None:
    if message.HasField("request"):
        raise InvalidRequest("request and request_json are both set", "request_json")


def _next_generate_response(outputs: list[LLMEngineOutput]) -> engine_pb2.GenerateResponse | None:
    """Takes the outputs into one message; None if there are none."""
    if not outputs:
        return None
    message = _generate_response(outputs)
    outputs.clear()
    return message


def _last_generate_response(terminal: LLMEngineOutput) -> engine_pb2.GenerateResponse:
    assert terminal.finish_reason is not None, "it ends the output"
    message = _generate_response([terminal])
    message.finish_reason = finish_reason_to_proto(terminal.finish_reason)
    if terminal.completion_usage is not None:
        dataclass_to_proto(terminal.completion_usage, message.usage)
    if (prefill_result := terminal.prefill_result) is not None:
        dataclass_to_proto(prefill_result, message.prefill_result)
    return message


def _generate_response(outputs: list[LLMEngineOutput]) -> engine_pb2.GenerateResponse:
    return engine_pb2.GenerateResponse(
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=[
            dataclass_to_proto(logprob, request_pb2.TokenLogprob())
            for output in outputs
            for logprob in output.logprobs
        ],
        prompt_logprobs=[
            dataclass_to_proto(logprob, request_pb2.TokenLogprob())
            for output in outputs
            for logprob in output.prompt_logprobs
        ],
    )
