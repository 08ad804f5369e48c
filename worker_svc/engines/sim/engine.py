"""The simulated engine: no accelerator, but a real scheduler, prefix cache and KV events.

The scheduler works in engine time. One task here keeps engine time in step with the clock: it
completes the steps that are due, then wakes each stream once with all its new tokens. An idle
engine wakes no task.

Semantics of requests:
- The output is that of `token_oracle.py`: the token of the highest logit, so temperature, top_p,
  top_k and min_p have no effect. Penalties and logit_bias change the logits (`logits.py`). A seed
  gives another output, unless the temperature is 0. Every log probability is 0, with no
  alternatives.
- max_thinking_tokens has no effect: this model does not reason. A hidden stop token or EOS ends the
  output and is excluded from it and from the counts.
- Each loaded adapter has its own cache, block names and output. Each cache salt has its own cache
  and block names.
- `routing.priority`, else the context's: the larger goes first.
- If the model takes media (`sim.json`), a prompt contains their content hashes, so output, block
  names and KV events depend on the bytes of the media.
- Guided decoding masks tokens with a grammar (`constraint.py`), by llguidance.
- Unsupported fields are rejected by name: n, best_of, beam search, prompt embeddings, stop strings
  and other options of the text, prompt log probabilities, engine arguments, handoffs of another
  role.
- A probe gets one token, ahead of the queue, and neither reads nor fills the prefix cache.
- An embedding occupies the scheduler as a prompt with one token of output does, and bypasses the
  prefix cache.

Prefill and decode (`transfer.py` has the protocol, `transfer_server.py` the network). A prefill leg
responds with one token, in its terminal chunk. With `bootstrap_info` it ends when decode has the
KV. Without it (handoff mode "completed", max_tokens 1) it ends when the prompt is computed, and the
KV is leased to decode, unless that token ended the output: then `disaggregated_params` are absent.
A decode leg has `bootstrap_info`, or the `prefill_result` of a completed prefill, and responds with
all tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

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
from common.request.embedding import Vector
from worker_svc.engines.contract import (
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
)
from worker_svc.engines.sim.block_manager import BlockManager, BlockTable
from worker_svc.engines.sim.config import SimConfig, SimModel, load_sim_model
from worker_svc.engines.sim.constraint import Constraint, constraint_failed
from worker_svc.engines.sim.jobs import JobBuilder, kv_location
from worker_svc.engines.sim.logits import LogitModel
from worker_svc.engines.sim.messages import Done, page_stamps
from worker_svc.engines.sim.network import Network, TcpNetwork
from worker_svc.engines.sim.scheduler import SimScheduler, SimSequence, Step
from worker_svc.engines.sim.stream import Stream
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.engines.sim.transfer import DecodeMachine
from worker_svc.engines.sim.transfer_server import (
    DecodeHandoff,
    Handoff,
    HandoffManager,
    PrefillHandoff,
)
from worker_svc.kv_events.external_events import (
    DuplicatePolicy,
    KvEventFormat,
    KvEventSink,
    PagesRemoved,
    PagesStored,
)

# Work per loop turn, in tokens of about a microsecond each.
_TICK_WORK_MAX: Final = 2048
# A step costs about as much as two tokens; sixteen prompt tokens as much as one.
_STEP_WORK_UNITS: Final = 2
_PREFILL_TOKENS_PER_WORK_UNIT: Final = 16
# Steps due within this time are completed now: event loops wake up to a millisecond late.
# Steps of more sequences continue after a first token: a frame of its own for each would cost a
# tenth of the throughput of 64 streams.
_FIRST_TOKENS_MAX: Final = 8
# Turns of the event loop from a wake-up of a stream to the write of its frame.
_TURNS_TO_SEND: Final = 3
_EARLY_TOLERANCE_S: Final = 1e-4
_RETRY_AFTER_MIN_S: Final = 0.05
_RETRY_AFTER_MAX_S: Final = 30.0
_ASLEEP: Final = Unavailable("the engine sleeps", reason="ASLEEP")

_COUNTERS: Final = (
    *("accepted", "finished", "cancelled", "closed", "failed", "rejected", "overloaded"),
    *("tokens", "prompt_tokens", "cached_tokens"),
)
log = structlog.get_logger()


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class SimEngine:
    """An `LLMEngine` that computes nothing.

    model: None reads the configured folder at `start`. clock, sleep: in seconds; the defaults are
    the running loop's, so a loop with virtual time runs the engine in virtual time. network:
    connects to other engines; None uses TCP. decode_machine: decode's end of a handoff.

    Counters at rest: accepted == finished + cancelled + closed + failed; `rejected` requests are
    not accepted, `overloaded` are those rejected by a full queue. `tokens` counts delivered tokens,
    `prompt_tokens` those of accepted requests, `cached_tokens` cache hits of ended requests.
    `corrupt_pages` and `corrupt_tokens` count what must never happen: pages whose content is not
    their owner's, and first tokens that do not follow the prompt. With a role, also the counters of
    `HandoffManager`.
    """

    decode_machine: type[DecodeMachine] = DecodeMachine

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
            config.block_size, config.block_size, DuplicatePolicy.IDEMPOTENT
        )
        self.kv_events_off_reason = "" if config.prefix_caching else "prefix caching is off"
        self.kv_event_sink: Callable[[Sequence[PagesStored | PagesRemoved]], None] | None = None
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._network = network
        self._handoff_manager: HandoffManager | None = None
        self._counters: Counter[str] = Counter()
        self._core: _Core | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._compile_lock = asyncio.Lock()
        self._streams: dict[SimSequence, Stream] = {}
        self._steps = self._prefill_tokens = 0
        self._is_frozen = False
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
        self._core = core = _Core.build(self.config, model)
        config = self.config.handoff
        if config.role != "aggregated":
            self._handoff_manager = await self._start_handoff_manager(core, worker_id)
        self._unavailable_error = None
        self._loop_task = asyncio.create_task(self._run(core), name="sim-engine-steps")
        is_advertised = (config.role, config.mode) == ("prefill", "bootstrap")
        manager = self._handoff_manager
        host, port = manager.endpoint if manager and is_advertised else (None, None)
        group = config.transfer_group or f"sim/{self.config.model}/{self.config.block_size}"
        return EngineConfig(
            model=self.config.model,
            served_model_name=self.config.served_model_name,
            context_length=core.jobs.context_length,
            kv_cache_block_size=self.config.block_size,
            total_kv_blocks=self.config.total_kv_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            kv_index="events" if self.config.prefix_caching else "none",
            kv_index_reason=self.kv_events_off_reason,
            bootstrap_host=host,
            bootstrap_port=port,
            transfer_group="" if config.role == "aggregated" else group,
            local_prefill={"aggregated": True, "prefill": False}.get(
                config.role, config.local_prefill
            ),
            loras=self.config.loras,
            media=model.media,
            supported_fields=core.jobs.supported_fields,
            kinds=("chat", "completions", "embedding"),
            embedding_size=self.config.embedding_size,
            shorter_embeddings=True,
        )

    async def _start_handoff_manager(self, core: _Core, worker_id: int) -> HandoffManager:
        handoff_manager = HandoffManager(
            self.config.handoff,
            core.blocks,
            incarnation=worker_id,
            timing=self.config.timing,
            network=self._network or TcpNetwork(),
            clock=self._clock,
            sleep=self._sleep,
            on_released=self._wakeup.set,
            decode_machine=self.decode_machine,
        )
        if self.config.handoff.role == "prefill":
            await handoff_manager.listen()
        return handoff_manager

    async def embed(self, request: PreprocessedRequest, ctx: GenerateContext) -> Vector | None:
        """Computes the prompt, then returns its vector by the formula of `token_oracle.py`."""
        async with aclosing(self.generate(request, ctx, is_embedding=True)) as outputs:
            async for output in outputs:
                if output.finish_reason is FinishReason.CANCELLED:
                    return None
        lora = request.routing.lora_name if request.routing is not None else None
        oracle, size = self._started_core.scheduler.token_oracle, self.config.embedding_size
        return oracle.embed(request.token_ids.array, size, lora or "")

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
        # Takes effect at once, even while the caller does not read the stream.
        watch = asyncio.ensure_future(ctx.stopped())
        watch.add_done_callback(lambda _: self._stop_stream(stream))
        try:
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
                    raise _copy_error(stream.error)
                if stream.has_new_output:
                    yield stream.take()
                else:
                    await stream.wait_for_update()
        finally:
            self._close_stream(stream, outcome)
            watch.cancel()

    async def abort(self, ctx: GenerateContext) -> None:
        """Does nothing: the stop frees the slot, and the blocks after open transfers."""

    async def drain(self) -> None:
        """Waits until no handoff or lease is open, at most their longest duration."""
        if self._handoff_manager is None:
            return
        try:
            async with asyncio.timeout(self.config.handoff.timeout_s + self.config.handoff.lease_s):
                await self._handoff_manager.idle.wait()
        except TimeoutError:
            log.warning("sim_engine_drain_timed_out", rooms_open=self._handoff_manager.open_rooms)

    async def cleanup(self) -> None:
        """Stops stepping; open streams raise WorkerLost."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        self._fail_all(WorkerLost("the engine was shut down", retryable=True))
        self._unavailable_error = Unavailable("the engine was shut down")
        if self._handoff_manager is not None:
            await self._handoff_manager.close()

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
                engine_step=self._steps,
                running=scheduler.running,
                waiting=scheduler.waiting,
                waiting_tokens=scheduler.waiting_tokens,
                kv_used_blocks=blocks.used_blocks,
                kv_total_blocks=blocks.total_blocks,
                rooms_open=self._handoff_manager.open_rooms if self._handoff_manager else 0,
                prefill_tokens=self._prefill_tokens,
            ),
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the counters of the class docstring, `steps` and `preempted`."""
        core = self._core
        return {
            **{name: self._counters[name] for name in _COUNTERS},
            "steps": self._steps,
            "preempted": core.scheduler.preemptions if core else 0,
            "corrupt_pages": core.blocks.corrupt_pages if core else 0,
            "corrupt_tokens": core.scheduler.corrupt_tokens if core else 0,
            **(self._handoff_manager.counters if self._handoff_manager else {}),
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
        """Evicts all unreferenced blocks. Returns how many."""
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
        """Fault for tests: steps stop while everything else continues, like a hung accelerator."""
        self._is_frozen = True

    def unfreeze(self) -> None:
        """Ends `freeze`; the elapsed time is not caught up."""
        self._is_frozen = False
        self._wakeup.set()

    def inject_failure(self, error: MeshError) -> None:
        """Fault for tests: all present and future requests fail with `error`."""
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
        self._wakeup.set()
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
            raise _copy_error(self._unavailable_error or Unavailable("the engine has not started"))
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
        stream = Stream(scheduler.submit(job), job.is_handed_over)
        try:
            stream.handoff = self._open_handoff(core, stream, request)
        except MeshError:
            scheduler.remove(stream.sequence)
            raise
        return stream

    def _open_handoff(
        self, core: _Core, stream: Stream, request: PreprocessedRequest
    ) -> Handoff | None:
        """Returns the leg's room, None if it needs none yet. Raises as `HandoffManager`."""
        job = stream.sequence.job
        if job.is_remote:
            assert self._handoff_manager is not None, "decode engines have handoffs"
            return self._handoff_manager.open_decode_handoff(
                *kv_location(request),
                on_arrival=lambda done: self._on_kv_arrived(core, stream, done),
                on_end=lambda error: self._on_handoff_end(stream, error),
            )
        if not job.is_handed_over or request.bootstrap_info is None:
            return None
        assert self._handoff_manager is not None, "prefill engines have handoffs"
        return self._handoff_manager.attach_leg(
            request.bootstrap_info.bootstrap_room,
            len(request.token_ids),
            lambda error: self._on_handoff_end(stream, error),
        )

    def _plan(self, core: _Core) -> Step | None:
        step = core.scheduler.plan()
        for sequence in core.scheduler.take_allocated():
            handoff, transfer = self._streams[sequence].handoff, sequence.transfer
            assert self._handoff_manager is not None, "decode engines have handoffs"
            assert isinstance(handoff, DecodeHandoff), "remote sequences have a room"
            assert transfer is not None, "allocated blocks are pinned"
            sequence.transfer = None
            self._handoff_manager.start_pull(handoff, transfer, sequence.prompt_tokens)
        return step

    def _on_kv_arrived(self, core: _Core, stream: Stream, done: Done) -> None:
        core.scheduler.on_kv_arrived(stream.sequence, done.token, done.cached_tokens)
        self._publish(core.blocks)
        self._wakeup.set()
        stream.wake()

    def _start_handoff(self, core: _Core, stream: Stream, transfer: BlockTable) -> None:
        handoff_manager, sequence = self._handoff_manager, stream.sequence
        assert handoff_manager is not None, "prefill engines have handoffs"
        sequence.transfer = None
        done = Done(sequence.first_token, sequence.cached_tokens or 0)
        job = sequence.job
        stamps = page_stamps(job.prompt, core.blocks.block_size, job.lora_name)
        if isinstance(stream.handoff, PrefillHandoff):
            handoff_manager.on_prompt_computed(stream.handoff, transfer, stamps, done)
            return
        if sequence.end is not FinishReason.LENGTH:  # complete: there is no decode leg
            core.blocks.unpin(transfer)
            stream.is_awaiting_handoff = False
            return
        try:
            stream.handoff = handoff_manager.lease(transfer, stamps, sequence.prompt_tokens, done)
        except MeshError as error:
            core.blocks.unpin(transfer)
            stream.error = error
            return
        stream.is_awaiting_handoff = False
        host, port = handoff_manager.endpoint
        transfer_id = f"{stream.handoff.room:016x}"
        stream.params = {"host": host, "port": port, "transfer_id": transfer_id}

    def _on_handoff_end(self, stream: Stream, error: MeshError | None) -> None:
        if error is not None:
            self._fail(stream, error)
            return
        assert self._handoff_manager is not None, "prefill engines have handoffs"
        assert stream.handoff is not None, "the room was the leg's"
        host, port = self._handoff_manager.endpoint
        stream.params = {
            "bootstrap_host": host,
            "bootstrap_port": port,
            "bootstrap_room": stream.handoff.room,
        }
        stream.is_awaiting_handoff = False
        stream.wake()

    def _stop_stream(self, stream: Stream) -> None:
        if self._core is not None:
            self._core.scheduler.remove(stream.sequence)
        self._abort_handoff(stream)
        stream.wake()

    def _abort_handoff(self, stream: Stream) -> None:
        handoff, stream.handoff = stream.handoff, None
        if self._handoff_manager is None:
            return
        if handoff is not None:
            self._handoff_manager.abort(handoff)
        self._wakeup.set()  # its place may have blocked the queue

    def _close_stream(self, stream: Stream, outcome: str) -> None:
        assert self._core is not None, "nothing is opened before the start"
        sequence = stream.sequence
        self._core.scheduler.remove(sequence)
        if outcome == "finished":
            stream.handoff = None  # a lease outlives its leg
        self._abort_handoff(stream)
        del self._streams[sequence]
        self._counters[outcome] += 1
        self._counters["tokens"] += stream.delivered
        if not sequence.job.is_remote:
            self._counters["cached_tokens"] += sequence.cached_tokens or 0

    def _fail(self, stream: Stream, error: MeshError) -> None:
        stream.error = stream.error or error
        self._stop_stream(stream)

    def _fail_all(self, error: MeshError) -> None:
        for stream in self._streams.values():
            self._fail(stream, error)

    async def _run(self, core: _Core) -> None:
        try:
            await self._run_steps(core)
        except Exception:
            log.exception("sim_engine_failed")
            self.inject_failure(
                InternalError("the engine failed; the worker's log has the traceback")
            )

    async def _run_steps(self, core: _Core) -> None:
        clock = self._clock
        due_at = clock()
        step: Step | None = None
        while True:
            if step is None:
                step = self._plan(core)
                due_at += step.duration_s if step else 0.0
            if step is None or self._is_frozen:
                self._publish(core.blocks)  # changes that were made without a step
                self._wakeup.clear()
                await self._wakeup.wait()
                due_at = max(due_at, clock())
                continue
            await self._sleep(max(0.0, due_at - clock()))
            if not self._is_frozen:
                step, due_at = self._run_due_steps(core, step, due_at, clock() + _EARLY_TOLERANCE_S)
                # Tokens leave before more is computed: an accelerator would not delay them.
                for _ in range(_TURNS_TO_SEND):
                    await asyncio.sleep(0)
                self._publish(core.blocks)

    def _run_due_steps(
        self, core: _Core, step: Step, due_at: float, until: float
    ) -> tuple[Step | None, float]:
        """Completes steps due by `until`, within bounds and up to a first token. Returns the step
        in flight and its end."""
        advanced: dict[SimSequence, None] = {}  # an ordered set, for reproducible runs
        work = 0
        now: Step | None = step
        has_first_token = False
        while now is not None and due_at <= until and not has_first_token and work < _TICK_WORK_MAX:
            changed = core.scheduler.complete(now)
            advanced.update(dict.fromkeys(changed))
            if len(changed) <= _FIRST_TOKENS_MAX:
                has_first_token = any(len(sequence.output) == 1 for sequence in changed)
            self._steps += 1
            self._prefill_tokens += now.prefill_tokens
            work += (
                _STEP_WORK_UNITS
                + len(now.entries)
                + now.prefill_tokens // _PREFILL_TOKENS_PER_WORK_UNIT
            )
            now = self._plan(core)
            due_at += now.duration_s if now else 0.0
        for sequence in advanced:
            stream = self._streams[sequence]
            if sequence.end is FinishReason.ERROR:
                self._fail(stream, constraint_failed())
            if sequence.transfer is not None:
                self._start_handoff(core, stream, sequence.transfer)
            stream.wake()
        return now, due_at

    def _publish(self, blocks: BlockManager) -> None:
        events = blocks.take_events()
        if events and self.kv_event_sink is not None:
            self.kv_event_sink(events)


def _copy_error(error: MeshError) -> MeshError:
    """Returns a copy of the error: an instance keeps the traceback of its last raise."""
    return type(error).restore(
        error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
        reason=error.reason,
        metadata=error.metadata,
        retryable=error.retryable,
    )


@dataclass(frozen=True, slots=True)
class _Core:
    """The parts that exist once the model is read."""

    scheduler: SimScheduler
    blocks: BlockManager
    jobs: JobBuilder

    @staticmethod
    def build(config: SimConfig, model: SimModel) -> _Core:
        blocks = BlockManager(config.total_kv_blocks, config.block_size)
        oracle = TokenOracle(model.word_ids, model.eos_ids[0], eos_one_in=config.eos_one_in)
        scheduler = SimScheduler(
            blocks,
            config.timing,
            oracle,
            LogitModel(oracle, model.vocab_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        return _Core(scheduler, blocks, JobBuilder.create(config, model))
