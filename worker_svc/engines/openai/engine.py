"""The adapter for one server that runs already.

SGLang (`/generate`) and vLLM (`/v1/completions` with token prompts) take and return token ids, so
that requests migrate and the frontend does all that concerns text. Any other server gets the bodies
of clients unchanged (pass-through). Facts that shape this file:

- A server aborts a request when its connection closes. SGLang notices that late if the request
  waits in its queue, so its `/abort_request` is called too. It aborts every request whose id
  *begins* with the given one, of any client: ids have a random part for each adapter and a number
  of fixed length.
- A server of vectors or scores gets token ids whatever its API, and its response is one object.
- A server that restarts keeps its URL. Requests fail at once and continue on other workers, the
  worker's probe fails until the server is back, and the reader of KV events notices the empty
  cache. A server that comes back with another model ends the worker: its card is no longer true.
- The load is the server's own, polled; requests that this adapter has sent since count as waiting.
  While the server does not respond to the poll, its load is the requests of this adapter, so that a
  hung server is noticed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import orjson
import structlog

from common.errors import (
    Conflict,
    InvalidRequest,
    MeshError,
    Overloaded,
    Unavailable,
    Unimplemented,
    Unsupported,
    WorkerLost,
)
from worker_svc.engines.contract import (
    KV_EVENTS_OFF,
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    Load,
    PreprocessedRequest,
    Vector,
    chunk,
)
from worker_svc.engines.openai.client import ServerClient
from worker_svc.engines.openai.config import ServerConfig
from worker_svc.engines.openai.detect import find_address, read_adapters, read_server
from worker_svc.engines.openai.facts import (
    KvAddresses,
    ServerFacts,
    TokenApi,
    TokenStream,
    duplicate_policy,
)
from worker_svc.engines.openai.load import (
    CountedRequests,
    ServerLoad,
    read_metrics,
    read_sglang_loads,
)
from worker_svc.engines.openai.pass_through import PassThroughStream
from worker_svc.engines.openai.pooling import Pooling, Values, open_pooling
from worker_svc.engines.openai.pooling_kind import find_pooling
from worker_svc.engines.openai.sglang_api import SglangApi
from worker_svc.engines.openai.vllm_api import COMPLETIONS_PATH, VllmApi, flush_body
from worker_svc.engines.sglang.pooling import read_score, read_vector
from worker_svc.kv_events.external_events import DuplicatePolicy, KvEventFormat, KvEventSink

if TYPE_CHECKING:
    from worker_svc.kv_events.zmq_reader import KvEventEndpoints

LOAD_INTERVAL_S: Final = 0.25
# Between two looks at the models and adapters of the server.
MODEL_INTERVAL_S: Final = 5.0
# Between two attempts to reach a server that starts.
START_INTERVAL_S: Final = 0.5

# What a server has sent; None: the request is stopped.
_Queue: TypeAlias = asyncio.Queue[LLMEngineOutput | Exception | None]

log = structlog.get_logger()


class ServerEngine:
    """An `LLMEngine` over one server.

    Counters at rest: accepted == finished + cancelled + closed + failed; `rejected` requests are
    not accepted.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Raises InvalidRequest for settings that cannot be used."""
        self.config = config
        self.counters: Counter[str] = Counter()
        # Final when `start` returns.
        self.kv_event_format = KvEventFormat(
            config.block_size, config.block_size, DuplicatePolicy.IDEMPOTENT
        )
        self.kv_events_off_reason = "the engine has not started"
        self._client = ServerClient(config)
        # As the server stated them at the start, and with what requests to it have shown.
        self._stated = self._facts = ServerFacts(api="text", model="")
        self._address = ""
        self._endpoints: KvEventEndpoints | None = None
        self._api: TokenApi | None = None
        self._rid_prefix = secrets.token_hex(6)
        self._request_count = 0
        self._is_started = False
        self._is_closed = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._aborts: set[asyncio.Task[None]] = set()
        # What the generators of open requests read.
        self._queues: set[_Queue] = set()
        self._failure: asyncio.Future[WorkerLost] | None = None
        # Of the last response to the poll; whether the last poll had one.
        self._server_loads: Sequence[ServerLoad] = ()
        self._is_load_current = False
        # Rank -> requests since start; open ones; those of them that have output.
        self._sent: Counter[int] = Counter()
        self._counted = CountedRequests()
        self._open: Counter[int] = Counter()
        self._with_output: Counter[int] = Counter()
        self._chunks: Counter[int] = Counter()

    async def start(self, worker_id: int) -> EngineConfig:
        """Waits until the server serves, at most `start_s`, and learns what it is.

        Raises InvalidRequest for a setting that does not fit the server, Unsupported for a server
        that cannot be used, Unavailable if it does not respond in time.
        """
        if self._failure is not None:
            raise Conflict("the engine was already started")
        self._failure = asyncio.get_running_loop().create_future()
        self._stated, self._facts = await self._wait_for_server()
        facts = self._facts
        self._api = _api_of(facts)
        self._resolve_kv_events()
        self._address = await find_address(self._client.url)
        self._is_started = True
        await self._read_loads()
        self._spawn(self._poll(self._read_loads, LOAD_INTERVAL_S), "server load")
        self._spawn(self._poll(self._check_model, MODEL_INTERVAL_S), "server model")
        log.info(
            "server_found",
            url=self._client.url,
            api=facts.api,
            version=facts.version,
            model=facts.model,
            kv_events="" if facts.kv_addresses is None else facts.kv_addresses.events,
            kv_events_off_reason=self.kv_events_off_reason,
        )
        return self._engine_config()

    def _engine_config(self) -> EngineConfig:
        facts, config, pooling = self._facts, self.config, self._facts.properties.pooling
        reason = facts.no_index_reason or self.kv_events_off_reason
        is_indexed = facts.has_token_ids and not facts.no_index_reason
        total = facts.total_kv_tokens
        return EngineConfig(
            model=facts.model,
            context_length=facts.context_length,
            kv_cache_block_size=config.block_size if facts.has_token_ids else None,
            total_kv_blocks=total // config.block_size or None if total else None,
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            loras=facts.properties.loras,
            kv_index="none" if not is_indexed else "approx" if reason else "events",
            kv_index_reason=reason,
            dp_size=facts.properties.dp_size,
            supported_fields=None if self._api is None else self._api.supported_fields(),
            kinds=(pooling,) if pooling else ("chat", "completions"),
            embedding_size=facts.embedding_size,
            shorter_embeddings=facts.shorter_embeddings,
            model_input="tokens" if facts.has_token_ids else "text",
            model_folder=facts.model_path,
            server_address=self._address,
            software=facts.api,
        )

    def _resolve_kv_events(self) -> None:
        """Sets the format of the KV events, and why there are none."""
        facts, block_size = self._facts, self.config.block_size
        self.kv_events_off_reason = facts.kv_off_reason
        if facts.kv_addresses is None:
            return
        page_size = facts.page_size or block_size
        try:
            self.kv_event_format = KvEventFormat(
                block_size, page_size, duplicate_policy(facts), tiers=3
            )
        except ValueError as error:
            text = f"{self._client.url} has pages of {page_size} tokens: {error}"
            raise InvalidRequest(text, "block_size") from None
        if missing := [name for name in ("zmq", "msgspec") if find_spec(name) is None]:
            self.kv_events_off_reason = (
                f"{' and '.join(missing)} is not installed: pip install 'kvmesh[adapter]'"
            )
        elif not self.config.kv_events:
            self.kv_events_off_reason = KV_EVENTS_OFF
        else:
            self._resolve_endpoints(facts.kv_addresses)

    def _resolve_endpoints(self, addresses: KvAddresses) -> None:
        # Imported here: a server without KV events needs no ZeroMQ.
        from worker_svc.kv_events.zmq_reader import KvEventEndpoints

        try:
            self._endpoints = KvEventEndpoints.of_addresses(addresses.events, addresses.replay)
        except ValueError as error:
            self.kv_events_off_reason = f"the server publishes KV events for its host only: {error}"

    async def _wait_for_server(self) -> tuple[ServerFacts, ServerFacts]:
        """Returns the facts that the server states, and those that requests have completed."""
        deadline = time.monotonic() + self.config.start_s
        is_logged = False
        while True:
            try:
                stated = await read_server(self._client, self.config)
                return stated, await find_pooling(self._client, self.config, stated)
            except (Overloaded, Unavailable, WorkerLost) as error:
                if error.reason == "SERVER_KEY" or time.monotonic() > deadline:
                    limit = f" within {self.config.start_s:g} s"
                    raise Unavailable(f"no server{limit}: {error.message}") from error
                if not is_logged:
                    log.warning("server_awaited", url=self._client.url, error=error.message)
                    is_logged = True
            await asyncio.sleep(START_INTERVAL_S)

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the output of one request; rejections are raised at the first step.

        Raises Unsupported, InvalidRequest, PromptTooLong, Overloaded, Unavailable, and WorkerLost
        if the server is gone.
        """
        try:
            self._check_started()
            call: TokenStream
            if pooling := self._facts.properties.pooling:
                if not request.is_probe:
                    raise Unsupported("model", f"the server computes {pooling}s only")
                call = open_pooling(request, self._facts, pooling, ctx.priority, self._new_rid())
            elif self._api is None:
                call = self._text_probe(request)
            else:
                call = self._api.open(request, ctx.priority, self._new_rid())
        except MeshError:
            self.counters["rejected"] += 1
            raise
        rank = request.routing.dp_rank or 0 if request.routing is not None else 0
        async with aclosing(self._run(call, rank, ctx)) as outputs:
            async for output in outputs:
                yield output

    async def generate_pass_through(
        self, kind: str, body: bytes, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the server's chunks for an OpenAI body. kind: "chat" or "completion".

        Raises as `generate`.
        """
        try:
            self._check_started()
            call = PassThroughStream.of_body(kind, body, self._facts.model)
        except MeshError:
            self.counters["rejected"] += 1
            raise
        async with aclosing(self._run(call, 0, ctx)) as outputs:
            async for output in outputs:
                yield output

    async def embed(self, request: PreprocessedRequest, ctx: GenerateContext) -> Vector | None:
        """Returns the vector of one prompt. Raises as `generate`."""
        values = await self._pool(request, ctx, "embedding")
        return None if values is None else read_vector({"embedding": values})

    async def score(self, request: PreprocessedRequest, ctx: GenerateContext) -> float | None:
        """Returns the score of one prompt. Raises as `generate`."""
        values = await self._pool(request, ctx, "score")
        return None if values is None else read_score({"embedding": values})

    async def _pool(
        self, request: PreprocessedRequest, ctx: GenerateContext, pooling: Pooling
    ) -> Values | None:
        """Returns what the server computes of a prompt; None if `ctx` was stopped."""
        try:
            self._check_started()
            call = open_pooling(request, self._facts, pooling, ctx.priority, self._new_rid())
        except MeshError:
            self.counters["rejected"] += 1
            raise
        try:
            async with aclosing(self._run(call, 0, ctx)) as outputs:
                async for _ in outputs:
                    """The last one: `call` has taken the values."""
        except InvalidRequest as error:
            raise error.copy(field=error.field or "input") from error
        return None if ctx.is_stopped else call.values

    def _text_probe(self, request: PreprocessedRequest) -> PassThroughStream:
        if not request.is_probe:
            text = "the server takes no token ids, only OpenAI bodies"
            raise Unsupported("token_ids", text)
        return PassThroughStream.probe(self._facts.model)

    async def _run(
        self, call: TokenStream, rank: int, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.counters["accepted"] += 1
        outcome, has_output = "closed", False
        self._sent[rank] += 1
        self._open[rank] += 1
        try:
            async with aclosing(self._outputs(call, ctx)) as outputs:
                async for output in outputs:
                    # The end of a stopped request is made here, and is no step of the server.
                    self._chunks[rank] += not ctx.is_stopped
                    if not has_output:
                        has_output = True
                        self._with_output[rank] += 1
                    if output.finish_reason is not None:
                        outcome = "cancelled" if ctx.is_stopped else "finished"
                    yield output
        except MeshError:
            outcome = "failed"
            raise
        finally:
            self.counters[outcome] += 1
            self._open[rank] -= 1
            self._with_output[rank] -= has_output

    async def _outputs(
        self, call: TokenStream, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the outputs of a call; at a stop the terminal one, without waiting for the
        server."""
        if ctx.is_stopped:
            yield chunk.cancelled().with_usage(call.usage())
            return
        # What the server has sent and the reader of this generator has not taken; None: the stop.
        queue: _Queue = asyncio.Queue()
        self._queues.add(queue)
        ctx.call_on_stop(lambda: queue.put_nowait(None))
        reader = asyncio.create_task(self._read(call, queue.put_nowait), name="server stream")
        has_ended = False
        try:
            while True:
                item = await queue.get()
                if item is None or ctx.is_stopped:
                    yield chunk.cancelled().with_usage(call.usage())
                    return
                if isinstance(item, Exception):
                    has_ended = True
                    raise item
                has_ended = item.finish_reason is not None
                yield item
                if has_ended:
                    return
        finally:
            self._queues.discard(queue)
            reader.cancel()
            if not has_ended and call.rid:
                self._abort_at_server(call.rid)
            # The connection is closed when the reader has ended.
            await asyncio.wait([reader])

    async def _read(
        self, call: TokenStream, put: Callable[[LLMEngineOutput | Exception | None], None]
    ) -> None:
        try:
            body = orjson.dumps(call.body)
            events = self._client.stream(call.path, body, is_streamed=call.is_streamed)
            async with aclosing(events):
                async for data in events:
                    if (output := call.convert(data)) is not None:
                        put(output)
                        if output.finish_reason is not None:
                            return
            if (last := call.end()) is None:
                raise WorkerLost(f"{self._client.url} ended a stream early", retryable=True)
            put(last)
        except MeshError as error:
            put(error)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            put(self._malformed(error))

    def _malformed(self, error: Exception) -> WorkerLost:
        text = f"{self._client.url} sent a malformed chunk: {error!r}"
        return WorkerLost(text, retryable=True)

    def _new_rid(self) -> str:
        self._request_count += 1
        return f"{self._rid_prefix}-{self._request_count:012x}"

    def _abort_at_server(self, rid: str) -> None:
        task = asyncio.create_task(self._post_abort(rid), name="server abort")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _post_abort(self, rid: str) -> None:
        try:
            await self._client.post("/abort_request", {"rid": rid})
        except MeshError as error:
            log.warning("server_abort_failed", url=self._client.url, error=error.message)

    async def abort(self, ctx: GenerateContext) -> None:
        """Does nothing: the stop closes the connection, at which the server aborts."""

    async def drain(self) -> None:
        """Returns at once: a server hands nothing over."""

    async def cleanup(self) -> None:
        """Ends all connections; the server goes on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for queue in self._queues:
            queue.put_nowait(WorkerLost("the adapter was shut down", retryable=True))
        for task in (*self._tasks, *self._aborts):
            task.cancel()
        if pending := (*self._tasks, *self._aborts):
            await asyncio.wait(pending)
        await self._client.close()

    async def wait_for_failure(self) -> None:
        """Waits until the server serves another model, then raises WorkerLost."""
        assert self._failure is not None, "called after start"
        raise await asyncio.shield(self._failure)

    def publish_to(self, sink: KvEventSink) -> None:
        """Reports all changes of the server's cache, beginning with the present content."""
        if self._endpoints is None:
            return
        from worker_svc.kv_events.zmq_reader import KvEventReader

        for rank in range(self._facts.properties.dp_size):
            self._spawn(KvEventReader(rank, self._endpoints, sink).run(), f"kv events {rank}")

    def loads(self) -> Sequence[Load]:
        """Returns the load of each rank: the server's, at most LOAD_INTERVAL_S old, and the
        requests that it does not count yet; without it the requests of this adapter."""
        total = self._facts.total_kv_tokens
        block_size = self.config.block_size
        loads = []
        for rank, load in enumerate(self._ranks()):
            running = self._with_output[rank]
            waiting = self._open[rank] - running
            if self._is_load_current:
                unseen = min(self._sent[rank] - self._counted.of(rank), waiting)
                # Those with output run there, even if the poll is older or waits for its response.
                running, waiting = max(load.running, running), load.waiting + unseen
            loads.append(
                Load(
                    engine_step=self._chunks[rank] + load.progress,
                    running=running,
                    waiting=waiting,
                    waiting_tokens=load.waiting_tokens,
                    kv_used_blocks=-(-load.used_tokens // block_size),
                    kv_total_blocks=total // block_size or None if total else None,
                    dp_rank=rank,
                    prefill_tokens=load.prefill_tokens or 0,
                )
            )
        return loads

    def _ranks(self) -> Sequence[ServerLoad]:
        ranks = self._facts.properties.dp_size
        return [*self._server_loads, *([ServerLoad()] * ranks)][:ranks]

    async def _read_loads(self) -> None:
        if not self._facts.has_load:
            return
        sent, is_current = self._sent.copy(), False
        try:
            self._server_loads = await self._fetch_loads()
            self._counted.record(self._server_loads, sent)
            is_current = True
        finally:
            self._is_load_current = is_current

    async def _fetch_loads(self) -> Sequence[ServerLoad]:
        """Raises the errors of the client, LookupError and ValueError for what is no load."""
        if self._facts.api == "sglang":
            return read_sglang_loads(await self._client.get_json("/v1/loads") or {})
        text = (await self._client.get("/metrics")).text
        if not (loads := read_metrics(text, self._facts.total_kv_tokens)):
            raise ValueError(f"{self._client.url} reports no load in /metrics")
        return loads

    async def _check_model(self) -> None:
        """Compares the model with that of the start, which the card describes."""
        facts, ours = await read_server(self._client, self.config), self._stated
        if (facts.api, facts.model, facts.model_path, facts.page_size) != (
            *(ours.api, ours.model, ours.model_path, ours.page_size),
        ) or facts.properties.pooling != ours.properties.pooling:
            text = f"{self._client.url} serves {facts.model!r} now, not {ours.model!r} as before"
            if self._failure is not None and not self._failure.done():
                log.error("server_changed", url=self._client.url, reason=text)
                self._failure.set_result(WorkerLost(text, retryable=True))

    async def _poll(self, read: Callable[[], Awaitable[None]], interval_s: float) -> None:
        """Reads again and again; only the first failure in a row is logged."""
        was_lost = False
        while True:
            await asyncio.sleep(interval_s)
            try:
                await read()
                was_lost = False
            except (MeshError, LookupError, TypeError, ValueError) as error:
                if not was_lost:
                    was_lost = True
                    log.warning("server_poll_failed", url=self._client.url, error=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)
        self._tasks.append(task)

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and self._failure is not None and not self._failure.done():
            log.error("server_task_failed", task=task.get_name(), exc_info=task.exception())
            self._failure.set_result(WorkerLost(f"task {task.get_name()} failed", retryable=True))

    def _check_started(self) -> None:
        if self._is_closed or not self._is_started:
            state = "was shut down" if self._is_closed else "has not started"
            raise Unavailable(f"the engine {state}")

    async def flush_cache(self) -> int:
        """Clears the server's prefix cache. Returns 0, since servers do not count.

        Raises Conflict while the server has requests, Unimplemented for a server without it.
        """
        if self._facts.api == "text":
            raise Unimplemented("the server has no call that clears its cache")
        if self._facts.api == "vllm":
            await self._flush_vllm()
            return 0
        try:
            await self._client.post("/flush_cache", {})
        except InvalidRequest as error:
            raise Conflict(f"{self._client.url} did not flush its cache: {error}") from error
        return 0

    async def _flush_vllm(self) -> None:
        """Clears the cache, and has the server compute a token: it publishes KV events, that of the
        clearing too, at the end of a step only."""
        url = self._client.url
        try:
            content = await self._client.post("/reset_prefix_cache", {})
        except InvalidRequest as error:
            text = f"{url} has no call that clears its cache: start it with VLLM_SERVER_DEV_MODE=1"
            raise Unimplemented(text) from error
        # Earlier versions respond without a body.
        if content and not orjson.loads(content).get("success", True):
            raise Conflict(f"{url} did not flush its cache: requests use it")
        if not self._facts.properties.pooling:
            await self._client.post(COMPLETIONS_PATH, flush_body(self._facts.model))

    async def load_lora(self, name: str, uri: str) -> frozenset[str]:
        """Loads an adapter at the server; file:// names a folder of the server's host."""
        if not uri:
            raise InvalidRequest("uri must not be empty", "uri")
        body = {"lora_name": name, "lora_path": uri.removeprefix("file://")}
        return await self._change_adapters("load_lora_adapter", body)

    async def unload_lora(self, name: str) -> frozenset[str]:
        """Unloads an adapter at the server."""
        return await self._change_adapters("unload_lora_adapter", {"lora_name": name})

    async def _change_adapters(self, call: str, body: dict[str, str]) -> frozenset[str]:
        if self._facts.api == "text":
            raise Unimplemented("the server loads no adapters")
        prefix = "" if self._facts.api == "sglang" else "/v1"
        await self._client.post(f"{prefix}/{call}", body)
        loras = await read_adapters(self._client)
        properties = replace(self._facts.properties, loras=loras)
        self._facts = replace(self._facts, properties=properties)
        self._api = _api_of(self._facts)
        return loras


def _api_of(facts: ServerFacts) -> TokenApi | None:
    match facts.api:
        case "sglang":
            return SglangApi(facts)
        case "vllm":
            return VllmApi(facts)
        case _:
            return None
