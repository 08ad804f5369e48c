"""The Embed call of a running worker: every field is honoured, or refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
import pytest

from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    PromptTooLong,
    UnknownModel,
    Unsupported,
)
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.embedding import Vector
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from kvmesh.types.v1 import request_pb2 as wire
from tests.kit.apps import living
from tests.kit.waiting import WAIT_S, until
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.engines.sim.config import SIM_MODEL_DIR, load_sim_model
from worker_svc.engines.sim.token_oracle import TokenOracle

SIZE = 384
MODEL = load_sim_model(SIM_MODEL_DIR)
ORACLE = TokenOracle(MODEL.word_ids, MODEL.eos_ids[0])


def array(values: Iterable[float]) -> Vector:
    return np.array(list(values), dtype=np.float32)


class Worker:
    """A running sim worker."""

    def __init__(self, app: WorkerApp, channel: grpc.aio.Channel) -> None:
        self.app = app
        self._stub = engine_pb2_grpc.EngineServiceStub(channel)

    # Any: the fields of the message.
    async def embed(
        self, *texts: list[int], timeout_s: float = WAIT_S, **fields: Any
    ) -> pb.EmbedResponse:
        """Raises the MeshError of the worker."""
        sequences = [wire.TokenSequence(token_ids=ids) for ids in texts]
        request = wire.PreprocessedEmbeddingRequest(token_ids=sequences, **fields)
        return await self.send(pb.EmbedRequest(request=request), timeout_s)

    async def send(
        self, message: pb.EmbedRequest, timeout_s: float = WAIT_S, name: str = ""
    ) -> pb.EmbedResponse:
        """name: x-request-id. Raises the MeshError of the worker."""
        metadata = (("x-request-id", name),) if name else ()
        try:
            call: Any = self._stub.Embed(message, timeout=timeout_s, metadata=metadata)
            response: pb.EmbedResponse = await call
            return response
        except grpc.aio.AioRpcError as error:
            raise mesh_error_from_rpc(error) from error


@asynccontextmanager
async def working(**settings: Any) -> AsyncIterator[Worker]:
    config = WorkerConfig(registry="memory", canary_idle_s=0.0, **{"speedup": 0.0, **settings})
    app = WorkerApp(config, registry=MemoryRegistry(MemoryStore()))
    async with living(app, registered=False), rpc.channel(app.address) as channel:
        yield Worker(app, channel)


@pytest.mark.row("S2-65")
async def test_each_list_of_token_ids_gets_its_own_vector_in_order() -> None:
    texts = [[1, 2, 3], [4], [1, 2, 3], list(range(2000))]
    async with working() as worker:
        response = await worker.embed(*texts)
        assert response.usage.prompt_tokens == response.usage.total_tokens == 2007
        for ids, embedding in zip(texts, response.embeddings, strict=True):
            assert np.array_equal(array(embedding.values), ORACLE.embed(ids, SIZE))
            assert np.linalg.norm(embedding.values) == pytest.approx(1.0, abs=1e-6)
        assert response.embeddings[0].values != response.embeddings[1].values
        assert worker.app.runner.counters["accepted"] == len(texts), "one request a text"
        assert worker.app.runner.open_requests == 0


@pytest.mark.row("S2-66", "S2-69")
async def test_another_model_and_another_card_are_refused() -> None:
    async with working() as worker:
        checksum = worker.app.runner.card_checksum
        assert len((await worker.embed([1], model="sim", mdc_sum=checksum)).embeddings) == 1
        with pytest.raises(UnknownModel):
            await worker.embed([1], model="other")
        with pytest.raises(InvalidRequest) as refused:
            await worker.embed([1], mdc_sum="0" * 64)
        assert refused.value.reason == "CARD_MISMATCH"


@pytest.mark.row("S2-67")
async def test_the_encoding_selects_numbers_or_bytes() -> None:
    async with working() as worker:
        default, floats, base64 = [
            (await worker.embed([5, 6], encoding_format=name)).embeddings[0]
            for name in (None, "float", "base64")
        ]
        assert default == floats
        assert not floats.values_le
        assert not base64.values
        assert base64.values_le == array(floats.values).astype("<f4").tobytes()
        with pytest.raises(InvalidRequest) as refused:
            await worker.embed([1], encoding_format="hex")
        assert refused.value.field == "request.encoding_format"


@pytest.mark.row("S2-68")
async def test_dimensions_shorten_the_vectors_and_scale_them_again() -> None:
    async with working() as worker:
        short = (await worker.embed([7], dimensions=16)).embeddings[0]
        head = ORACLE.embed([7], SIZE)[:16]
        assert array(short.values) == pytest.approx(head / np.linalg.norm(head), abs=1e-6)
        assert len((await worker.embed([7], dimensions=SIZE)).embeddings[0].values) == SIZE
        for dimensions in (0, SIZE + 1):
            with pytest.raises(InvalidRequest) as refused:
                await worker.embed([7], dimensions=dimensions)
            assert refused.value.field == "dimensions"


@pytest.mark.row("S2-70", "S2-71")
async def test_the_annotation_request_id_returns_the_id_of_the_call() -> None:
    async with working() as worker:
        assert not (await worker.embed([1, 2])).request_id
        ids = {(await worker.embed([1], annotations=["request_id"])).request_id for _ in range(2)}
        assert len(ids - {""}) == 2
        whole = {"token_ids": [[1, 2]], "model": "sim", "annotations": ["request_id"]}
        message = pb.EmbedRequest(request_json=json.dumps(whole))
        response = await worker.send(message, name="call-7")
        assert response.request_id == "call-7"
        assert np.array_equal(array(response.embeddings[0].values), ORACLE.embed([1, 2], SIZE))


@pytest.mark.row("S2-70", "S2-72")
@pytest.mark.parametrize("key", ["token_ids", "model", "annotations"])
async def test_the_json_form_needs_tokens_model_and_annotations(key: str) -> None:
    whole = {"token_ids": [[1]], "model": "sim", "annotations": []}
    part = json.dumps({name: one for name, one in whole.items() if name != key})
    both = wire.PreprocessedEmbeddingRequest(model="sim")
    messages = {
        key: pb.EmbedRequest(request_json=part),
        "request_json": pb.EmbedRequest(request_json=json.dumps(whole), request=both),
    }
    async with working() as worker:
        for found, message in messages.items():
            with pytest.raises(InvalidRequest) as refused:
                await worker.send(message)
            assert refused.value.field == found


@pytest.mark.parametrize(
    ("texts", "fields", "error"),
    [
        ([], {}, InvalidRequest),
        ([[1], []], {}, InvalidRequest),
        ([[2**31]], {}, InvalidRequest),
        ([[1] * 40], {}, PromptTooLong),
        ([[1]], {"annotations": ["request_id", "formatted_prompt"]}, Unsupported),
    ],
)
async def test_what_cannot_be_embedded_is_refused(
    texts: list[list[int]], fields: dict[str, Any], error: type[MeshError]
) -> None:
    async with working(context_length=32) as worker:
        with pytest.raises(error) as refused:
            await worker.embed(*texts, **fields)
        assert refused.value.field
        assert worker.app.runner.open_requests == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_prefill_and_decode_workers_embed_too(role: Any) -> None:
    async with working(role=role) as worker:
        (embedding,) = (await worker.embed([1, 2])).embeddings
        assert np.array_equal(array(embedding.values), ORACLE.embed([1, 2], SIZE))


async def test_the_end_of_a_call_ends_its_work() -> None:
    # A second for a thousand tokens.
    async with working(speedup=1.0, prefill_tokens_per_s=1000.0, context_length=8192) as worker:
        with pytest.raises(DeadlineExceeded):
            await worker.embed([1] * 8000, [2], timeout_s=0.2)
        call = asyncio.create_task(worker.embed([1] * 8000))
        await until(lambda: worker.app.runner.open_requests, "the worker has the request")
        call.cancel()
        await until(lambda: not worker.app.runner.open_requests, "its work has ended")
        (load,) = worker.app.runner.loads()
        assert (load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0)
