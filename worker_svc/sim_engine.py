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
- Adapters named in the configuration have a cache and block names of their own, and the same truth.
- `routing.priority`, else the context's: the larger goes first.
- What cannot be honoured is refused by name: guided decoding, n, best_of, beam search, embeddings,
  media, prompt log probabilities, engine arguments, handoffs.
- A probe gets one token, ahead of the queue, and neither reads nor fills the prefix cache.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog

from common.blocks import PrefixHasher
from common.errors import (
    Bug,
    Conflict,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    PromptTooLong,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.load import Load
from common.preprocessed import PromptTokensDetails, TopLogprob, unsupported_fields
from worker_svc.core.block_manager import BlockManager, KvEvent
from worker_svc.core.sim_scheduler import End, Job, SimScheduler, SimSequence, Step, Stop
from worker_svc.core.timing import Timing
from worker_svc.core.truth import DEFAULT_EOS_ONE_IN, Truth
from worker_svc.engine import (
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

SIM_MODEL_DIR: Final = Path(__file__).parent / "sim_model"

# Work before the loop gets its turn, in tokens of about a microsecond each.
_TICK_WORK: Final = 2048
# A step by itself costs about as much as two tokens; sixteen prompt tokens as much as one.
_STEP_WORK: Final = 2
_PREFILL_TOKENS_A_WORK: Final = 16
# Steps due within this time are done now: event loops wake up to a millisecond late.
_EARLY_S: Final = 1e-4
_PROBE_PRIORITY: Final = 2**31
_RETRY_AFTER_S: Final = (0.05, 30.0)

_HONOURED: Final = frozenset(
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
# What a probe may carry and does without.
_SKIPPED_BY_PROBES: Final = frozenset({"bootstrap_info", "prefill_result"})

_COUNTERS: Final = (
    *("accepted", "finished", "cancelled", "closed", "failed", "rejected", "overloaded"),
    *("tokens", "prompt_tokens", "cached_tokens"),
)
_FINISH: Final = {
    End.EOS: FinishReason.EOS,
    End.STOP: FinishReason.STOP,
    End.LENGTH: FinishReason.LENGTH,
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
            raise InvalidRequest(f"{folder}: {name} must be a list of token ids", "model_dir")
    if type(context_length) is not int or context_length < 2:
        raise InvalidRequest(f"{folder}: context_length must be an integer above 1", "model_dir")
    return SimModel(tuple(words), tuple(eos_ids), context_length)


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist", field="model_dir") from None
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", "model_dir") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must hold an object", "model_dir")
    return value


@dataclass(frozen=True, slots=True)
class SimConfig:
    """How to simulate. Sizes are in tokens, blocks or sequences, as the names say.

    context_length: None takes the model's. max_waiting: how many requests may queue; more are
    refused. eos_one_in: see `core/truth.py`. loras: adapters that requests may name. mesh_key:
    keys the names of blocks. startup_s: how long `start` takes.
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
    the running loop's, so a loop with virtual time runs the engine in it.
    `kv_event_sink` is given what changed in the cache after each tick; None drops it.

    Counters: accepted == finished + cancelled + closed + failed, at rest; `rejected` were never
    accepted, `overloaded` are those of them that met a full queue. `tokens` were delivered,
    `prompt_tokens` accepted and `cached_tokens` of those that ended were found in the cache.
    """

    def __init__(
        self,
        config: SimConfig,
        *,
        model: SimModel | None = None,
        clock: Callable[[], float] = _loop_time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.config = config
        self.kv_event_sink: Callable[[Sequence[KvEvent]], None] | None = None
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._counters: Counter[str] = Counter()
        self._core: _Core | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._streams: dict[SimSequence, _Stream] = {}
        self._steps = 0
        self._is_frozen = False
        # Why nothing is generated (any more).
        self._refusal: MeshError | None = Unavailable("the engine has not started")

    async def start(self, worker_id: int) -> EngineConfig:
        """Reads the model folder and starts stepping.

        Raises Conflict when called twice, NotFound or InvalidRequest for the model folder.
        """
        if self._core is not None or self._loop_task is not None:
            raise Conflict("the engine was started before")
        if self.config.startup_s > 0:
            log.info("sim_engine_starting", worker_id=worker_id, startup_s=self.config.startup_s)
            await self._sleep(self.config.startup_s)
        model = self._model or load_sim_model(self.config.model_dir)
        self._core = core = _Core.build(self.config, model)
        self._refusal = None
        self._loop_task = asyncio.create_task(self._run(core), name="sim-engine-steps")
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
        )

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """As `LLMEngine.generate`. All refusals are raised by the first step of the generator.

        Raises InvalidRequest, Unsupported, PromptTooLong, Overloaded, Unavailable, and WorkerLost
        or Bug where the engine ends under way.
        """
        stream = self._open(request, ctx)
        outcome = "closed"
        # Seen while the stream waits for tokens, and also while nobody asks it for the next chunk.
        watch = asyncio.ensure_future(ctx.stopped())
        watch.add_done_callback(lambda _: self._stop(stream))
        try:
            while True:
                if ctx.is_stopped:
                    outcome = "cancelled"
                    yield chunk.cancelled().with_usage(stream.usage())
                    return
                if stream.sequence.end is not None:
                    outcome = "finished"
                    yield stream.take_last()
                    return
                if stream.error is not None:
                    outcome = "failed"
                    raise _fresh(stream.error)
                if stream.has_news:
                    yield stream.take()
                else:
                    await stream.news()
        finally:
            self._close(stream, outcome)
            watch.cancel()

    async def abort(self, ctx: GenerateContext) -> None:
        """Nothing to do: the stop itself frees slot and blocks, at once."""

    async def drain(self) -> None:
        """Nothing to wait for: this engine hands nothing over."""

    async def cleanup(self) -> None:
        """Ends the steps; streams still open raise WorkerLost."""
        task, self._loop_task = self._loop_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._break_off(WorkerLost("the engine was shut down", retryable=True))
        self._refusal = Unavailable("the engine was shut down")

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
                rooms_open=blocks.open_transfers,
            ),
        )

    @property
    def counters(self) -> Mapping[str, int]:
        """The counters of the class's docstring, `steps` and `preempted`."""
        preempted = self._core.scheduler.preemptions if self._core else 0
        counts = {name: self._counters[name] for name in _COUNTERS}
        return {**counts, "steps": self._steps, "preempted": preempted}

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

    def thaw(self) -> None:
        """Ends `freeze`; the time that passed is lost, not caught up."""
        self._is_frozen = False
        self._work.set()

    def break_down(self, error: MeshError) -> None:
        """Fault for tests: all requests, and those to come, fail with `error`."""
        self._refusal = error
        self._break_off(error)

    def _open(self, request: PreprocessedRequest, ctx: GenerateContext) -> _Stream:
        try:
            core, job = self._check(request, ctx)
        except MeshError as error:
            self._counters["rejected"] += 1
            self._counters["overloaded"] += isinstance(error, Overloaded)
            raise
        sequence = core.scheduler.submit(job, self._clock())
        stream = _Stream(sequence, request.output_options.logprobs)
        self._streams[sequence] = stream
        self._counters["accepted"] += 1
        self._counters["prompt_tokens"] += sequence.prompt_tokens
        self._work.set()
        return stream

    def _check(self, request: PreprocessedRequest, ctx: GenerateContext) -> tuple[_Core, Job]:
        core = self._core
        if self._refusal is not None or core is None:
            raise _fresh(self._refusal or Unavailable("the engine has not started"))
        job = core.job(request, self.config, ctx.priority)
        scheduler = core.scheduler
        if scheduler.waiting >= self.config.max_waiting:
            low, high = _RETRY_AFTER_S
            wait_s = self.config.timing.prefill_s(scheduler.waiting_tokens)
            raise Overloaded(min(max(wait_s, low), high), "too many requests wait at this worker")
        return core, job

    def _stop(self, stream: _Stream) -> None:
        if self._core is not None:
            self._core.scheduler.remove(stream.sequence)
        stream.wake()

    def _close(self, stream: _Stream, outcome: str) -> None:
        assert self._core is not None, "nothing is opened before the start"
        self._core.scheduler.remove(stream.sequence)
        del self._streams[stream.sequence]
        self._counters[outcome] += 1
        self._counters["tokens"] += stream.delivered
        self._counters["cached_tokens"] += stream.sequence.cached_tokens or 0

    def _break_off(self, error: MeshError) -> None:
        for stream in self._streams.values():
            stream.error = stream.error or error
            self._stop(stream)

    async def _run(self, core: _Core) -> None:
        try:
            await self._keep_time(core)
        except Exception:
            log.exception("sim_engine_broke")
            self.break_down(Bug("the engine broke; the worker's log says how"))

    async def _keep_time(self, core: _Core) -> None:
        clock = self._clock
        due = clock()
        step: Step | None = None
        while True:
            if step is None:
                step = core.scheduler.plan(due)
                due += step.duration_s if step else 0.0
            if step is None or self._is_frozen:
                self._work.clear()
                await self._work.wait()
                due = max(due, clock())
                continue
            await self._sleep(max(0.0, due - clock()))
            if not self._is_frozen:
                step, due = self._tick(core, step, due, clock() + _EARLY_S)

    def _tick(self, core: _Core, step: Step, due: float, until: float) -> tuple[Step | None, float]:
        """Completes steps due by `until`, within bounds; the step then in flight and its end."""
        advanced: set[SimSequence] = set()
        work = 0
        now: Step | None = step
        while now is not None and due <= until and work < _TICK_WORK:
            advanced.update(core.scheduler.complete(now))
            self._steps += 1
            work += _STEP_WORK + len(now.entries) + now.prefill_tokens // _PREFILL_TOKENS_A_WORK
            now = core.scheduler.plan(due)
            due += now.duration_s if now else 0.0
        self._publish(core.blocks)
        for sequence in advanced:
            self._streams[sequence].wake()
        return now, due

    def _publish(self, blocks: BlockManager) -> None:
        events = blocks.take_events()
        if events and self.kv_event_sink is not None:
            self.kv_event_sink(events)


def _fresh(error: MeshError) -> MeshError:
    """The same error for one more request: an instance keeps the traceback of its last raise."""
    return type(error).restore(
        error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
        reason=error.reason,
        metadata=error.metadata,
        retryable=error.retryable,
    )


class _Stream:
    """One request between the steps and its generator."""

    __slots__ = ("_logprobs", "_waiter", "delivered", "error", "sequence")

    def __init__(self, sequence: SimSequence, logprobs: int | None) -> None:
        self.sequence = sequence
        self.delivered = 0
        self.error: MeshError | None = None
        self._logprobs = logprobs
        self._waiter: asyncio.Future[None] | None = None

    @property
    def has_news(self) -> bool:
        return len(self.sequence.output) > self.delivered

    async def news(self) -> None:
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

    def take_last(self) -> LLMEngineOutput:
        """The terminal chunk, with the tokens not yet taken."""
        end = self.sequence.end
        assert end is not None, "only an ended sequence has a last chunk"
        return replace(
            self.take(),
            finish_reason=_FINISH[end],
            stop_reason=self.sequence.stop_token if end is End.STOP else None,
            completion_usage=self.usage(),
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
        truth = Truth(model.word_ids, model.eos_ids[0], eos_one_in=config.eos_one_in)
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
        lora = self._check_fields(request)
        room = self._room(request)
        stop = request.stop_conditions
        if stop.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", "stop_conditions.max_tokens")
        if request.routing is not None and request.routing.priority is not None:
            priority = request.routing.priority
        if request.is_probe:
            return Job(request.token_ids.le, 1, priority=_PROBE_PRIORITY)
        return Job(
            request.token_ids.le,
            room if stop.max_tokens is None else min(stop.max_tokens, room),
            stops={} if stop.ignore_eos else self._stops(request),
            min_tokens=stop.min_tokens or 0,
            hasher=self.hashers[lora] if config.prefix_caching else None,
            lora_name=lora,
            priority=priority or 0,
        )

    def _check_fields(self, request: PreprocessedRequest) -> str:
        """The adapter's name; raises Unsupported or InvalidRequest."""
        honoured = _HONOURED | _SKIPPED_BY_PROBES if request.is_probe else _HONOURED
        refused = unsupported_fields(request, honoured)
        if refused:
            also = f" (nor are {', '.join(refused[1:])})" if refused[1:] else ""
            raise Unsupported(refused[0], f"the simulated engine has no such thing{also}")
        routing = request.routing
        if routing is None:
            return ""
        if routing.dp_rank:
            raise InvalidRequest("this worker has rank 0 only", "routing.dp_rank")
        lora = routing.lora_name or ""
        if lora not in self.hashers:
            raise Unsupported("routing.lora_name", f"the adapter {lora!r} is not loaded here")
        return lora

    def _room(self, request: PreprocessedRequest) -> int:
        """How many tokens an answer can have."""
        prompt = len(request.token_ids)
        if prompt == 0:
            raise InvalidRequest("token_ids must not be empty", "token_ids")
        longest = min(self.context_length, self.blocks.total_blocks * self.blocks.block_size)
        if prompt >= longest:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens; with at least one more for the answer, "
                f"{longest} is the most this model holds",
                field="token_ids",
            )
        return longest - prompt

    def _stops(self, request: PreprocessedRequest) -> dict[int, Stop]:
        """The frontend merges EOS into the hidden ids: EOS wins there, and visible over both."""
        stop = request.stop_conditions
        stops = dict.fromkeys(stop.stop_token_ids_hidden, Stop(End.STOP))
        stops |= dict.fromkeys((*self.eos_ids, *request.eos_token_ids), Stop(End.EOS))
        stops |= dict.fromkeys(stop.stop_token_ids_visible, Stop(End.STOP, is_visible=True))
        return stops
