"""The simulated engine: no accelerator, but a real scheduler, prefix cache and KV events.

The scheduler (`core/sim_scheduler.py`) works in engine time, which one task here keeps abreast of
the clock: it completes the steps that are due, then wakes each stream once with all its new
tokens. An idle engine wakes nobody.

What it makes of a request:
- The answer is the truth of `core/truth.py`. The model's distribution is a point mass, so
  temperature, top_p, top_k, min_p, seed, and every finite change of logits (penalties, logit_bias)
  are honoured by changing nothing, and every log probability is 0, with no alternatives.
- Stop strings and max_thinking_tokens hold at the frontend, which has the text; this model does
  not reason. Hidden stop tokens and EOS end the answer and are left out of it and of the counts.
- Adapters named in the configuration have a cache, block names and a truth of their own.
- `routing.priority`, else the context's: the larger goes first.
- What cannot be honoured is refused by name: guided decoding, n, best_of, beam search, embeddings,
  media, prompt log probabilities, engine arguments, handoffs that are not this role's.
- A probe gets one token, ahead of the queue, and neither reads nor fills the prefix cache.

Prefill and decode (`core/handoff.py` has the protocol, `sim_handoff.py` the network). A prefill leg
answers with one token, in its terminal chunk: with `bootstrap_info` when the KV is at decode,
without it (handoffs of mode "completed", max_tokens 1) when it is computed; the KV then waits for
decode, unless that token was the last one: then `disaggregated_params` are absent. A decode leg has
`bootstrap_info`, or the `prefill_result` of a completed prefill, and answers with all tokens.
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

# Work before the loop gets its turn, in tokens of about a microsecond each.
_TICK_WORK_MAX: Final = 2048
# A step by itself costs about as much as two tokens; sixteen prompt tokens as much as one.
_STEP_WORK_UNITS: Final = 2
_PREFILL_TOKENS_PER_WORK_UNIT: Final = 16
# Steps due within this time are done now: event loops wake up to a millisecond late.
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
# What a probe may carry and does without; a decode leg has one of them.
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
    """What the simulation needs of a model folder; eos_ids[0] is the one the model says."""

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
            f"{path} does not exist; for the sim engine a folder (--model-path) needs it, as "
            "python -m worker_svc.engines.sim.make_model writes it",
            field="model_path",
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", "model_path") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must hold an object", "model_path")
    return value


@dataclass(frozen=True, slots=True)
class SimConfig:
    """How to simulate. Sizes are in tokens, blocks or sequences, as the names say.

    context_length: None takes the model's. max_waiting: how many requests may queue; more are
    refused. eos_one_in: see `core/truth.py`. loras: adapters that requests may name. mesh_key:
    keys the names of blocks. startup_s: how long `start` takes. handoff: role, and how KV moves.
    Raises ValueError where a value is out of its range, and as the parts do at `start`.
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
            raise ValueError("context_length: must be at least 2, for a prompt and an answer")
        if self.startup_s < 0:
            raise ValueError("startup_s: must not be negative")


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class SimEngine:
    """An `LLMEngine` that computes nothing.

    model: None reads the configured folder at `start`. clock, sleep: in seconds; the defaults are
    the running loop's, so a loop with virtual time runs the engine in it. network: how KV gets to
    other engines; None: real sockets.
    `kv_event_sink` is given what changed in the cache after each tick; None drops it. `publish_to`
    sets it.

    Counters: accepted == finished + cancelled + closed + failed, at rest; `rejected` were never
    accepted, `overloaded` are those of them that met a full queue. `tokens` were delivered,
    `prompt_tokens` accepted and `cached_tokens` of those that ended were found in the cache.
    `corrupt_pages` and `corrupt_tokens` count what must never happen: pages with other content than
    their owner's, and first tokens that do not follow the prompt. With a role, those of
    `HandoffManager`.
    """

    # Decode's end of a handoff; its own guard against pages that are written too late.
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
        # Pages are routing blocks, and each is named once until it is removed.
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
        # Why nothing is generated (any more).
        self._unavailable_error: MeshError | None = Unavailable("the engine has not started")

    async def start(self, worker_id: int) -> EngineConfig:
        """Reads the model folder and starts stepping.

        Raises Conflict when called twice, NotFound or InvalidRequest for the model folder, and
        InvalidRequest when it cannot listen for decode workers.
        """
        if self._core is not None or self._loop_task is not None:
            raise Conflict("the engine was started before")
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
        """What is advertised; a completed prefill says where it is when it is completed."""
        config = self.config.handoff
        if self._handoff_manager is None or (config.role, config.mode) != ("prefill", "bootstrap"):
            return None, None
        return self._handoff_manager.endpoint

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """As `LLMEngine.generate`. All refusals are raised by the first step of the generator.

        Raises InvalidRequest, Unsupported, PromptTooLong, Overloaded, Unavailable, and WorkerLost
        or Bug where the engine ends under way.
        """
        stream = self._open_stream(request, ctx)
        outcome = "closed"
        # Seen while the stream waits for tokens, and also while nobody asks it for the next chunk.
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
        """Nothing to do: the stop itself frees the slot, and what nobody writes to, at once."""

    async def drain(self) -> None:
        """Waits until no KV is handed over and no completed prefill waits for its decode leg.

        Not longer than each of them may last.
        """
        if self._handoff_manager is None:
            return
        config = self.config.handoff
        try:
            async with asyncio.timeout(config.timeout_s + config.lease_s):
                await self._handoff_manager.wait_idle()
        except TimeoutError:
            log.warning("sim_engine_drain_cut", rooms_open=self._handoff_manager.open_rooms)

    async def cleanup(self) -> None:
        """Ends the steps; streams still open raise WorkerLost."""
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._fail_all(WorkerLost("the engine was shut down", retryable=True))
        self._unavailable_error = Unavailable("the engine was shut down")
        if self._handoff_manager is not None:
            await self._handoff_manager.close()

    def publish_to(self, sink: KvEventSink) -> None:
        """From now on the sink is told. Raises Conflict when there is something in the cache.

        That is because tokens are not kept, so that what was not told at once cannot be.
        """
        if self.blocks.cached_blocks:
            raise Conflict("the cache is not empty: publish before the first request")
        self.kv_event_sink = lambda events: sink.take(
            to_external_events(events, self.config.block_size)
        )

    def loads(self) -> Sequence[Load]:
        """The load of the only rank."""
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
        """The counters of the class's docstring, `steps` and `preempted`."""
        core = self._core
        counts = {name: self._counters[name] for name in _COUNTERS}
        counts["steps"] = self._steps
        counts["preempted"] = core.scheduler.preemptions if core else 0
        counts["corrupt_pages"] = core.blocks.corrupt_pages if core else 0
        counts["corrupt_tokens"] = core.scheduler.corrupt_tokens if core else 0
        return {**counts, **(self._handoff_manager.counters if self._handoff_manager else {})}

    @property
    def blocks(self) -> BlockManager:
        """The KV cache, for publishers and checkers. Raises Conflict before `start`."""
        if self._core is None:
            raise Conflict("the engine has not started")
        return self._core.blocks

    def flush_cache(self) -> int:
        """Evicts everything nobody uses; how many blocks that were."""
        evicted = self.blocks.flush()
        self._publish(self.blocks)
        return evicted

    def freeze(self) -> None:
        """Fault for tests: steps stop, and everything else goes on. A hung accelerator."""
        self._is_frozen = True

    def unfreeze(self) -> None:
        """Ends `freeze`; the time that passed is lost, not caught up."""
        self._is_frozen = False
        self._wakeup.set()

    def inject_failure(self, error: MeshError) -> None:
        """Fault for tests: all requests, and those to come, fail with `error`."""
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
            raise Overloaded(min(max(wait_s, low), high), "too many requests wait at this worker")
        return core, job

    def _job_for_role(self, request: PreprocessedRequest, job: Job) -> Job:
        """The job as this role does it. Raises Unavailable where it does not."""
        config = self.config.handoff
        match config.role:
            case "aggregated":
                return job
            case "prefill":
                is_completed = config.mode == "completed"
                if request.bootstrap_info is None and not (is_completed and job.max_tokens == 1):
                    raise Unavailable(
                        "this worker computes prompts for others only", reason="PREFILL_ONLY"
                    )
                return replace(job, max_tokens=1, is_handed_over=True)
            case _ if request.bootstrap_info or request.prefill_result:
                return replace(job, is_remote=True)
        if not config.local_prefill:
            raise Unavailable(
                "this worker gets its prompts computed by others", reason="NO_LOCAL_PREFILL"
            )
        return job

    def _open_handoff(
        self, request: PreprocessedRequest, job: Job
    ) -> PrefillHandoff | DecodeHandoff | None:
        """The leg's room. Raises as `HandoffManager` does; a prompt to be leased has none yet."""
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
            assert transfer is not None, "placed blocks are pinned"
            sequence.transfer = None
            self._handoff_manager.start_pull(handoff, transfer, sequence.prompt_tokens)
        return step

    def _on_kv_arrived(self, core: _Core, stream: _Stream, done: Done) -> None:
        """A decode leg's KV is there."""
        core.scheduler.on_kv_arrived(stream.sequence, done.token, done.cached_tokens)
        self._publish(core.blocks)
        self._wakeup.set()
        stream.wake()

    def _start_handoff(self, core: _Core, stream: _Stream, transfer: BlockTable) -> None:
        """A prefill leg's prompt is computed."""
        handoff_manager, sequence = self._handoff_manager, stream.sequence
        assert handoff_manager is not None, "prefill engines have handoffs"
        sequence.transfer = None
        done = Done(sequence.first_token, sequence.cached_tokens or 0)
        job = sequence.job
        stamps = page_stamps(job.prompt, core.blocks.block_size, job.lora_name)
        if isinstance(stream.handoff, PrefillHandoff):
            handoff_manager.on_prompt_computed(stream.handoff, transfer, stamps, done)
            return
        if sequence.end is not EndReason.LENGTH:  # it is all said: nobody is going to decode
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
            self._wakeup.set()  # its place in the queue may have been what others wait for

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
            log.exception("sim_engine_broke")
            self.inject_failure(InternalError("the engine broke; the worker's log says how"))

    async def _run_steps(self, core: _Core) -> None:
        clock = self._clock
        due_at = clock()
        step: Step | None = None
        while True:
            if step is None:
                step = self._plan(core, due_at)
                due_at += step.duration_s if step else 0.0
            if step is None or self._is_frozen:
                self._publish(core.blocks)  # what left, and what made room, without a step
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
        """Completes steps due by `until`, within bounds; the step then in flight and its end."""
        advanced: dict[SimSequence, None] = {}  # a set's order would differ from run to run
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
    """The sim's events as the canonicaliser takes them: a block's external hash is its name."""
    for event in events:
        match event:
            case BlocksStored():
                yield PagesStored(
                    event.names, event.parent, event.token_ids, block_size, lora=event.lora_name
                )
            case BlocksRemoved():
                yield PagesRemoved(event.names)


def _copy_error(error: MeshError) -> MeshError:
    """The same error for one more request: an instance keeps the traceback of its last raise."""
    return type(error).restore(
        error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
        reason=error.reason,
        metadata=error.metadata,
        retryable=error.retryable,
    )


def _kv_location(request: PreprocessedRequest) -> tuple[tuple[str, int], int]:
    """Where a decode leg's KV is: address and room. Raises InvalidRequest."""
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
        raise InvalidRequest("the params name no host", field_path)
    if type(port) is not int or not 0 < port < 65536:
        raise InvalidRequest(f"the params name no port but {port!r}", field_path)
    if type(room) is not int or not 0 <= room < 2**64:
        raise InvalidRequest(f"the params name no room and no transfer but {room!r}", field_path)
    return (host, port), room


class _Stream:
    """One request between the steps and its generator.

    is_held: a prefill leg, whose answer waits until decode, or the lease, has its KV. params: what
    it then hands to decode.
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
        """A chunk with all new tokens."""
        tokens = tuple(self.sequence.output[self.delivered :])
        self.delivered += len(tokens)
        if self._logprobs is None:
            return LLMEngineOutput(token_ids=tokens)
        return LLMEngineOutput(token_ids=tokens, logprobs=[self._logprob(one) for one in tokens])

    def take_terminal(self) -> LLMEngineOutput:
        """The terminal chunk, with the tokens not yet taken."""
        end = self.sequence.end
        assert end is not None, "only an ended sequence has a last chunk"
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
    """What exists once the model is read. hashers: by adapter, "" for the base model."""

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
        """What to generate for the request. Raises what it is refused with."""
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
        """The adapter's name; raises Unsupported or InvalidRequest."""
        supported = _SUPPORTED_FIELDS
        if request.is_probe or config.handoff.role == "decode":
            supported |= _HANDOFF_FIELDS
        elif config.handoff.role == "prefill" and config.handoff.mode == "bootstrap":
            supported |= {"bootstrap_info"}
        unsupported = unsupported_fields(request, supported)
        if unsupported:
            others = f" (nor are {', '.join(unsupported[1:])})" if unsupported[1:] else ""
            raise Unsupported(unsupported[0], f"the simulated engine has no such thing{others}")
        routing = request.routing
        if routing is None:
            return ""
        if routing.dp_rank:
            raise InvalidRequest("this worker has rank 0 only", "routing.dp_rank")
        lora = routing.lora_name or ""
        if lora not in self.hashers:
            raise Unsupported("routing.lora_name", f"the adapter {lora!r} is not loaded here")
        return lora

    def _max_output_tokens(self, request: PreprocessedRequest) -> int:
        """How many tokens an answer can have."""
        prompt = len(request.token_ids)
        if prompt == 0:
            raise InvalidRequest("token_ids must not be empty", "token_ids")
        max_length = min(self.context_length, self.blocks.total_blocks * self.blocks.block_size)
        if prompt >= max_length:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens; with at least one more for the answer, "
                f"{max_length} is the most this model holds",
                field="token_ids",
            )
        return max_length - prompt

    def _stops(self, request: PreprocessedRequest) -> dict[int, StopToken]:
        """The frontend merges EOS into the hidden ids: EOS wins there, and visible over both."""
        stop = request.stop_conditions
        stops = dict.fromkeys(stop.stop_token_ids_hidden, StopToken(EndReason.STOP))
        stops |= dict.fromkeys((*self.eos_ids, *request.eos_token_ids), StopToken(EndReason.EOS))
        stops |= dict.fromkeys(
            stop.stop_token_ids_visible, StopToken(EndReason.STOP, is_visible=True)
        )
        return stops
