"""The HTTP API over a real echo worker: pass-through bodies, refusals, comments, panics."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from common.access.key_file import KeyFile
from common.api_keys import ApiKey, KeyDocument, Permission, Tenant, hash_of
from common.errors import MeshError, NotFound
from common.registry.card import Artifact, ModelCard, ModelType
from common.registry.instances import Instance, Snapshot
from common.registry.registry import MemoryRegistry
from common.request.placement import Decision, Query
from common.request.preprocessed import RoutingHints, SessionControl
from common.request.token_stream import RequestFrame, ResponseFrame
from common.rpc.channel import PLAINTEXT
from common.trials.trials import Trials
from common.usage import UsageCounts, UsageKey
from frontend_svc.access.keys import with_keys
from frontend_svc.access.quotas import TenantQuotas
from frontend_svc.batches.client import BatchClient
from frontend_svc.config import FrontendConfig
from frontend_svc.edge.asgi import AsgiApp
from frontend_svc.edge.server import HttpServer
from frontend_svc.edge.sockets import listen
from frontend_svc.endpoints.endpoint import EndpointDependencies
from frontend_svc.endpoints.request_records import RequestRecords
from frontend_svc.members import Members
from frontend_svc.metrics.families import DeploymentState
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.models.served_model import ENCODE_INLINE_CHARS
from frontend_svc.openai.output.sse import KEEP_ALIVE
from frontend_svc.readiness import Readiness
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.placement_request import PlacementKey, PlacementRequest
from frontend_svc.request.types import RequestOutcome
from frontend_svc.responses.stored import StoredResponses
from frontend_svc.routes.api import ApiDependencies
from frontend_svc.routes.table import dispatcher, routes
from frontend_svc.usage.ledger import UsageLedger
from frontend_svc.usage.store import MEMORY, UsageStore
from frontend_svc.workers.client import EngineClient
from tests.kit.catalogs import follow_and_load
from tests.kit.placements import decided
from tests.kit.waiting import WAIT_S, until
from tests.sim.pulled_transport import PulledTransport
from worker_svc.engines.contract import GenerateContext, LLMEngineOutput
from worker_svc.engines.echo import EchoConfig, EchoEngine
from worker_svc.engines.sim.config import SIM_MODEL_DIR
from worker_svc.serving.attach_server import AttachServer
from worker_svc.serving.runner import Runner

WORKER = 7
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Any: JSON.
Json = Any


class Wire(PulledTransport):
    """An Attach stream to a worker in the same process: one queue per direction."""

    def __init__(self, server: AttachServer) -> None:
        self._server = server
        self._up: asyncio.Queue[RequestFrame | None] = asyncio.Queue()
        self._down: asyncio.Queue[ResponseFrame | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def dial(self, address: str, worker_id: int) -> Wire:
        self._task = asyncio.create_task(self._server.serve(self._up.get, self._down.put))
        return self

    async def read(self) -> ResponseFrame | None:
        return await self._down.get()

    async def write(self, frame: RequestFrame) -> None:
        await self._up.put(frame)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


class OneWorker:
    """Places every request on one worker; records the queries."""

    def __init__(self) -> None:
        self.queries: list[Query] = []
        self.freed: list[PlacementKey] = []

    def place(
        self,
        key: PlacementKey,
        request: PlacementRequest,
        answer: Callable[[Decision | MeshError], None],
    ) -> None:
        self.queries.append(request.query)
        asyncio.get_running_loop().call_soon(answer, decided(WORKER))

    def prefill_done(self, key: PlacementKey) -> None: ...

    def output(self, key: PlacementKey, blocks: int, decay_fraction: float | None) -> None: ...

    def free(self, key: PlacementKey) -> None:
        self.freed.append(key)


def worker(model_type: str, card: ModelCard | None) -> Instance:
    return Instance(
        id=WORKER,
        namespace="default",
        service="worker",
        stable_name="w",
        address="127.0.0.1:1",
        model="talk",
        card_checksum="" if card is None else card.checksum,
        meta={"model_type": model_type},
    )


def no_metrics(_: str) -> tuple[bytes, str]:
    return b"", "text/plain"


async def alone(own: Readiness) -> Readiness:
    """Returns the readiness of a frontend with one process."""
    return own


class Mesh:
    """The API and its parts. ended: outcomes that the API reported. usage: what it counted."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        router: OneWorker,
        runner: Runner,
        usage: UsageLedger,
    ) -> None:
        self.http = http
        self.usage = usage
        self.router = router
        self.runner = runner
        self.ended: list[RequestOutcome] = []


@asynccontextmanager
async def served(
    model_type: str,
    *,
    card: ModelCard | None = None,
    delay_s: float = 0.0,
    keep_alive_s: float = 15.0,
    keys: Path | None = None,
    engine: EchoEngine | None = None,
) -> AsyncIterator[Mesh]:
    async def get_card(checksum: str) -> ModelCard:
        if card is None:
            raise NotFound(f"no card {checksum}")
        return card

    engine = engine or EchoEngine(EchoConfig(token_delay_s=delay_s))
    await engine.start(WORKER)
    checksum = "" if card is None else card.checksum
    runner, router = Runner(engine, card_checksum=checksum), OneWorker()
    snapshot = Snapshot(instances={WORKER: worker(model_type, card)})
    models = ModelCatalog(get_card, now_s=lambda: 0.0, mesh_key=b"")
    await follow_and_load(models, snapshot)
    ready = Readiness(True, (), (), {}, ())
    wire = Wire(AttachServer(WORKER, runner))
    usage_store = UsageStore(MEMORY, 1)
    usage = UsageLedger(usage_store, lambda: 0.0)
    async with EngineClient(1, wire, Random(1)) as engines:
        gateway = Gateway(router, engines, Members(snapshot))
        ended: list[RequestOutcome] = []
        dependencies = EndpointDependencies(
            gateway,
            models,
            DeploymentState(models.names),
            FrontendConfig(keep_alive_s=keep_alive_s),
            RequestRecords(None, None, "none"),
            usage,
            ended.append,
        )
        api = ApiDependencies(
            dependencies,
            Trials(()),
            StoredResponses(1, None, Members(), asyncio.get_running_loop().time),
            lambda: ready,
            alone,
            no_metrics,
            Members(),
            BatchClient(Members(), PLAINTEXT),
            MemoryRegistry(),
            lambda: False,
        )
        public: AsgiApp = dispatcher(routes("/metrics"), api)
        if keys is not None:
            public = with_keys(public, KeyFile(keys), TenantQuotas(Members()))
        server, listener = HttpServer(public, lambda: False, 1, 100), listen("127.0.0.1", 0)
        serving = asyncio.create_task(server.serve([listener]))
        host, port = listener.getsockname()
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=WAIT_S) as http:
            mesh = Mesh(http, router, runner, usage)
            mesh.ended = ended
            yield mesh
        server.should_exit = True
        await serving
    usage_store.close(WAIT_S)
    assert gateway.open_requests == 0
    assert runner.open_requests == 0


def chat_body(text: str, **more: Json) -> Json:
    return {"model": "talk", "messages": [{"role": "user", "content": text}], **more}


def events(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]


@pytest.mark.row("S0-42")
async def test_a_pass_through_chat_streams_its_chunks() -> None:
    async with served("Chat") as mesh:
        answer = await mesh.http.post(CHAT, json=chat_body("one two three", stream=True))
        assert answer.status_code == 200
        *chunks, done = events(answer)
        assert done == "[DONE]"
        deltas = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert "".join(c["delta"].get("content", "") for c in deltas) == "one two three"
        assert [c["finish_reason"] for c in deltas][-1] == "stop"
        (query,) = mesh.router.queries
        assert (query.model, query.total_tokens, query.prefix_hashes) == ("talk", 0, b"")
        assert len(mesh.router.freed) == 1
        assert len(mesh.ended) == 1


@pytest.mark.row("S0-42")
async def test_without_a_stream_the_chunks_are_merged_into_one_response() -> None:
    async with served("Chat") as mesh:
        answer = await mesh.http.post(CHAT, json=chat_body("one two"))
        whole = answer.json()
        assert whole["object"] == "chat.completion"
        assert whole["choices"][0]["message"] == {"role": "assistant", "content": "one two"}
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["total_tokens"] == 4, "the counts of the engine, in words"
        await until(lambda: mesh.usage.totals, "the request is counted")
        assert mesh.usage.totals == {UsageKey(model="talk"): UsageCounts(1, 0, 2, 0, 2)}


@pytest.mark.row("S0-43")
async def test_a_completion_body_is_passed_through() -> None:
    async with served("Completion") as mesh:
        body = {"model": "talk", "prompt": "alpha beta"}
        whole = (await mesh.http.post(COMPLETIONS, json=body)).json()
        assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", "alpha beta")


class EngineWithHits(EchoEngine):
    """Reports 8 cached tokens, as SGLang and vLLM do."""

    async def generate_pass_through(
        self, kind: str, body: bytes, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        async for output in super().generate_pass_through(kind, body, ctx):
            yield output
            if output.finish_reason is None:
                counts = {"total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
                chunk = {"choices": [], "usage": counts}
                yield replace(output, chunk_json=json.dumps(chunk).encode())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("scopes", "details"), [((), None), (("explain",), {"cached_tokens": 8})])
async def test_cache_hits_of_a_pass_through_model_need_the_scope(
    tmp_path: Path, stream: bool, scopes: tuple[str, ...], details: Json
) -> None:
    key = ApiKey(
        id="k",
        sha256=hash_of(b"the key"),
        scopes=frozenset(map(Permission, ("infer", *scopes))),
        created=datetime.now(UTC),
    )
    document = KeyDocument(tenants={"t": Tenant(keys=(key,))})
    keys = tmp_path / "keys.json"
    keys.write_text(document.model_dump_json())
    headers = {"authorization": "Bearer the key"}
    async with served("Chat", keys=keys, engine=EngineWithHits(EchoConfig())) as mesh:
        body = chat_body("one two", stream=stream)
        answer = await mesh.http.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200
        found = [json.loads(one) for one in events(answer) if one != "[DONE]"]
        usages = [one["usage"] for one in found if one.get("usage")]
        assert usages
        for usage in usages:
            assert usage["total_tokens"] == 9
            assert usage.get("prompt_tokens_details") == details


async def test_a_field_that_the_worker_does_not_support_is_refused_by_name() -> None:
    async with served("Chat") as mesh:
        for stream in (True, False):
            answer = await mesh.http.post(CHAT, json=chat_body("a", tools=[{}], stream=stream))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "tools"
            assert "retry-after" not in answer.headers


async def test_headers_apply_to_a_pass_through_body() -> None:
    async with served("Chat") as mesh:
        headers = {
            "x-kvmesh-priority": "3",
            "x-kvmesh-strict-priority": "2",
            "x-kvmesh-session-id": "s",
        }
        answer = await mesh.http.post(CHAT, json=chat_body("one"), headers=headers)
        assert answer.status_code == 200
        (query,) = mesh.router.queries
        assert query.strict_priority == 2
        assert query.routing == RoutingHints(
            priority=3, priority_jump=3.0, session_control=SessionControl("s")
        )
        refused = await mesh.http.post(
            CHAT, json=chat_body("one"), headers={"x-kvmesh-osl": "many"}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-kvmesh-osl")
        assert len(mesh.router.queries) == 1


@pytest.mark.parametrize("header", ["x-kvmesh-dp-rank", "x-kvmesh-prefill-dp-rank"])
async def test_a_rank_is_refused_for_a_pass_through_body(header: str) -> None:
    async with served("Chat") as mesh:
        refused = await mesh.http.post(CHAT, json=chat_body("one"), headers={header: "0"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, header)
        assert "passed through" in refused.json()["error"]["message"]
        assert mesh.router.queries == []


@pytest.mark.parametrize(
    ("offered", "closed", "body"),
    [
        (ModelType.COMPLETIONS, CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        (ModelType.CHAT, COMPLETIONS, {"prompt": "a"}),
    ],
)
async def test_an_endpoint_that_the_card_does_not_offer_is_refused(
    offered: ModelType, closed: str, body: Json
) -> None:
    files = ("tokenizer.json", "tokenizer_config.json")
    artifacts = {name: Artifact.of((SIM_MODEL_DIR / name).read_bytes()) for name in files}
    card = ModelCard(name="talk", model_type=offered, artifacts=artifacts)
    async with served("Backend", card=card) as mesh:
        refused = await mesh.http.post(closed, json={"model": "talk", **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert "is not served for" in refused.json()["error"]["message"]
        assert mesh.router.queries == []


async def garbage_of(requests: Callable[[], Awaitable[None]]) -> set[str]:
    """Names of the product's classes whose objects, made by the requests, only the garbage
    collector can free."""
    gc.collect()
    gc.disable()
    # Threads of earlier tests may end meanwhile: their objects are kept, so that they do not count.
    earlier = [one for one in gc.get_objects() if is_of_product(type(one))]
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await requests()
        # Sleep: the tasks of the requests end meanwhile.
        await asyncio.sleep(0.1)
        gc.collect()
        return {type(one).__name__ for one in gc.garbage if is_of_product(type(one))}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        earlier.clear()
        gc.enable()


def is_of_product(cls: type) -> bool:
    return str(cls.__module__).startswith(("frontend_svc", "common", "uvicorn.protocols"))


@pytest.mark.parametrize("stream", [True, False])
async def test_an_ended_request_is_freed_at_once(stream: bool) -> None:
    """Garbage of all running requests was a third of the frontend's memory."""
    files = ("tokenizer.json", "tokenizer_config.json")
    artifacts = {name: Artifact.of((SIM_MODEL_DIR / name).read_bytes()) for name in files}
    async with served("Backend", card=ModelCard(name="talk", artifacts=artifacts)) as mesh:

        async def requests() -> None:
            for body in (
                {"prompt": "one two three", "max_tokens": 3},
                {"prompt": ["one", "two"], "n": 2, "max_tokens": 2},
                {"prompt": "one two", "stop": " two"},
                {"prompt": "one", "logprobs": -1},
                {"prompt": "one", "model": "other"},
            ):
                sent = {"model": "talk", "stream": stream, **body}
                await mesh.http.post(COMPLETIONS, json=sent)

        await requests()
        assert await garbage_of(requests) == set()


async def test_a_request_that_ends_with_5xx_is_logged_as_a_warning() -> None:
    async with served("Backend") as mesh:
        with capture_logs() as logs:
            await mesh.http.post(CHAT, json=chat_body("one"))
            await mesh.http.post(CHAT, json=chat_body("one", model="other"))
    lines = [line for line in logs if line["event"] == "request"]
    assert [(line["status"], line["log_level"]) for line in lines] == [
        (503, "warning"),
        (404, "info"),
    ]


async def test_a_model_without_its_card_is_a_503_with_retry_after() -> None:
    async with served("Backend") as mesh:
        for answer in (
            await mesh.http.post(CHAT, json=chat_body("one")),
            await mesh.http.get("/v1/models/talk"),
        ):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
        unknown = await mesh.http.post(CHAT, json=chat_body("one", model="other"))
        assert unknown.status_code == 404


def tokenizer_that_panics_at_text() -> bytes:
    """Loads, and panics on any text except special tokens."""
    raw = json.loads((SIM_MODEL_DIR / "tokenizer.json").read_bytes())
    raw["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    return json.dumps(raw).encode()


@pytest.mark.parametrize("length", [1, ENCODE_INLINE_CHARS + 1], ids=["on the loop", "in a thread"])
@pytest.mark.slow  # the library prints the position of the panic
async def test_a_tokenizer_panic_fails_only_its_request_with_an_openai_error(
    length: int,
) -> None:
    files = {
        "tokenizer.json": Artifact.of(tokenizer_that_panics_at_text()),
        "tokenizer_config.json": Artifact.of(b"{}"),
    }
    special = json.loads(tokenizer_that_panics_at_text())["added_tokens"][0]["content"]
    good = {"model": "talk", "prompt": special}
    async with served("Backend", card=ModelCard(name="talk", artifacts=files)) as mesh:
        with capture_logs() as logs:
            first = await mesh.http.post(COMPLETIONS, json=good)
            answers = await asyncio.gather(
                mesh.http.post(COMPLETIONS, json=good),
                mesh.http.post(COMPLETIONS, json={**good, "prompt": "a" * length}),
                mesh.http.post(COMPLETIONS, json={**good, "prompt": "b" * length, "stream": True}),
                mesh.http.post(COMPLETIONS, json=good),
            )
            last = await mesh.http.post(COMPLETIONS, json=good)
        assert [answer.status_code for answer in answers] == [200, 500, 500, 200]
        for answer in (answers[0], answers[3], last):
            assert answer.json()["choices"] == first.json()["choices"]
        for answer in answers[1:3]:
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("server_error", None)
        failures = [line for line in logs if line["event"] == "request_failed"]
        assert len(failures) == 2
        assert sorted(line["status"] for line in logs if line["event"] == "request") == [
            *[200] * 4,
            *[500] * 2,
        ]


async def test_a_body_of_the_other_kind_is_refused() -> None:
    async with served("Chat") as mesh:
        answer = await mesh.http.post(COMPLETIONS, json={"model": "talk", "prompt": "a"})
        assert answer.status_code == 400
        assert mesh.router.queries == []


async def test_a_pass_through_model_is_listed() -> None:
    async with served("Chat") as mesh:
        listed = (await mesh.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["talk"]
        assert (await mesh.http.get("/v1/models/talk")).json()["id"] == "talk"


@pytest.mark.slow
async def test_an_idle_stream_has_comments_between_complete_events() -> None:
    async with served("Chat", delay_s=0.35, keep_alive_s=0.1) as mesh:
        answer = await mesh.http.post(CHAT, json=chat_body("one two", stream=True))
        comment = KEEP_ALIVE.decode().strip()
        lines = events(answer)
        assert lines.count(comment) >= 2
        rest = [json.loads(line) for line in lines if line not in (comment, "[DONE]")]
        content = "".join(c["choices"][0]["delta"].get("content", "") for c in rest)
        assert content == "one two"
        assert lines[-1] == "[DONE]"


async def test_a_busy_stream_has_no_comments() -> None:
    async with served("Chat", delay_s=0.01, keep_alive_s=30.0) as mesh:
        answer = await mesh.http.post(CHAT, json=chat_body("one two three", stream=True))
        assert KEEP_ALIVE.decode().strip() not in answer.text
