"""The simulated engine: no accelerator, but a real scheduler, prefix cache and KV events.

Semantics of requests:
- The output is that of `token_oracle.py`: the token of the highest logit, so temperature, top_p,
  top_k and min_p have no effect. Penalties and logit_bias change the logits (`logits.py`). A seed
  gives another output, unless the temperature is 0. The prompt has the log probabilities that the
  formula gives to its tokens, without penalties and bias.
- A hidden stop token or EOS ends the output and is excluded from it and from the counts.
- Each loaded adapter has its own cache, block names and output. Each cache salt has its own cache
  and block names.
- `routing.priority`, else the context's: the larger goes first.
- If the model takes media (`sim.json`), a prompt contains their content hashes, so output, block
  names and KV events depend on the bytes of the media.
- Guided decoding masks tokens with a grammar (`constraint.py`), by llguidance.
- Unsupported fields are rejected by name: n, best_of, beam search, prompt embeddings, stop strings
  and other options of the text, max_thinking_tokens (this model does not reason), engine arguments,
  handoffs of another role.
- A probe gets one token, ahead of the queue, and neither reads nor fills the prefix cache.
- An embedding or a score occupies the scheduler as a prompt with one token of output, and bypasses
  the prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import structlog

from common.errors import (
    Conflict,
    InternalError,
    MeshError,
    Overloaded,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.kv.load import Load
from common.registry.instances import Role
from common.request.embedding import Vector
from worker_svc.engines.contract import (
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    TokenLogprob,
    chunk,
)
from worker_svc.engines.sim.advertised import advertised_config
from worker_svc.engines.sim.block_manager import BlockManager
from worker_svc.engines.sim.config import SimConfig, SimModel, load_sim_model
from worker_svc.engines.sim.constraint import Constraint, constraint_failed
from worker_svc.engines.sim.decode_rooms import DecodeRooms
from worker_svc.engines.sim.jobs import JobBuilder, seed_of
from worker_svc.engines.sim.logits import LogitModel
from worker_svc.engines.sim.network import Network, TcpNetwork
from worker_svc.engines.sim.prefill_rooms import PrefillRooms
from worker_svc.engines.sim.rooms import Rooms, RoomSettings
from worker_svc.engines.sim.scheduler import SimScheduler, SimSequence, Step
from worker_svc.engines.sim.step_loop import StepLoop
from worker_svc.engines.sim.stream import Stream
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.engines.sim.transfer import DecodeMachine
from worker_svc.kv_events.external_events import (
    DuplicatePolicy,
    KvEventFormat,
    KvEventSink,
    PagesRemoved,
    PagesStored,
)

_RETRY_AFTER_MIN_S: Final = 0.05
_RETRY_AFTER_MAX_S: Final = 30.0
# A call in a thread takes about 20 ms.
_PROMPT_LOGPROBS_PER_CALL: Final = 64
_ROOMS: Final[Mapping[Role, type[Rooms[Any]]]] = {
    "aggregated": Rooms,
    "prefill": PrefillRooms,
    "decode": DecodeRooms,
}
_ASLEEP: Final = Unavailable("the engine sleeps", reason="ASLEEP")

_COUNTERS: Final = (
    *("accepted", "finished", "cancelled", "closed", "failed", "rejected", "overloaded"),
    *("tokens", "prompt_tokens", "cached_tokens", "host_cached_tokens"),
)
log = structlog.get_logger()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class SimEngine:
    """An `LLMEngine` that computes nothing.

    model: None reads the configured folder at `start`.
    clock, sleep: in seconds; the defaults are the running loop's, so a loop with virtual time runs
        the engine in virtual time.
    network: connects to other engines; None uses TCP.

    Counters at rest: accepted == finished + cancelled + closed + failed. The others:
    - `rejected`: requests that were not accepted; `overloaded` are those that met a full queue.
    - `tokens`: delivered tokens.
    - `prompt_tokens`: of accepted requests.
    - `cached_tokens`: cache hits of ended requests; `host_cached_tokens`: those on the host.
    - `corrupt_pages`: pages with content that is not their owner's; must stay 0.
    - `corrupt_tokens`: first tokens that do not follow the prompt; must stay 0.
    - those of `Rooms`.
    """

    decode_machine: type[DecodeMachine] = DecodeMachine
    """Decode's end of a handoff."""

    def __init__(
        self,
        config: SimConfig,
        *,
        model: SimModel | None = None,
        clock: Callable[[], float] = _loop_time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        network: Network | None = None,
    ) -> None:
        self.config = config
        # Pages are routing blocks; each is reported once until it is removed.
        self.kv_event_format = KvEventFormat(
            config.block_size,
            config.block_size,
            DuplicatePolicy.IDEMPOTENT,
            tiers=2 if config.host_kv_blocks else 1,
        )
        self.kv_events_off_reason = "" if config.prefix_caching else "prefix caching is off"
        self.kv_event_sink: Callable[[Sequence[PagesStored | PagesRemoved]], None] | None = None
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._network = network
        self._counters: Counter[str] = Counter()
        self._core: _Core | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._steps = StepLoop(clock, sleep)
        self._compile_lock = asyncio.Lock()
        self._streams: dict[SimSequence, Stream] = {}
        # Why no request is accepted; None while the engine runs.
        self._unavailable_error: MeshError | None = Unavailable("the engine has not started")

    async def start(self, worker_id: int) -> EngineConfig:
        """Reads the model folder and starts stepping.

        Raises Conflict if called twice, NotFound or InvalidRequest for the model folder, and
        InvalidRequest if it cannot listen for decode workers.
        """
        if self._core is not None or self._loop_task is not None:
            raise Conflict("the engine was already started")
        if self.config.startup_s > 0:
            log.info("sim_engine_starting", worker_id=worker_id, startup_s=self.config.startup_s)
            await self._sleep(self.config.startup_s)
        model = self._model or load_sim_model(self.config.model_dir)
        self._core = core = await self._build_core(model, worker_id)
        self._unavailable_error = None
        self._loop_task = asyncio.create_task(self._run(core), name="sim-engine-steps")
        return advertised_config(
            self.config,
            context_length=core.jobs.context_length,
            supported_fields=core.jobs.supported_fields,
            media=model.media,
            kv_index_reason=self.kv_events_off_reason,
            endpoint=core.rooms.endpoint,
        )

    async def _build_core(self, model: SimModel, worker_id: int) -> _Core:
        config = self.config
        blocks = BlockManager(config.total_kv_blocks, config.block_size, config.host_kv_blocks)
        oracle = TokenOracle(model.word_ids, model.eos_ids[0], eos_one_in=config.eos_one_in)
        logit_model = LogitModel(oracle, model.vocab_size)
        scheduler = SimScheduler(
            blocks,
            config.timing,
            oracle,
            logit_model,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            is_mixed=config.mixed_steps,
        )
        rooms = await self._start_rooms(scheduler, worker_id)
        jobs = JobBuilder.create(config, model, time.thread_time)
        return _Core(scheduler, blocks, jobs, rooms, logit_model)

    async def _start_rooms(self, scheduler: SimScheduler, worker_id: int) -> Rooms[Any]:
        settings = RoomSettings(
            self.config,
            scheduler,
            incarnation=worker_id,
            network=self._network or TcpNetwork(),
            clock=self._clock,
            sleep=self._sleep,
            on_changed=self._on_rooms_changed,
            fail=self._fail,
            decode_machine=self.decode_machine,
        )
        rooms: Rooms[Any] = _ROOMS[self.config.handoff.role](settings)
        await rooms.listen()
        return rooms

    async def embed(self, request: PreprocessedRequest, ctx: GenerateContext) -> Vector | None:
        """Computes the prompt, then returns its vector by the formula of `token_oracle.py`."""
        if not await self._compute_prompt(request, ctx):
            return None
        oracle, size = self._started_core.scheduler.token_oracle, self.config.embedding_size
        return oracle.embed(request.token_ids.array, size, _lora_name(request))

    async def score(self, request: PreprocessedRequest, ctx: GenerateContext) -> float | None:
        """Computes the prompt, then returns its score by the formula of `token_oracle.py`."""
        if not await self._compute_prompt(request, ctx):
            return None
        oracle = self._started_core.scheduler.token_oracle
        return oracle.score(request.token_ids.array, _lora_name(request))

    async def _compute_prompt(self, request: PreprocessedRequest, ctx: GenerateContext) -> bool:
        """Returns whether the prompt was computed; False after a stop."""
        async with aclosing(self.generate(request, ctx, is_embedding=True)) as outputs:
            async for output in outputs:
                if output.finish_reason is FinishReason.CANCELLED:
                    return False
        return True

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the output of one request; rejections are raised at the first step. is_embedding:
        only the prompt is computed.

        Raises InvalidRequest, Unsupported, PromptTooLong, Overloaded, Unavailable, and WorkerLost
        or InternalError if the engine fails meanwhile.
        """
        constraint = None
        if not is_embedding and request.sampling_options.guided_decoding is not None:
            constraint = await self._compile(request)
        stream = self._open_stream(request, ctx, constraint, is_embedding=is_embedding)
        outcome = "closed"
        try:
            # Takes effect at once, even while the caller does not read the stream.
            ctx.call_on_stop(lambda: self._stop_stream(stream))
            if request.output_options.prompt_logprobs is not None:
                async for output in self._prompt_logprobs(request, ctx):
                    yield output
            while True:
                if ctx.is_stopped:
                    outcome = "cancelled"
                    yield chunk.cancelled().with_usage(stream.usage())
                    return
                if stream.is_done:
                    outcome = "finished"
                    yield stream.take_terminal()
                    return
                if stream.error is not None:
                    outcome = "failed"
                    raise stream.error.copy()
                if stream.has_new_output:
                    yield stream.take()
                else:
                    await stream.wait_for_update()
        finally:
            self._close_stream(stream, outcome)

    async def _prompt_logprobs(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the log probabilities of the prompt, computed in a thread; none after a stop."""
        core, routing = self._started_core, request.routing
        lora = "" if routing is None else routing.lora_name or ""
        seed, alternatives = (
            seed_of(request.sampling_options),
            request.output_options.prompt_logprobs or 0,
        )
        token_ids = request.token_ids.tolist()

        def logprobs(start: int) -> list[TokenLogprob]:
            state = core.scheduler.token_oracle.state_of(token_ids[:start], lora, seed)
            part = token_ids[start : start + _PROMPT_LOGPROBS_PER_CALL]
            return core.logit_model.of_prompt(state, part, alternatives)

        for start in range(1, len(token_ids), _PROMPT_LOGPROBS_PER_CALL):
            if ctx.is_stopped:
                return
            yield LLMEngineOutput(prompt_logprobs=await asyncio.to_thread(logprobs, start))

    async def abort(self, ctx: GenerateContext) -> None:
        """Does nothing: the stop frees the slot, and the blocks after open transfers."""

    async def drain(self) -> None:
        """Waits until no handoff or lease is open, at most their longest duration."""
        if self._core is not None:
            await self._core.rooms.drain()

    async def cleanup(self) -> None:
        """Stops stepping; open streams raise WorkerLost."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        self._fail_all(WorkerLost("the engine was shut down", retryable=True))
        self._unavailable_error = Unavailable("the engine was shut down")
        if self._core is not None:
            await self._core.rooms.close()

    def publish_to(self, sink: KvEventSink) -> None:
        """Reports all changes of the cache to the sink. Raises Conflict unless it is empty."""
        # Tokens of cached blocks are not kept, so their content cannot be reported later.
        if self.blocks.cached_blocks:
            raise Conflict("the cache is not empty; call publish_to before the first request")
        self.kv_event_sink = sink.take

    def loads(self) -> Sequence[Load]:
        if self._core is None:
            return (Load(kv_total_blocks=self.config.total_kv_blocks),)
        scheduler, blocks = self._core.scheduler, self._core.blocks
        return (
            Load(
                engine_step=self._steps.count,
                running=scheduler.running,
                waiting=scheduler.waiting,
                waiting_tokens=scheduler.waiting_tokens,
                kv_used_blocks=blocks.used_blocks,
                kv_total_blocks=blocks.total_blocks,
                rooms_open=self._core.rooms.open_rooms,
                prefill_tokens=self._steps.prefill_tokens,
            ),
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the counters of the class docstring, `steps` and `preempted`."""
        core = self._core
        return {
            **{name: self._counters[name] for name in _COUNTERS},
            "steps": self._steps.count,
            "preempted": core.scheduler.preemptions if core else 0,
            "corrupt_pages": core.blocks.corrupt_pages if core else 0,
            "corrupt_tokens": core.scheduler.corrupt_tokens if core else 0,
            **(core.rooms.counters if core else {}),
        }

    @property
    def blocks(self) -> BlockManager:
        """Returns the KV cache, for tests and checkers. Raises Conflict before `start`."""
        return self._started_core.blocks

    @property
    def _started_core(self) -> _Core:
        if self._core is None:
            raise Conflict("the engine has not started")
        return self._core

    async def flush_cache(self) -> int:
        """Evicts all unreferenced blocks, also those on the host. Returns how many."""
        evicted = self.blocks.flush()
        self._publish(self.blocks)
        return evicted

    async def load_lora(self, name: str, uri: str) -> frozenset[str]:
        """Adds an adapter. Raises Unsupported for a uri: adapters of the sim have no files."""
        if uri:
            raise Unsupported("uri", "adapters of the sim have no files; leave it empty")
        return self._started_core.jobs.add_lora(name)

    async def unload_lora(self, name: str) -> frozenset[str]:
        """Removes an adapter; requests that use it run to their end."""
        return self._started_core.jobs.remove_lora(name)

    async def sleep(self) -> None:
        """Drops the cache and refuses requests until `wake`."""
        await self.flush_cache()
        self._unavailable_error = self._unavailable_error or _ASLEEP

    async def wake(self) -> None:
        """Ends `sleep`."""
        if self._unavailable_error is _ASLEEP:
            self._unavailable_error = None

    def freeze(self) -> None:
        """Stops steps while everything else continues, like a hung accelerator; a fault for
        tests."""
        self._steps.is_frozen = True

    def unfreeze(self) -> None:
        """Ends `freeze`; the elapsed time is not caught up."""
        self._steps.is_frozen = False
        self._steps.wake()

    def inject_failure(self, error: MeshError) -> None:
        """Fails all present and future requests with `error`; a fault for tests."""
        self._unavailable_error = error
        self._fail_all(error)

    async def _compile(self, request: PreprocessedRequest) -> Constraint | None:
        """Returns the constraint of a request, compiled in a thread, one at a time: llguidance
        releases the GIL, so other streams continue. Raises MeshError if the request is rejected."""
        if self._core is None:
            return None
        try:
            async with self._compile_lock:
                return await asyncio.to_thread(self._core.jobs.constraint, request)
        except MeshError:
            self._counters["rejected"] += 1
            raise

    def _open_stream(
        self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
        constraint: Constraint | None,
        *,
        is_embedding: bool,
    ) -> Stream:
        try:
            stream = self._admit(request, ctx, constraint, is_embedding=is_embedding)
        except MeshError as error:
            self._counters["rejected"] += 1
            self._counters["overloaded"] += isinstance(error, Overloaded)
            raise
        self._streams[stream.sequence] = stream
        self._counters["accepted"] += 1
        self._counters["prompt_tokens"] += stream.sequence.prompt_tokens
        self._steps.wake()
        return stream

    def _admit(
        self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
        constraint: Constraint | None,
        *,
        is_embedding: bool,
    ) -> Stream:
        core = self._core
        if self._unavailable_error is not None or core is None:
            error = self._unavailable_error or Unavailable("the engine has not started")
            raise error.copy()
        job = (
            core.jobs.build_embedding(request, ctx.priority)
            if is_embedding
            else core.jobs.build(request, ctx.priority, constraint)
        )
        scheduler = core.scheduler
        if scheduler.waiting >= self.config.max_waiting:
            wait_s = self.config.timing.prefill_s(scheduler.waiting_tokens)
            raise Overloaded(
                min(max(wait_s, _RETRY_AFTER_MIN_S), _RETRY_AFTER_MAX_S),
                f"queue full: {scheduler.waiting}/{self.config.max_waiting} requests",
            )
        sequence = scheduler.submit(job)
        stream = Stream(sequence, job.is_handed_over, self.config.host_kv_blocks > 0)
        try:
            core.rooms.open(stream, request)
        except MeshError:
            scheduler.remove(stream.sequence)
            raise
        return stream

    def _plan(self, core: _Core) -> Step | None:
        step = core.scheduler.plan()
        core.rooms.start_pulls()
        return step

    def _on_rooms_changed(self) -> None:
        self._publish(self.blocks)
        self._steps.wake()

    def _stop_stream(self, stream: Stream) -> None:
        if self._core is not None:
            self._core.scheduler.remove(stream.sequence)
            self._core.rooms.abort(stream)
        stream.wake()

    def _close_stream(self, stream: Stream, outcome: str) -> None:
        assert self._core is not None, "nothing is opened before the start"
        sequence = stream.sequence
        self._core.scheduler.remove(sequence)
        if outcome == "finished":
            self._core.rooms.detach(stream)
        self._core.rooms.abort(stream)
        del self._streams[sequence]
        self._counters[outcome] += 1
        self._counters["tokens"] += stream.delivered
        if not sequence.job.is_remote:
            self._counters["cached_tokens"] += sequence.cached_tokens or 0
            self._counters["host_cached_tokens"] += sequence.host_cached_tokens

    def _fail(self, stream: Stream, error: MeshError) -> None:
        stream.error = stream.error or error
        self._stop_stream(stream)

    def _fail_all(self, error: MeshError) -> None:
        for stream in self._streams.values():
            self._fail(stream, error)

    async def _run(self, core: _Core) -> None:
        try:
            await self._steps.run(
                core.scheduler,
                plan=lambda: self._plan(core),
                on_advanced=lambda sequence: self._on_advanced(core, sequence),
                publish=lambda: self._publish(core.blocks),
            )
        except Exception:
            log.exception("sim_engine_failed")
            self.inject_failure(
                InternalError("the engine failed; the worker's log has the traceback")
            )

    def _on_advanced(self, core: _Core, sequence: SimSequence) -> None:
        stream = self._streams[sequence]
        if sequence.end is FinishReason.ERROR:
            self._fail(stream, constraint_failed())
        if sequence.transfer is not None:
            core.rooms.hand_over(stream, sequence.transfer)
        stream.wake()

    def _publish(self, blocks: BlockManager) -> None:
        events = blocks.take_events()
        if events and self.kv_event_sink is not None:
            self.kv_event_sink(events)


@dataclass(frozen=True, slots=True)
class _Core:
    """The parts that exist once the model is read."""

    scheduler: SimScheduler
    blocks: BlockManager
    jobs: JobBuilder
    rooms: Rooms[Any]
    logit_model: LogitModel


def _lora_name(request: PreprocessedRequest) -> str:
    return (request.routing.lora_name if request.routing is not None else None) or ""
