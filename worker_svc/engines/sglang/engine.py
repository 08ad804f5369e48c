"""The SGLang adapter (SGLang 0.5.23).

`sglang.Engine` runs its schedulers in separate processes; its tokenizer manager, which talks to
them, runs here in our event loop. `sampling.py` translates requests, `kv_events/zmq_reader.py`
reads KV events. Facts about SGLang that shape this file:

- Its signal handlers would take SIGTERM from our lifecycle. On SIGQUIT, which a dying scheduler
  sends, they kill the process tree. Therefore the tokenizer manager's loop is started here without
  them, and this file handles SIGQUIT. A scheduler that dies silently is detected by the end of its
  process. In both cases all requests fail at once with a retryable WorkerLost, which
  `wait_for_failure` raises too.
- `Engine.shutdown` kills all child processes and leaves open requests waiting forever. Therefore
  requests are ended first, and a worker has no child processes but SGLang's.
- The scheduler aborts every request with an id that *begins* with the given one. Therefore ids
  have a prefix of fixed length up to a separator.
- It replaces the handlers of Python's root logger and asyncio's policy; both are restored.
- Load is read from shared memory behind a file lock that a stopped scheduler may hold. It is read
  in a thread, so that only the load figures stall.
- A decode leg waits for KV pages without a limit, until prefill's side times out as if it had no
  partner. The load reports how many legs wait for pages; `starvation.py` derives which ones.
- Handoff timeouts are process-wide environment variables, set before the start.
- Torch's store and the transfer engine listen on all interfaces, on ports chosen by the system and
  without authentication, whatever `host` is. Use a firewall where that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, Final, Literal

import structlog

from common.errors import (
    Conflict,
    InvalidRequest,
    MeshError,
    Overloaded,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.kv.load import Load
from common.trials.fair_trials import FairTrials
from common.trials.trials import Trials
from worker_svc.engines.contract import (
    BootstrapInfo,
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    Vector,
    chunk,
    usage,
)
from worker_svc.engines.handoff import HandoffTimeouts, no_blocks_error
from worker_svc.engines.sglang import admin
from worker_svc.engines.sglang.advertised import build_engine_config, read_properties
from worker_svc.engines.sglang.config import SglangConfig
from worker_svc.engines.sglang.launch import (
    Launched,
    kill_children,
    launch_engine,
    make_tiny_model,
)
from worker_svc.engines.sglang.load import count_waiting_for_pages, to_load
from worker_svc.engines.sglang.media import (
    PREPARE_IMAGES,
    Images,
    ImageWords,
    check_images,
    image_arguments,
    read_image_model,
)
from worker_svc.engines.sglang.pooling import pool, read_score, read_vector
from worker_svc.engines.sglang.sampling import (
    NO_PARTNER_HOST,
    EngineProperties,
    OutputConverter,
    SglangRequest,
    build_pooling_arguments,
    build_sglang_request,
    to_invalid_request,
)
from worker_svc.engines.sglang.server_args import (
    find_kv_events_off_reason,
    resolve_page_size,
)
from worker_svc.engines.sglang.starvation import StarvationDetector
from worker_svc.kv_events.external_events import DuplicatePolicy, KvEventFormat, KvEventSink
from worker_svc.kv_events.zmq_reader import KvEventEndpoints, KvEventReader

LOAD_INTERVAL_S: Final = 0.1
WARM_UP_TIMEOUT_S: Final = 120.0
# Limit for the preparation of images of other requests.
IMAGE_WAIT_S: Final = 60.0
# Limit for transfers in flight at shutdown.
DRAIN_TIMEOUT_S: Final = 4.0
# Time for an abandoned start to end after its processes were killed.
ABANDON_LAUNCH_TIMEOUT_S: Final = 8.0

log = structlog.get_logger()


class SglangEngine:
    """An `LLMEngine` over `sglang.Engine`.

    Counters at rest: accepted == finished + cancelled + closed + failed; `rejected` requests are
    not accepted.
    """

    def __init__(self, config: SglangConfig) -> None:
        """Raises InvalidRequest for invalid arguments that can be detected without SGLang."""
        self.config = config
        self.counters: Counter[str] = Counter()
        self.kv_event_format = KvEventFormat(
            config.block_size,
            resolve_page_size(config.engine_args, config.block_size),
            # A block is reported once when it enters the radix tree and once when it leaves.
            DuplicatePolicy.IDEMPOTENT,
            tiers=3 if config.engine_args.get("enable_hierarchical_cache") else 1,
        )
        self.kv_events_off_reason = "the engine has not started"
        self._properties = EngineProperties()
        self._endpoints: KvEventEndpoints | None = None
        # Any: SGLang's Engine has no types.
        self._engine: Any = None
        self._launch: asyncio.Future[Launched] | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._engine_failure: asyncio.Future[WorkerLost] | None = None
        self._sentinels: list[int] = []
        self._min_tokens_processor = ""
        self._last_request_number = 0
        self._chunk_counts: Counter[int] = Counter()
        self._loads: tuple[Load, ...] = ()
        self._loads_updated = asyncio.Event()
        self._timeouts = HandoffTimeouts(partner_timeout_s=config.handoff_timeout_s)
        self._decode_queue = StarvationDetector(self._timeouts.blocks_timeout_s)
        self._starved: set[str] = set()
        self._is_closed = False
        self._is_asleep = False
        # Any: SGLang's server arguments are JSON-like values.
        self._resolved: Mapping[str, Any] = {}
        self._image_words = ImageWords()
        self._image_lock = asyncio.Lock()
        self._trials = FairTrials(Trials((PREPARE_IMAGES,)))

    async def start(self, worker_id: int) -> EngineConfig:
        """Starts SGLang and waits for its first response. Call it on the main thread.

        Raises InvalidRequest for arguments that SGLang rejects, Unavailable if it fails to start.
        """
        if self._launch is not None:
            raise Conflict("the engine was already started")
        loop = asyncio.get_running_loop()
        self._engine_failure = loop.create_future()
        loop.add_signal_handler(signal.SIGQUIT, self._fail_engine, "an SGLang process failed")
        if self.config.model_path is None:
            await make_tiny_model(self.config.model_dir)
        images = await asyncio.to_thread(
            read_image_model, self.config.model_dir, self.config.engine_args, self.config.role
        )
        self._launch = loop.run_in_executor(None, launch_engine, self.config)
        try:
            launched = await asyncio.shield(self._launch)
        except MeshError:
            raise
        except (AssertionError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"SGLang rejected its arguments: {error}", "engine_args"
            ) from error
        except Exception as error:
            raise Unavailable(f"SGLang did not start: {error}") from error
        self._engine, self._endpoints = launched.engine, launched.endpoints
        self._min_tokens_processor = launched.min_tokens_processor
        self._attach_to_loop(loop)
        resolved = self._resolved = self._engine.server_args.resolved_dict()
        manager = self._engine.tokenizer_manager
        self._properties = replace(read_properties(self.config, manager, resolved), images=images)
        await self._warm_up()
        await self._read_loads()
        self.kv_events_off_reason = find_kv_events_off_reason(
            self.config.role, resolved, kv_events=self.config.kv_events
        )
        return await build_engine_config(
            self.config, manager, resolved, self._properties, self._loads
        )

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the output of one request; rejections are raised at the first step.

        Raises Unsupported, InvalidRequest, PromptTooLong, Overloaded, Unavailable, and WorkerLost
        if SGLang dies or a handoff fails.
        """
        if pooling := self._properties.pooling:
            if not request.is_probe:
                raise Unsupported("model", f"the model computes {pooling}s only")
            await self._pool(request, ctx, pooling)
            yield chunk.stop().with_usage(usage(len(request.token_ids), 0))
            return
        try:
            self._check_alive()
            sglang_request = build_sglang_request(request, self._properties, ctx.priority)
        except MeshError:
            self.counters["rejected"] += 1
            raise
        self.counters["accepted"] += 1
        outcome = "closed"
        converter = OutputConverter(sglang_request, self._properties, len(request.token_ids))
        try:
            async for output in self._stream_outputs(sglang_request, converter, ctx):
                if output.finish_reason is not None:
                    outcome = "cancelled" if ctx.is_stopped else "finished"
                yield output
        except MeshError:
            outcome = "failed"
            raise
        finally:
            self.counters[outcome] += 1

    async def embed(self, request: PreprocessedRequest, ctx: GenerateContext) -> Vector | None:
        """Returns the vector of one prompt. Raises as `generate`."""
        return read_vector(await self._pool(request, ctx, "embedding"))

    async def score(self, request: PreprocessedRequest, ctx: GenerateContext) -> float | None:
        """Returns the score of one prompt. Raises as `generate`."""
        return read_score(await self._pool(request, ctx, "score"))

    async def _pool(
        self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
        pooling: Literal["embedding", "score"],
    ) -> Mapping[str, Any]:
        try:
            self._check_alive()
            arguments = build_pooling_arguments(request, self._properties, pooling, ctx.priority)
        except MeshError:
            self.counters["rejected"] += 1
            raise
        self.counters["accepted"] += 1
        outcome = "closed"
        manager = self._engine.tokenizer_manager
        try:
            output = await pool(manager, arguments, self._new_rid(ctx.id), self._properties)
            outcome = "finished"
            self._chunk_counts[0] += 1
            return output
        except MeshError:
            outcome = "failed"
            if self._engine_failure is not None and self._engine_failure.done():
                raise self._engine_failure.result() from None
            raise
        finally:
            self.counters[outcome] += 1

    async def _stream_outputs(
        self, sglang_request: SglangRequest, converter: OutputConverter, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if ctx.is_stopped:
            yield chunk.cancelled().with_usage(converter.usage())
            return
        rid = self._new_rid(ctx.id)
        stop_waiter = asyncio.ensure_future(ctx.stopped())
        stop_waiter.add_done_callback(lambda done: None if done.cancelled() else self._abort(rid))
        if self.config.role == "decode":
            rank = (
                0 if self._properties.dp_size == 1 else sglang_request.arguments["routed_dp_rank"]
            )
            self._decode_queue.open(rid, rank, time.monotonic())
        try:
            async with aclosing(await self._start_generation(sglang_request, rid, ctx)) as stream:
                async for raw_output in stream:
                    self._decode_queue.close(rid, time.monotonic())
                    meta = raw_output["meta_info"]
                    self._chunk_counts[meta.get("dp_rank") or 0] += 1
                    if verifications := meta.get("spec_verify_ct"):
                        self.counters["verifications"] += verifications
                    output = converter.convert(raw_output)
                    if output is not None:
                        yield output
        except MeshError:
            if self._engine_failure is not None and self._engine_failure.done():
                raise self._engine_failure.result() from None
            if not stop_waiter.done():
                if rid in self._starved and not converter.delivered:
                    raise no_blocks_error(self._timeouts) from None
                raise
            yield chunk.cancelled().with_usage(converter.usage())
        except ValueError as error:
            raise to_invalid_request(error) from error
        finally:
            stop_waiter.cancel()
            self._decode_queue.close(rid, time.monotonic())
            self._starved.discard(rid)

    async def _start_generation(
        self, sglang_request: SglangRequest, rid: str, ctx: GenerateContext
    ) -> AsyncGenerator[dict[str, Any], None]:
        arguments = dict(sglang_request.arguments)
        if sglang_request.needs_min_tokens:
            arguments["custom_logit_processor"] = self._min_tokens_processor
        if sglang_request.images is not None:
            with ctx.preparing():
                arguments |= await self._image_arguments(sglang_request.images, ctx.tenant)
        stream: AsyncGenerator[dict[str, Any], None] = await self._engine.async_generate(
            **arguments, rid=rid, stream=True
        )
        return stream

    async def _image_arguments(self, images: Images, tenant: str) -> dict[str, Any]:
        """Returns SGLang's arguments for images. Raises InvalidRequest for an invalid image, and
        Overloaded if those of other requests take longer than IMAGE_WAIT_S."""
        from sglang.srt.managers.schedule_batch import (  # type: ignore[import-not-found] # noqa: TID251
            Modality,
            MultimodalDataItem,
        )

        deadline_s = asyncio.get_running_loop().time() + IMAGE_WAIT_S
        await check_images(images, self._trials, tenant, deadline_s)
        processor = self._engine.tokenizer_manager.processor.image_processor
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._image_lock.acquire()  # the processor is not made for threads
        except TimeoutError:
            text = f"images of other requests took more than {IMAGE_WAIT_S:g} s; retry after 1 s"
            raise Overloaded(1.0, text) from None
        try:
            arguments = await asyncio.to_thread(image_arguments, images, processor)
        finally:
            self._image_lock.release()
        for content, mm_hash in zip(images.contents, arguments["mm_hashes"], strict=True):
            item = MultimodalDataItem(modality=Modality.IMAGE)
            item.set_hash(int(mm_hash, 16))
            self._image_words.add(content, item.pad_values)
        return arguments

    def _new_rid(self, request_id: str) -> str:
        self._last_request_number += 1
        return f"{self._last_request_number:016x}-{request_id[:64]}"

    def _abort(self, rid: str) -> None:
        if self._engine is not None and not self._is_closed:
            self._engine.tokenizer_manager.abort_request(rid=rid)

    async def abort(self, ctx: GenerateContext) -> None:
        """Does nothing: the stop was sent to SGLang already."""

    async def drain(self) -> None:
        """Waits until no handoff is open, at most DRAIN_TIMEOUT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while any(load.rooms_open for load in self._loads):
                    await self._loads_updated.wait()

    async def cleanup(self) -> None:
        """Stops SGLang and all its processes. Idempotent; also valid after a failed start."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._fail_engine("the engine was shut down")
        loop = asyncio.get_running_loop()
        self._remove_process_watchers(loop)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)
        elif self._launch is not None:
            await self._abandon_launch(self._launch)
        # Last: a dying process may still send SIGQUIT.
        loop.remove_signal_handler(signal.SIGQUIT)

    async def _abandon_launch(self, launch: asyncio.Future[Launched]) -> None:
        deadline = time.monotonic() + ABANDON_LAUNCH_TIMEOUT_S
        while True:
            await asyncio.to_thread(kill_children)
            if launch.done() or time.monotonic() > deadline:
                return
            await asyncio.sleep(LOAD_INTERVAL_S)

    async def wait_for_failure(self) -> None:
        """Waits until SGLang dies, then raises WorkerLost."""
        assert self._engine_failure is not None, "called after start"
        raise await asyncio.shield(self._engine_failure)

    def publish_to(self, sink: KvEventSink) -> None:
        """Reports all changes of the cache to the sink, beginning with the present content."""
        if self._endpoints is None:
            return
        for rank in range(self._properties.dp_size):
            reader = KvEventReader(
                rank,
                self._endpoints,
                sink,
                self._image_words.replace if self._properties.images else None,
            )
            task = asyncio.create_task(reader.run(), name=f"sglang kv events {rank}")
            task.add_done_callback(self._on_task_done)
            self._tasks.append(task)

    def loads(self) -> Sequence[Load]:
        """Returns the load of each rank, at most LOAD_INTERVAL_S old while SGLang is alive."""
        return self._loads

    async def flush_cache(self) -> int:
        """Clears the prefix cache. Returns 0, since SGLang does not count. Raises Conflict."""
        self._check_alive()
        await admin.flush_cache(self._engine.tokenizer_manager)
        return 0

    async def load_lora(self, name: str, uri: str) -> frozenset[str]:
        """Loads as `admin.load_lora` does."""
        self._check_alive()
        admin.check_adapters(self._resolved)
        return self._set_loras(await admin.load_lora(self._engine.tokenizer_manager, name, uri))

    async def unload_lora(self, name: str) -> frozenset[str]:
        """Unloads as `admin.unload_lora` does."""
        self._check_alive()
        admin.check_adapters(self._resolved)
        return self._set_loras(await admin.unload_lora(self._engine.tokenizer_manager, name))

    def _set_loras(self, loras: frozenset[str]) -> frozenset[str]:
        self._properties = replace(self._properties, loras=loras)
        return loras

    async def sleep(self) -> None:
        """Releases weights and KV cache; `generate` raises Unavailable until `wake`."""
        self._check_alive()
        admin.check_sleep(self._resolved)
        self._is_asleep = True
        await admin.sleep(self._engine.tokenizer_manager)

    async def wake(self) -> None:
        """Ends `sleep`."""
        await admin.wake(self._engine.tokenizer_manager)
        self._is_asleep = False

    def _attach_to_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Does what SGLang does at its first request, without installing signal handlers."""
        manager = self._engine.tokenizer_manager
        manager.event_loop = loop
        reader = loop.create_task(manager.handle_loop(), name="sglang outputs")
        self._tasks = [reader, loop.create_task(self._poll_loads(), name="sglang loads")]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)
        for process in multiprocessing.active_children():
            self._sentinels.append(process.sentinel)
            loop.add_reader(
                process.sentinel, self._fail_engine, f"SGLang process {process.pid} ended"
            )

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            log.error("sglang_task_failed", task=task.get_name(), exc_info=task.exception())
            self._fail_engine(f"task {task.get_name()} failed")

    async def _warm_up(self) -> None:
        """Generates a token from a prompt too short to cache. The penalty compiles its kernel."""
        sampling = {"max_new_tokens": 1, "ignore_eos": True, "repetition_penalty": 1.1}
        arguments: dict[str, Any] = {"input_ids": [0], "sampling_params": sampling, "priority": 0}
        if self.config.role != "aggregated":
            arguments |= asdict(BootstrapInfo(NO_PARTNER_HOST, 0, 0))
        try:
            async with asyncio.timeout(WARM_UP_TIMEOUT_S):
                if self._properties.pooling:
                    request = {"input_ids": [0], "priority": 0}
                    rid = self._new_rid("warm-up")
                    await pool(self._engine.tokenizer_manager, request, rid, self._properties)
                    return
                ctx = GenerateContext("warm-up")
                stream = await self._start_generation(
                    SglangRequest(arguments), self._new_rid(ctx.id), ctx
                )
                async with aclosing(stream):
                    async for _ in stream:
                        self._check_alive()
        except TimeoutError:
            raise Unavailable(f"SGLang did not respond within {WARM_UP_TIMEOUT_S:g} s") from None
        self._check_alive()

    def _check_alive(self) -> None:
        if self._engine is None:
            raise Unavailable("the engine has not started")
        if self._is_asleep:
            raise Unavailable("the engine sleeps", reason="ASLEEP")
        if self._engine_failure is not None and self._engine_failure.done():
            raise self._engine_failure.result()

    def _fail_engine(self, reason: str) -> None:
        """Records that SGLang is gone and fails all its requests. Idempotent."""
        if self._engine_failure is None or self._engine_failure.done():
            return
        if not self._is_closed:
            log.error("sglang_lost", reason=reason)
        self._engine_failure.set_result(WorkerLost(f"the engine is gone: {reason}", retryable=True))
        self._remove_process_watchers(asyncio.get_running_loop())
        if self._engine is not None:
            admin.abort_requests(self._engine.tokenizer_manager)

    def _remove_process_watchers(self, loop: asyncio.AbstractEventLoop) -> None:
        """Removes the watchers; the sentinel of an ended process would stay readable."""
        while self._sentinels:
            loop.remove_reader(self._sentinels.pop())

    async def _poll_loads(self) -> None:
        while True:
            await self._read_loads()
            self._loads_updated.set()
            self._loads_updated.clear()
            await asyncio.sleep(LOAD_INTERVAL_S)

    async def _read_loads(self) -> None:
        reader = self._engine.tokenizer_manager.load_snapshot_reader
        snapshots = await asyncio.to_thread(reader.read_all)
        self._loads = tuple(
            to_load(snapshot, self.config.block_size, self._chunk_counts[snapshot.dp_rank])
            for snapshot in snapshots
        )
        now, unix_now = time.monotonic(), time.time()
        for snapshot in snapshots:
            waiting, age = count_waiting_for_pages(snapshot), unix_now - snapshot.timestamp
            for rid in self._decode_queue.find_starved(snapshot.dp_rank, waiting, age, now):
                if rid not in self._starved:
                    self._starved.add(rid)
                    self._abort(rid)
