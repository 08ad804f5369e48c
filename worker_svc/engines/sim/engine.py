"""The simulated engine: no accelerator, but a real scheduler, prefix cache and KV events.

The scheduler works in engine time. One task here keeps engine time in step with the clock: it
completes the steps that are due, then wakes each stream once with all its new tokens. An idle
engine wakes no task.

Semantics of requests:
- The output is that of `token_oracle.py`. The model's distribution is a point mass, so temperature,
  top_p, top_k, min_p, seed and every finite change of logits (penalties, logit_bias) are accepted
  without effect, and every log probability is 0, with no alternatives.
- The frontend applies stop strings and max_thinking_tokens; this model does not reason. A hidden
  stop token or EOS ends the output and is excluded from it and from the counts.
- Each configured adapter has its own cache, block names and output.
- `routing.priority`, else the context's: the larger goes first.
- Unsupported fields are rejected by name: guided decoding, n, best_of, beam search, embeddings,
  media, prompt log probabilities, engine arguments, handoffs of another role.
- A probe gets one token, ahead of the queue, and neither reads nor fills the prefix cache.

Prefill and decode (`transfer.py` has the protocol, `transfer_server.py` the network). A prefill leg
responds with one token, in its terminal chunk. With `bootstrap_info` it ends when decode has the
KV. Without it (handoff mode "completed", max_tokens 1) it ends when the prompt is computed, and the
KV is leased to decode, unless that token ended the output: then `disaggregated_params` are absent.
A decode leg has `bootstrap_info`, or the `prefill_result` of a completed prefill, and responds with
all tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog

from common.errors import (
    Conflict,
    InternalError,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    PromptTooLong,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.kv.hashing import PrefixHasher
from common.kv.load import Load
from common.request.preprocessed import (
    JsonValue,
    PromptTokensDetails,
    TopLogprob,
    unsupported_fields,
)
from worker_svc.engines.contract import (
    CompletionUsage,
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    TokenLogprob,
    chunk,
    usage,
)
from worker_svc.engines.sim.block_manager import (
    BlockManager,
    BlocksRemoved,
    BlocksStored,
    BlockTable,
    KvEvent,
)
from worker_svc.engines.sim.scheduler import (
    EndReason,
    Job,
    SimScheduler,
    SimSequence,
    Step,
    StopToken,
)
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import DEFAULT_EOS_ONE_IN, TokenOracle
from worker_svc.engines.sim.transfer import DecodeMachine, Done, page_stamps
from worker_svc.engines.sim.transfer_server import (
    DecodeHandoff,
    HandoffManager,
    Network,
    PrefillHandoff,
    SimHandoffConfig,
    TcpNetwork,
)
from worker_svc.kv_events.normalizer import (
    DuplicatePolicy,
    ExternalEvent,
    KvEventFormat,
    KvEventSink,
    PagesRemoved,
    PagesStored,
)

SIM_MODEL_DIR: Final = Path(__file__).parent / "model"

# Work per loop turn, in tokens of about a microsecond each.
_TICK_WORK_MAX: Final = 2048
# A step costs about as much as two tokens; sixteen prompt tokens as much as one.
_STEP_WORK_UNITS: Final = 2
_PREFILL_TOKENS_PER_WORK_UNIT: Final = 16
# Steps due within this time are completed now: event loops wake up to a millisecond late.
_EARLY_TOLERANCE_S: Final = 1e-4
_PROBE_PRIORITY: Final = 2**31
_RETRY_AFTER_S: Final = (0.05, 30.0)

_SUPPORTED_FIELDS: Final = frozenset(
    {
        "stop_conditions",
        "output_options.logprobs",
        "output_options.skip_special_tokens",
        "output_options.formatted_prompt",
        "output_options.include_stop_str_in_output",
        "output_options.return_tokens_as_token_ids",
        "sampling_options.presence_penalty",
        "sampling_options.frequency_penalty",
        "sampling_options.repetition_penalty",
        "sampling_options.temperature",
        "sampling_options.top_p",
        "sampling_options.top_k",
        "sampling_options.min_p",
        "sampling_options.seed",
        "sampling_options.logit_bias",
        "routing.lora_name",
    }
)
# Fields that a probe may carry without effect; a decode leg has one of them.
_HANDOFF_FIELDS: Final = frozenset({"bootstrap_info", "prefill_result"})

_COUNTERS: Final = (
    *("accepted", "finished", "cancelled", "closed", "failed", "rejected", "overloaded"),
    *("tokens", "prompt_tokens", "cached_tokens"),
)
_FINISH_REASONS: Final = {
    EndReason.EOS: FinishReason.EOS,
    EndReason.STOP: FinishReason.STOP,
    EndReason.LENGTH: FinishReason.LENGTH,
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SimModel:
    """The part of a model folder that the simulation uses; eos_ids[0] is the id the model emits."""

    word_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    context_length: int


def load_sim_model(folder: Path) -> SimModel:
    """Reads `sim.json` and `generation_config.json`. Raises NotFound or InvalidRequest."""
    sim = _read_object(folder / "sim.json")
    eos: Any = _read_object(folder / "generation_config.json").get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [eos]
    words: Any = sim.get("word_ids")
    context_length: Any = sim.get("context_length")
    for name, ids in (("word_ids", words), ("eos_token_id", eos_ids)):
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise InvalidRequest(f"{folder}: {name} must be a list of token ids", "model_path")
    if type(context_length) is not int or context_length < 2:
        raise InvalidRequest(f"{folder}: context_length must be an integer above 1", "model_path")
    return SimModel(tuple(words), tuple(eos_ids), context_length)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(
            f"{path} does not exist; the sim engine needs it in --model-path; create it with "
            "python -m worker_svc.engines.sim.make_model",
            field="model_path",
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", "model_path") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must contain a JSON object", "model_path")
    return value


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Settings of the simulated engine. Sizes are in tokens, blocks or sequences, as named.

    context_length: None uses the model's. max_waiting: limit of queued requests. eos_one_in: see
    `token_oracle.py`. loras: adapters that requests may name. mesh_key: key of the block names.
    startup_s: duration of `start`. handoff: role, and how KV moves.
    Raises ValueError for a value out of range.
    """

    model: str = "kvmesh-sim"
    served_model_name: str | None = None
    model_dir: Path = SIM_MODEL_DIR
    context_length: int | None = None
    block_size: int = 16
    total_kv_blocks: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_waiting: int = 1024
    prefix_caching: bool = True
    eos_one_in: int = DEFAULT_EOS_ONE_IN
    timing: Timing = field(default=Timing())
    loras: frozenset[str] = frozenset()
    mesh_key: bytes = b""
    startup_s: float = 0.0
    handoff: SimHandoffConfig = field(default=SimHandoffConfig())

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError("max_num_seqs: must be in 1..max_num_batched_tokens")
        if self.block_size < 1 or self.total_kv_blocks < 1:
            raise ValueError("block_size, total_kv_blocks: must be at least 1")
        if self.max_waiting < 1:
            raise ValueError("max_waiting: must be at least 1")
        if self.context_length is not None and self.context_length < 2:
            raise ValueError("context_length: must be at least 2, for prompt and output")
        if self.startup_s < 0:
            raise ValueError("startup_s: must not be negative")


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class SimEngine:
    """An `LLMEngine` that computes nothing.

    model: None reads the configured folder at `start`. clock, sleep: in seconds; the defaults are
    the running loop's, so a loop with virtual time runs the engine in virtual time. network:
    connects to other engines; None uses TCP. decode_machine: state machine of decode's end of a
    handoff.

    Counters at rest: accepted == finished + cancelled + closed + failed; `rejected` requests are
    not accepted, `overloaded` are those rejected by a full queue. `tokens` counts delivered tokens,
    `prompt_tokens` those of accepted requests, `cached_tokens` cache hits of ended requests.
    `corrupt_pages` and `corrupt_tokens` count what must never happen: pages whose content is not
    their owner's, and first tokens that do not follow the prompt. With a role, also the counters of
    `HandoffManager`.
    """

    # State machine of decode's end of a handoff; it protects pages from late writes.
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
        self.kv_event_sink: Callable[[Sequence[KvEvent]], None] | None = None
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._network = network
        self._handoff_manager: HandoffManager | None = None
        self._counters: Counter[str] = Counter()
        self._core: _Core | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._streams: dict[SimSequence, _Stream] = {}
        self._steps = 0
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
        host, port = self._bootstrap_endpoint()
        group = config.transfer_group or f"sim/{self.config.model}/{self.config.block_size}"
        return EngineConfig(
            model=self.config.model,
            served_model_name=self.config.served_model_name,
            context_length=core.context_length,
            kv_cache_block_size=self.config.block_size,
            total_kv_blocks=self.config.total_kv_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            kv_index="events" if self.config.prefix_caching else "none",
            kv_index_reason="" if self.config.prefix_caching else "prefix caching is off",
            bootstrap_host=host,
            bootstrap_port=port,
            transfer_group="" if config.role == "aggregated" else group,
            local_prefill={"aggregated": True, "prefill": False}.get(
                config.role, config.local_prefill
            ),
            loras=self.config.loras,
        )

    async def _start_handoff_manager(self, core: _Core, worker_id: int) -> HandoffManager:
        handoff_manager = HandoffManager(
            self.config.handoff,
            core.blocks,
            incarnation=worker_id,
            speedup=self.config.timing.speedup,
            network=self._network or TcpNetwork(),
            clock=self._clock,
            sleep=self._sleep,
            on_released=self._wakeup.set,
            decode_machine=self.decode_machine,
        )
        if self.config.handoff.role == "prefill":
            await handoff_manager.listen()
        return handoff_manager

    def _bootstrap_endpoint(self) -> tuple[str, int] | tuple[None, None]:
        """Returns the advertised address; in mode "completed" it is part of the prefill result
        instead.
        """
        config = self.config.handoff
        if self._handoff_manager is None or (config.role, config.mode) != ("prefill", "bootstrap"):
            return None, None
        return self._handoff_manager.endpoint

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the output of one request; rejections are raised at the first step.

        Raises InvalidRequest, Unsupported, PromptTooLong, Overloaded, Unavailable, and WorkerLost
        or InternalError if the engine fails meanwhile.
        """
        stream = self._open_stream(request, ctx)
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
        """Does nothing: the stop frees the slot at once, and the blocks once no transfer can write
        to them.
        """

    async def drain(self) -> None:
        """Waits until no handoff is in progress and no lease is open, at most their longest
        duration.
        """
        if self._handoff_manager is None:
            return
        config = self.config.handoff
        try:
            async with asyncio.timeout(config.timeout_s + config.lease_s):
                await self._handoff_manager.wait_idle()
        except TimeoutError:
            log.warning("sim_engine_drain_timed_out", rooms_open=self._handoff_manager.open_rooms)

    async def cleanup(self) -> None:
        """Stops stepping; open streams raise WorkerLost."""
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._fail_all(WorkerLost("the engine was shut down", retryable=True))
        self._unavailable_error = Unavailable("the engine was shut down")
        if self._handoff_manager is not None:
            await self._handoff_manager.close()

    def publish_to(self, sink: KvEventSink) -> None:
        """Reports all changes of the cache to the sink. Raises Conflict if the cache is not empty.

        Tokens of cached blocks are not kept, so their content can not be reported later.
        """
        if self.blocks.cached_blocks:
            raise Conflict("the cache is not empty; call publish_to before the first request")
        self.kv_event_sink = lambda events: sink.take(
            to_external_events(events, self.config.block_size)
        )

    def loads(self) -> Sequence[Load]:
        """Returns the load of the only rank."""
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
            ),
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """Returns the counters of the class docstring, `steps` and `preempted`."""
        core = self._core
        counts = {name: self._counters[name] for name in _COUNTERS}
        counts["steps"] = self._steps
        counts["preempted"] = core.scheduler.preemptions if core else 0
        counts["corrupt_pages"] = core.blocks.corrupt_pages if core else 0
        counts["corrupt_tokens"] = core.scheduler.corrupt_tokens if core else 0
        return {**counts, **(self._handoff_manager.counters if self._handoff_manager else {})}

    @property
    def blocks(self) -> BlockManager:
        """Returns the KV cache, for tests and checkers. Raises Conflict before `start`."""
        if self._core is None:
            raise Conflict("the engine has not started")
        return self._core.blocks

    def flush_cache(self) -> int:
        """Evicts all unreferenced blocks. Returns how many."""
        evicted = self.blocks.flush()
        self._publish(self.blocks)
        return evicted

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

    def _open_stream(self, request: PreprocessedRequest, ctx: GenerateContext) -> _Stream:
        try:
            core, job = self._check_request(request, ctx)
            handoff = self._open_handoff(request, job)
        except MeshError as error:
            self._counters["rejected"] += 1
            self._counters["overloaded"] += isinstance(error, Overloaded)
            raise
        sequence = core.scheduler.submit(job, self._clock())
        stream = _Stream(sequence, request.output_options.logprobs, handoff)
        if handoff is not None:
            handoff.on_end = lambda error: self._on_handoff_end(stream, error)
        if isinstance(handoff, DecodeHandoff):
            handoff.on_arrival = lambda done: self._on_kv_arrived(core, stream, done)
        self._streams[sequence] = stream
        self._counters["accepted"] += 1
        self._counters["prompt_tokens"] += sequence.prompt_tokens
        self._wakeup.set()
        return stream

    def _check_request(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> tuple[_Core, Job]:
        core = self._core
        if self._unavailable_error is not None or core is None:
            raise _copy_error(self._unavailable_error or Unavailable("the engine has not started"))
        job = core.job(request, self.config, ctx.priority)
        if not request.is_probe:
            job = self._job_for_role(request, job)
        scheduler = core.scheduler
        if scheduler.waiting >= self.config.max_waiting:
            low, high = _RETRY_AFTER_S
            wait_s = self.config.timing.prefill_s(scheduler.waiting_tokens)
            raise Overloaded(
                min(max(wait_s, low), high),
                f"queue full: {scheduler.waiting}/{self.config.max_waiting} requests",
            )
        return core, job

    def _job_for_role(self, request: PreprocessedRequest, job: Job) -> Job:
        """Returns the job as this role runs it. Raises Unavailable if the role does not run it."""
        config = self.config.handoff
        match config.role:
            case "aggregated":
                return job
            case "prefill":
                is_completed = config.mode == "completed"
                if request.bootstrap_info is None and not (is_completed and job.max_tokens == 1):
                    raise Unavailable(
                        "a prefill worker accepts requests with bootstrap_info only",
                        reason="PREFILL_ONLY",
                    )
                return replace(job, max_tokens=1, is_handed_over=True)
            case _ if request.bootstrap_info or request.prefill_result:
                return replace(job, is_remote=True)
        if not config.local_prefill:
            raise Unavailable(
                "this decode worker computes no prompts; it needs a prefill result",
                reason="NO_LOCAL_PREFILL",
            )
        return job

    def _open_handoff(
        self, request: PreprocessedRequest, job: Job
    ) -> PrefillHandoff | DecodeHandoff | None:
        """Returns the leg's room, None if it needs none yet. Raises as `HandoffManager`."""
        if job.is_remote:
            assert self._handoff_manager is not None, "decode engines have handoffs"
            return self._handoff_manager.open_decode_handoff(*_kv_location(request))
        if not job.is_handed_over or request.bootstrap_info is None:
            return None
        assert self._handoff_manager is not None, "prefill engines have handoffs"
        room = request.bootstrap_info.bootstrap_room
        return self._handoff_manager.attach_leg(room, len(request.token_ids))

    def _plan(self, core: _Core, due_at: float) -> Step | None:
        step = core.scheduler.plan(due_at)
        for sequence in core.scheduler.take_allocated():
            handoff, transfer = self._streams[sequence].handoff, sequence.transfer
            assert self._handoff_manager is not None, "decode engines have handoffs"
            assert isinstance(handoff, DecodeHandoff), "remote sequences have a room"
            assert transfer is not None, "allocated blocks are pinned"
            sequence.transfer = None
            self._handoff_manager.start_pull(handoff, transfer, sequence.prompt_tokens)
        return step

    def _on_kv_arrived(self, core: _Core, stream: _Stream, done: Done) -> None:
        """Continues a decode leg after its KV arrived."""
        core.scheduler.on_kv_arrived(stream.sequence, done.token, done.cached_tokens)
        self._publish(core.blocks)
        self._wakeup.set()
        stream.wake()

    def _start_handoff(self, core: _Core, stream: _Stream, transfer: BlockTable) -> None:
        """Hands over the KV of a computed prompt."""
        handoff_manager, sequence = self._handoff_manager, stream.sequence
        assert handoff_manager is not None, "prefill engines have handoffs"
        sequence.transfer = None
        done = Done(sequence.first_token, sequence.cached_tokens or 0)
        job = sequence.job
        stamps = page_stamps(job.prompt, core.blocks.block_size, job.lora_name)
        if isinstance(stream.handoff, PrefillHandoff):
            handoff_manager.on_prompt_computed(stream.handoff, transfer, stamps, done)
            return
        if sequence.end is not EndReason.LENGTH:  # the output is complete: there is no decode leg
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

    def _on_handoff_end(self, stream: _Stream, error: MeshError | None) -> None:
        if error is not None:
            stream.error = stream.error or error
            self._stop_stream(stream)
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

    def _stop_stream(self, stream: _Stream) -> None:
        if self._core is not None:
            self._core.scheduler.remove(stream.sequence)
        self._abort_handoff(stream)
        stream.wake()

    def _abort_handoff(self, stream: _Stream) -> None:
        handoff, stream.handoff = stream.handoff, None
        if handoff is not None and self._handoff_manager is not None:
            self._handoff_manager.abort(handoff)
        if self._handoff_manager is not None:
            self._wakeup.set()  # its place may have blocked the queue

    def _close_stream(self, stream: _Stream, outcome: str) -> None:
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

    def _fail_all(self, error: MeshError) -> None:
        for stream in self._streams.values():
            stream.error = stream.error or error
            self._stop_stream(stream)

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
                step = self._plan(core, due_at)
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

    def _run_due_steps(
        self, core: _Core, step: Step, due_at: float, until: float
    ) -> tuple[Step | None, float]:
        """Completes steps due by `until`, within bounds. Returns the step in flight and its end."""
        advanced: dict[SimSequence, None] = {}  # an ordered set, for reproducible runs
        work = 0
        now: Step | None = step
        while now is not None and due_at <= until and work < _TICK_WORK_MAX:
            advanced.update(dict.fromkeys(core.scheduler.complete(now)))
            self._steps += 1
            work += (
                _STEP_WORK_UNITS
                + len(now.entries)
                + now.prefill_tokens // _PREFILL_TOKENS_PER_WORK_UNIT
            )
            now = self._plan(core, due_at)
            due_at += now.duration_s if now else 0.0
        self._publish(core.blocks)
        for sequence in advanced:
            stream = self._streams[sequence]
            if sequence.transfer is not None:
                self._start_handoff(core, stream, sequence.transfer)
            stream.wake()
        return now, due_at

    def _publish(self, blocks: BlockManager) -> None:
        events = blocks.take_events()
        if events and self.kv_event_sink is not None:
            self.kv_event_sink(events)


def to_external_events(events: Sequence[KvEvent], block_size: int) -> Iterator[ExternalEvent]:
    """Yields the normalizer's events; the external hash of a block is its name."""
    for event in events:
        match event:
            case BlocksStored():
                yield PagesStored(
                    event.names, event.parent, event.token_ids, block_size, lora=event.lora_name
                )
            case BlocksRemoved():
                yield PagesRemoved(event.names)


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


def _kv_location(request: PreprocessedRequest) -> tuple[tuple[str, int], int]:
    """Returns address and room of a decode leg's KV. Raises InvalidRequest."""
    info, result = request.bootstrap_info, request.prefill_result
    if info is not None:
        return (info.bootstrap_host, info.bootstrap_port), info.bootstrap_room
    field_path = "prefill_result.disaggregated_params"
    assert result is not None, "a decode leg has one of the two"
    params = result.disaggregated_params
    if not isinstance(params, dict):
        raise InvalidRequest("disaggregated_params must be an object", field_path)
    if "bootstrap_room" in params:
        room: Any = params["bootstrap_room"]
        host, port = params.get("bootstrap_host"), params.get("bootstrap_port")
    else:
        host, port, room = params.get("host"), params.get("port"), params.get("transfer_id")
        if isinstance(room, str) and re.fullmatch("[0-9a-f]{16}", room):
            room = int(room, 16)
    if not (isinstance(host, str) and host):
        raise InvalidRequest("disaggregated_params have no host", field_path)
    if type(port) is not int or not 0 < port < 65536:
        raise InvalidRequest(f"disaggregated_params have an invalid port: {port!r}", field_path)
    if type(room) is not int or not 0 <= room < 2**64:
        raise InvalidRequest(
            f"disaggregated_params have an invalid room or transfer_id: {room!r}", field_path
        )
    return (host, port), room


class _Stream:
    """One request between the scheduler and its generator.

    is_awaiting_handoff: a prefill leg whose terminal chunk waits until decode or a lease has its
    KV. params: what the leg then hands to decode.
    """

    __slots__ = (
        *(
            "_logprobs",
            "_waiter",
            "delivered",
            "error",
            "is_awaiting_handoff",
            "params",
            "sequence",
            "handoff",
        ),
    )

    def __init__(
        self,
        sequence: SimSequence,
        logprobs: int | None,
        handoff: PrefillHandoff | DecodeHandoff | None = None,
    ) -> None:
        self.sequence = sequence
        self.handoff = handoff
        self.is_awaiting_handoff = sequence.job.is_handed_over
        self.params: dict[str, JsonValue] | None = None
        self.delivered = 0
        self.error: MeshError | None = None
        self._logprobs = logprobs
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_new_output(self) -> bool:
        return len(self.sequence.output) > self.delivered and not self.sequence.job.is_handed_over

    @property
    def is_done(self) -> bool:
        return self.sequence.end is not None and not self.is_awaiting_handoff

    async def wait_for_update(self) -> None:
        """Returns after the next `wake`."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> LLMEngineOutput:
        """Returns a chunk with all new tokens."""
        tokens = tuple(self.sequence.output[self.delivered :])
        self.delivered += len(tokens)
        if self._logprobs is None:
            return LLMEngineOutput(token_ids=tokens)
        return LLMEngineOutput(token_ids=tokens, logprobs=[self._logprob(one) for one in tokens])

    def take_terminal(self) -> LLMEngineOutput:
        """Returns the terminal chunk, with the remaining tokens."""
        end = self.sequence.end
        assert end is not None, "only an ended sequence has a terminal chunk"
        return replace(
            self.take(),
            finish_reason=_FINISH_REASONS[end],
            stop_reason=self.sequence.stop_token if end is EndReason.STOP else None,
            completion_usage=self.usage(),
            disaggregated_params=self.params,
        )

    def usage(self) -> CompletionUsage:
        details = PromptTokensDetails(cached_tokens=self.sequence.cached_tokens or 0)
        counts = usage(self.sequence.prompt_tokens, self.delivered)
        return replace(counts, prompt_tokens_details=details)

    def _logprob(self, token: int) -> TokenLogprob:
        return TokenLogprob(token, 0.0, (TopLogprob(token, 0.0),) if self._logprobs else ())


@dataclass(frozen=True, slots=True)
class _Core:
    """The parts that exist once the model is read. hashers: by adapter, "" for the base model."""

    scheduler: SimScheduler
    blocks: BlockManager
    eos_ids: tuple[int, ...]
    context_length: int
    hashers: Mapping[str, PrefixHasher]

    @staticmethod
    def build(config: SimConfig, model: SimModel) -> _Core:
        truth = TokenOracle(model.word_ids, model.eos_ids[0], eos_one_in=config.eos_one_in)
        blocks = BlockManager(config.total_kv_blocks, config.block_size)
        scheduler = SimScheduler(
            blocks,
            config.timing,
            truth,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        hashers = {
            lora: PrefixHasher(
                mesh_key=config.mesh_key,
                model=config.model,
                block_size=config.block_size,
                lora_name=lora,
            )
            for lora in ("", *config.loras)
        }
        context_length = config.context_length or model.context_length
        return _Core(scheduler, blocks, model.eos_ids, context_length, hashers)

    def job(self, request: PreprocessedRequest, config: SimConfig, priority: int | None) -> Job:
        """Returns the job for a request. Raises MeshError if it is rejected."""
        lora = self._check_fields(request, config)
        room = self._max_output_tokens(request)
        stop = request.stop_conditions
        if stop.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", "stop_conditions.max_tokens")
        if request.routing is not None and request.routing.priority is not None:
            priority = request.routing.priority
        if request.is_probe:
            return Job(request.token_ids.little_endian, 1, priority=_PROBE_PRIORITY)
        return Job(
            request.token_ids.little_endian,
            room if stop.max_tokens is None else min(stop.max_tokens, room),
            stops={} if stop.ignore_eos else self._stops(request),
            min_tokens=stop.min_tokens or 0,
            hasher=self.hashers[lora] if config.prefix_caching else None,
            lora_name=lora,
            priority=priority or 0,
        )

    def _check_fields(self, request: PreprocessedRequest, config: SimConfig) -> str:
        """Returns the adapter's name. Raises Unsupported or InvalidRequest."""
        supported = _SUPPORTED_FIELDS
        if request.is_probe or config.handoff.role == "decode":
            supported |= _HANDOFF_FIELDS
        elif config.handoff.role == "prefill" and config.handoff.mode == "bootstrap":
            supported |= {"bootstrap_info"}
        unsupported = unsupported_fields(request, supported)
        if unsupported:
            others = f" (nor are {', '.join(unsupported[1:])})" if unsupported[1:] else ""
            raise Unsupported(unsupported[0], f"not supported by the simulated engine{others}")
        routing = request.routing
        if routing is None:
            return ""
        if routing.dp_rank:
            raise InvalidRequest(
                f"unknown dp_rank {routing.dp_rank}; this worker has rank 0 only", "routing.dp_rank"
            )
        lora = routing.lora_name or ""
        if lora not in self.hashers:
            raise Unsupported("routing.lora_name", f"the adapter {lora!r} is not loaded here")
        return lora

    def _max_output_tokens(self, request: PreprocessedRequest) -> int:
        """Returns the largest possible number of output tokens. Raises InvalidRequest or
        PromptTooLong.
        """
        prompt = len(request.token_ids)
        if prompt == 0:
            raise InvalidRequest("token_ids must not be empty", "token_ids")
        max_length = min(self.context_length, self.blocks.total_blocks * self.blocks.block_size)
        if prompt >= max_length:
            raise PromptTooLong(
                f"prompt too long: {prompt}/{max_length - 1} tokens, with one left for the output",
                field="token_ids",
            )
        return max_length - prompt

    def _stops(self, request: PreprocessedRequest) -> dict[int, StopToken]:
        """Returns the stop tokens. EOS overrides hidden ids, into which frontends merge EOS;
        visible overrides both.
        """
        stop = request.stop_conditions
        stops = dict.fromkeys(stop.stop_token_ids_hidden, StopToken(EndReason.STOP))
        stops |= dict.fromkeys((*self.eos_ids, *request.eos_token_ids), StopToken(EndReason.EOS))
        stops |= dict.fromkeys(
            stop.stop_token_ids_visible, StopToken(EndReason.STOP, is_visible=True)
        )
        return stops
