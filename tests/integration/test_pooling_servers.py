"""Workers for servers that compute vectors or scores only: stand-ins for SGLang, vLLM and others.

The real servers are in tests/adapters and tests/vllm.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer

from common.errors import InvalidRequest, PromptTooLong, Unsupported, WorkerLost
from common.request.embedding import shorten
from tests.adapters.servers_mesh import ServersMesh
from tests.kit.model_server import MODEL, VECTOR_SIZE, ModelServer, score_of, vector_of
from tests.kit.requests import context, preprocessed_request
from tests.kit.waiting import WAIT_S, until, wait_for
from worker_svc.engines.contract import EngineConfig
from worker_svc.engines.openai.config import ServerConfig
from worker_svc.engines.openai.engine import ServerEngine
from worker_svc.engines.sim.config import SIM_MODEL_DIR

Api = Literal["sglang", "vllm", "text"]
APIS: tuple[Api, ...] = ("sglang", "vllm", "text")
TOKENIZER = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
# For requests that wait until a server is given up, on a busy machine.
PATIENT_S = 4 * WAIT_S
CONTEXT_LENGTH = 1024


def config_of(server: ModelServer, **fields: Any) -> ServerConfig:
    return ServerConfig(server.url, **{"model_path": SIM_MODEL_DIR} | fields)


async def started(server: ModelServer, **fields: Any) -> tuple[ServerEngine, EngineConfig]:
    engine = ServerEngine(config_of(server, **fields))
    try:
        return engine, await engine.start(1)
    except BaseException:
        await engine.cleanup()
        raise


@pytest.mark.parametrize("api", APIS)
async def test_a_server_of_vectors_is_found_measured_and_sent_token_ids(api: Api) -> None:
    with ModelServer(api, pooling="embedding") as server:
        engine, config = await started(server)
        try:
            assert config.kinds == ("embedding",)
            assert (config.model_input, config.kv_index) == ("tokens", "none")
            assert (config.embedding_size, config.shorter_embeddings) == (VECTOR_SIZE, True)
            vector = await engine.embed(preprocessed_request([5, 6, 7]), context())
            assert vector == pytest.approx(vector_of([5, 6, 7]), abs=1e-6)
            assert server.bodies[-1]["input"] == [5, 6, 7]
            probe = preprocessed_request([1], is_probe=True)
            (end,) = [one async for one in engine.generate(probe, context())]
            assert (end.finish_reason, len(server.bodies[-1]["input"])) == ("stop", 1)
            with pytest.raises(Unsupported, match="computes embeddings only"):
                _ = [one async for one in engine.generate(preprocessed_request([1]), context())]
            with pytest.raises(Unsupported, match="no scores"):
                await engine.score(preprocessed_request([1]), context())
            if api != "text":
                assert await engine.flush_cache() == 0
        finally:
            await engine.cleanup()


@pytest.mark.parametrize("api", APIS)
async def test_a_server_may_have_vectors_of_one_size_only(api: Api) -> None:
    with ModelServer(api, pooling="embedding") as server:
        server.shortens = False
        engine, config = await started(server)
        await engine.cleanup()
        assert (config.embedding_size, config.shorter_embeddings) == (VECTOR_SIZE, False)


async def test_a_stopped_prompt_is_aborted_and_errors_have_their_type_and_field() -> None:
    with ModelServer("sglang", pooling="embedding") as server:
        engine, _ = await started(server)
        try:
            server.step_s = math.inf
            ctx = context()
            call = asyncio.create_task(engine.embed(preprocessed_request(), ctx))
            await until(lambda: server.running == 1, "the server computes")
            ctx.stop_generating("test")
            assert await call is None
            await until(lambda: server.aborted, "the server is asked to abort")
            assert server.aborted == [server.bodies[-1]["rid"]]
            await until(lambda: server.running == 0, "the connection is closed")
            server.step_s = 0.0
            cases: list[tuple[int, dict[str, Any], type[Exception], str | None]] = [
                (400, {"message": "too odd", "param": "input[0]"}, InvalidRequest, "input[0]"),
                (400, {"message": "too odd", "param": None}, InvalidRequest, "input"),
                (500, {"message": "input (9) is too large to process"}, PromptTooLong, "input"),
                (500, {"message": "broken"}, WorkerLost, None),
            ]
            for status, error, expected, field in cases:
                server.refusal = status, error
                with pytest.raises(expected, match=error["message"][-8:]) as found:
                    await engine.embed(preprocessed_request(), context())
                assert found.value.field == field  # type: ignore[attr-defined]
            server.refusal, server.step_s = None, math.inf
            lost = asyncio.create_task(engine.embed(preprocessed_request(), context()))
            await until(lambda: server.running == 1, "the server computes")
            server.close()
            with pytest.raises(WorkerLost, match=server.url):
                await lost
        finally:
            await engine.cleanup()
        counts = engine.counters
        assert counts["accepted"] == sum(
            counts[name] for name in ("finished", "cancelled", "closed", "failed")
        )


@pytest.mark.parametrize("api", APIS)
async def test_a_tokenizer_of_another_model_is_refused_at_the_start(api: Api) -> None:
    with ModelServer(api, pooling="embedding") as server:
        server.has_other_tokenizer = True
        with pytest.raises(InvalidRequest, match="is not that of its model") as refused:
            await started(server)
        assert refused.value.field == "model_path"
    with ModelServer("vllm", pooling="score") as server:
        server.has_other_tokenizer = True
        with pytest.raises(Unsupported, match="does not join the texts"):
            await started(server)


async def test_a_server_that_splits_prompts_computed_together_is_refused_at_the_start() -> None:
    with ModelServer("text", pooling="embedding") as server:
        server.splits_prompts = True
        with pytest.raises(Unsupported, match="llama-server needs --kv-unified"):
            await started(server)


async def test_a_server_without_an_api_of_token_ids_needs_the_tokenizer_of_its_model() -> None:
    with ModelServer("text", pooling="embedding") as server:
        with pytest.raises(InvalidRequest, match="set --model-path") as refused:
            await started(server, model_path=None)
        assert refused.value.field == "model_path"
        server.generates_too = True
        for serve, owner, kinds in (
            (None, "llamacpp", ("embedding",)),
            (None, "another", ("chat", "completions")),
            (("embedding",), "another", ("embedding",)),
            (("chat",), "llamacpp", ("chat", "completions")),
        ):
            server.owner = owner
            # It does not count as one that cannot generate.
            server.busy_chats = 1 if owner == "another" and serve is None else 0
            engine, config = await started(server, serve=serve)
            await engine.cleanup()
            assert config.kinds == kinds
            assert config.model_input == ("tokens" if kinds == ("embedding",) else "text")


def classifier_folder(folder: Path, **settings: Any) -> Path:
    """The sim model's tokenizer, with the settings of a classifier of one class."""
    shutil.copytree(SIM_MODEL_DIR, folder)
    path = folder / "config.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {"architectures": ["ToyForSequenceClassification"], "id2label": {"0": "it fits"}}
    path.write_text(json.dumps(found | settings))
    return folder


async def test_token_types_of_sglang_are_refused_at_the_start(tmp_path: Path) -> None:
    folder = classifier_folder(tmp_path / "model", type_vocab_size=2)
    with (
        ModelServer("sglang", pooling="score", model_dir=folder) as server,
        pytest.raises(InvalidRequest, match="2 token types"),
    ):
        await started(server, model_path=None)


@contextmanager
def serving(
    folder: Path, pooling: Literal["embedding", "score"], model: Path
) -> Iterator[tuple[ServersMesh, list[ModelServer]]]:
    """Runs a mesh with a worker for each of two stand-ins of different APIs, which share a card."""
    folder.mkdir()
    with (
        ModelServer("sglang", pooling=pooling, model_dir=model) as one,
        ModelServer("vllm", pooling=pooling, model_dir=model) as two,
        ServersMesh(folder, [one, two], f"--context-length={CONTEXT_LENGTH}") as mesh,
    ):
        yield mesh, [one, two]


@pytest.fixture(scope="module")
def vectors(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ServersMesh, list[ModelServer]]]:
    with serving(tmp_path_factory.mktemp("vectors") / "mesh", "embedding", SIM_MODEL_DIR) as found:
        yield found


def embed(mesh: ServersMesh, value: Any, status: int = 200, **fields: Any) -> Any:
    return mesh.post("/v1/embeddings", {"model": MODEL, "input": value} | fields, status)


def failing_probes(mesh: ServersMesh) -> int:
    """Returns the number of servers whose last probe failed."""
    (worker,) = mesh.workers
    return len(worker.events("engine_probe_failed")) - len(worker.events("engine_recovered"))


def ids_of(text: str, pair: str | None = None) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, pair).ids
    return ids


@pytest.mark.slow
def test_vectors_reach_clients_and_the_load_is_shared(
    vectors: tuple[ServersMesh, list[ModelServer]],
) -> None:
    mesh, servers = vectors
    texts = [f"text number {number}" for number in range(24)]
    found = embed(mesh, texts)
    for text, entry in zip(texts, found["data"], strict=True):
        assert entry["embedding"] == pytest.approx(vector_of(ids_of(text)), abs=1e-6)
    assert found["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in texts)
    prompts = [ids_of(text) for text in texts]
    shares = [sum(one["input"] in prompts for one in server.bodies) for server in servers]
    assert sum(shares) == len(texts)
    assert min(shares) >= 6, shares
    (entry,) = embed(mesh, [5, 6, 7], dimensions=4)["data"]
    assert entry["embedding"] == pytest.approx(shorten(vector_of([5, 6, 7]), 4), abs=1e-6)
    refused = embed(mesh, "a", 400, dimensions=VECTOR_SIZE + 1)
    assert refused["error"]["param"] == "dimensions"
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    assert mesh.post("/v1/completions", body, 400)["error"]["param"] == "model"


@pytest.mark.slow
def test_a_refusal_of_the_server_names_the_field_and_a_client_that_leaves_frees_it(
    vectors: tuple[ServersMesh, list[ModelServer]],
) -> None:
    mesh, servers = vectors
    for server in servers:
        server.refusal = 400, {"message": "this input is odd", "param": "input"}
    error = embed(mesh, "a", 400)["error"]
    assert (error["param"], error["message"]) == ("input", "this input is odd")
    for server in servers:
        server.refusal, server.step_s = None, math.inf
    connection = HTTPConnection(mesh.url.removeprefix("http://"))
    body = {"model": MODEL, "input": [[7, 8], [7, 8]]}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/embeddings", json.dumps(body), headers)

    def is_computed() -> bool:
        bodies = [body for server in servers for body in server.computed_prompts]
        return any(one["input"] == [7, 8] for one in bodies)

    wait_for(is_computed, "a server computes it", PATIENT_S)
    connection.close()
    wait_for(lambda: not is_computed(), "its connections are closed", PATIENT_S)
    for server in servers:
        server.step_s = 0.002
    wait_for(lambda: not failing_probes(mesh), "their probes succeed again", PATIENT_S)


@pytest.mark.slow
def test_prompts_of_a_server_that_fails_or_ends_run_at_another_one(
    vectors: tuple[ServersMesh, list[ModelServer]],
) -> None:
    mesh, (one, two) = vectors
    one.refusal = 500, {"message": "broken"}
    wait_for(lambda: failing_probes(mesh), "its probe fails", PATIENT_S)
    before = len(two.bodies)
    assert len(embed(mesh, ["a"] * 8)["data"]) == 8
    assert sum(body["input"] == ids_of("a") for body in two.bodies[before:]) == 8
    one.refusal = None
    wait_for(lambda: not failing_probes(mesh), "its probe succeeds", PATIENT_S)
    wanted = pytest.approx(vector_of(ids_of("b")), abs=1e-6)
    one.step_s = two.step_s = math.inf
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(embed, mesh, ["b"] * 8)
        wait_for(lambda: one.running or call.done(), "it computes")
        assert not call.done()
        one.close()
        two.step_s = 0.002
        assert [entry["embedding"] for entry in call.result()["data"]] == [wanted] * 8


@pytest.mark.slow
def test_scores_are_those_of_the_joined_pairs(tmp_path: Path) -> None:
    model = classifier_folder(tmp_path / "model")
    query, documents = "Where is Paris?", ["In France", "Bears eat fish", "Paris is a town"]
    wanted = [score_of(ids_of(query, document)) for document in documents]
    with serving(tmp_path / "mesh", "score", model) as (mesh, _):
        body = {"model": MODEL, "text_1": query, "text_2": documents}
        found = mesh.post("/v1/score", body)
        assert [one["score"] for one in found["data"]] == pytest.approx(wanted, abs=1e-6)
        ranked = mesh.post("/v1/rerank", {"model": MODEL, "query": query, "documents": documents})
        order = sorted(range(3), key=lambda index: -wanted[index])
        assert [one["index"] for one in ranked["results"]] == order
