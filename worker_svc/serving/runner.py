"""Runs requests on the engine: admission, the engine contract, aborts, deadlines and counters.

Every request enters through `admit` and `run`. It ends in exactly one way: a terminal chunk, a
typed error, or the cancellation of the calling task, which closes the engine's generator. At rest
accepted == finished + stopped + failed + closed.

An abort has two phases. The request's context is stopped at once, which frees its slot and its
compute. The engine's `abort` of a decode leg waits for the leg's first token, because until then
its KV may be in flight (first-token gate). If the leg ends before, `abort` is not called.

`find_stalled` watches every request (`request_watch.py`); `end_stalled` ends those that the engine
has lost with a retryable WorkerLost.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import structlog

from common.errors import (
    INVALID_OUTPUT,
    REQUEST_STALLED,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    Unavailable,
    Unimplemented,
    UnknownModel,
    Unsupported,
    WorkerLost,
)
from common.kv.load import Load
from common.request.embedding import dump_vector
from common.request.grammar import ConstraintError
from common.request.score import dump_score
from common.request.token_stream import LegRequest
from common.trials.constraints import ConstraintTrials
from worker_svc.engines.contract import (
    CountingEngine,
    EmbeddingEngine,
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    OutputRules,
    PassThroughEngine,
    PreprocessedRequest,
    ScoringEngine,
    chunk,
    usage,
)
from worker_svc.engines.handoff import FAILURES as HANDOFF_FAILURES
from worker_svc.serving.request_watch import PREPARATION_S, RequestWatch, WatchedRequest
from worker_svc.serving.step_limit import StepLimits, StepLimitSettings
from worker_svc.serving.usage_details import count_details
from worker_svc.tracing import GenerateSpan, GenerateSpans

# Time for an engine to end an aborted request before its generator is closed.
ABORT_GRACE_S = 0.15
_CONSTRAINT_FIELD = "sampling_options.guided_decoding"
# Finish reasons that an engine can send without having computed anything.
_NO_OUTPUT_REASONS = (FinishReason.CANCELLED, FinishReason.ERROR)
# Output tokens of a request without a limit, for the watch.
_OUTPUT_TOKENS_ASSUMED = 8192

Emit = Callable[[LLMEngineOutput], None]

log = structlog.get_logger()


@dataclass(slots=True)
class _ActiveRequest:
    leg_request: LegRequest
    ctx: GenerateContext
    # Prompt tokens to compute before the first output.
    pending_tokens: int
    watched: WatchedRequest
    # Why it is ended by the watch.
    failure: MeshError | None = None
    abort_timeout: asyncio.Timeout | None = None
    # Waits for the first token, then calls the engine's `abort`.
    abort_task: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class StalledRequest:
    """A request that the engine has lost. output_at: of its last output; needs_proof: see
    WatchedRequest."""

    key: int
    output_at: float
    needs_proof: bool


class Runner:
    """Admits requests and runs them on one engine.

    model: the public name; "" accepts any.
    vocab_size: token ids of prompts are below it; None: not known, the engine checks.
    max_requests: limit of concurrent requests; more are rejected.
    role: of the engine; used for legs that do not name their phase.
    last_output_at: loop time of the engine's last output; -inf before the first. Cancelled and
        failed ends do not count.
    engine_failure: why the engine fails, by its probe; "" if it does not.
    step_limits: see `observe_steps`.
    constraints: compiles them in a process that can be ended, before the engine does; None: not.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        model: str = "",
        card_checksum: str = "",
        max_requests: int = 4096,
        role: str = "aggregated",
        constraints: ConstraintTrials | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.card_checksum = card_checksum
        self.vocab_size: int | None = None
        self.counters: Counter[str] = Counter()
        # By reason.
        self.handoff_failures = Counter(dict.fromkeys(HANDOFF_FAILURES, 0))
        self.is_draining = False
        self.spans: GenerateSpans | None = None
        self.last_output_at = -math.inf
        self.engine_failure = ""
        self.step_limits = StepLimits(StepLimitSettings())
        self._watch = self._build_watch()
        self._max_requests = max_requests
        self._role = role
        self._constraints = constraints
        self._active_requests: dict[int, _ActiveRequest] = {}
        self._last_key = 0
        # Of the prompts without output, and of all others.
        self._pending_tokens = self._started_tokens = 0
        # Of the prompts without output, since there were none.
        self._longest_prompt = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Whether the engine has several data-parallel ranks.
        self.has_ranks = False

    def counts(self) -> dict[str, int]:
        """Returns the runner's counters, and the engine's as `engine_<name>`."""
        counts = dict(self.counters)
        if isinstance(self.engine, CountingEngine):
            counts |= {f"engine_{name}": n for name, n in self.engine.counters.items()}
        return counts

    def engine_started(self, config: EngineConfig) -> None:
        """Receives the properties of the engine; called once, before the first request."""
        self.has_ranks = config.dp_size > 1
        self._watch = self._build_watch(
            has_ranks=self.has_ranks, serves_in_order=config.serves_in_order
        )

    def _build_watch(
        self, *, has_ranks: bool = False, serves_in_order: bool = False
    ) -> RequestWatch:
        return RequestWatch(
            lambda dp_rank: self.step_limits.limit_s(dp_rank),
            has_ranks=has_ranks,
            serves_in_order=serves_in_order,
        )

    @property
    def open_requests(self) -> int:
        return len(self._active_requests)

    def open_adapter_requests(self) -> Counter[str]:
        """Returns the number of requests that have not ended, by adapter."""
        requests = (one.leg_request.request for one in self._active_requests.values())
        routings = (request.routing for request in requests if request is not None)
        return Counter(hints.lora_name for hints in routings if hints and hints.lora_name)

    def observe_steps(self, now: float) -> None:
        """Measures the engine's steps; called every `step_limit.TICK_S` by each Attach stream."""
        self.step_limits.observe(
            self.engine.loads(),
            self._started_tokens,
            self._pending_tokens,
            now,
            longest_prompt=self._longest_prompt,
        )

    def is_engine_idle(self) -> bool:
        """Returns whether the engine reports no request."""
        loads = self.engine.loads()
        return not any(load.running or load.waiting or load.rooms_open for load in loads)

    def loads(self) -> Sequence[Load]:
        """Returns the load of each rank, with its step limit."""
        loads = self.engine.loads()
        if len(loads) == 1 and self._pending_tokens and self._role == "aggregated":
            (load,) = loads
            # SGLang reports a request that found it idle only after its first step.
            if not load.running + load.waiting:
                loads = [replace(load, running=1)]
        return self.step_limits.add_to(loads)

    def admit(self, leg_request: LegRequest) -> int:
        """Admits a request and returns its key for `run`. Raises MeshError if it is rejected."""
        try:
            self._check(leg_request)
        except MeshError:
            self.counters["rejected"] += 1
            raise
        self._last_key += 1
        request, is_decode = leg_request.request, (leg_request.phase or self._role) == "decode"
        is_remote = request is not None and bool(request.bootstrap_info or request.prefill_result)
        # Of a remote prompt the KV comes from a prefill worker.
        pending_tokens = 0
        if request is not None and not (is_decode and is_remote):
            pending_tokens = len(request.token_ids)
        self._pending_tokens += pending_tokens
        self._longest_prompt = max(self._longest_prompt, pending_tokens)
        watched = self._watch_request(leg_request, pending_tokens)
        ctx = GenerateContext(
            leg_request.request_id,
            asyncio.Event() if is_decode else None,
            traceparent=leg_request.traceparent,
            priority=leg_request.priority,
            tenant=leg_request.tenant,
            on_preparing=partial(self._set_preparing, watched) if watched.preparation_s else None,
        )
        self._active_requests[self._last_key] = _ActiveRequest(
            leg_request, ctx, pending_tokens, watched
        )
        self.counters["accepted"] += 1
        self._idle.clear()
        return self._last_key

    def _watch_request(self, leg_request: LegRequest, pending_tokens: int) -> WatchedRequest:
        request, priority, dp_rank = leg_request.request, leg_request.priority, None
        preparation_s, context_tokens = 0.0, 0
        if request is not None:
            if (routing := request.routing) is not None:
                dp_rank = routing.dp_rank
                priority = priority if routing.priority is None else routing.priority
            if request.sampling_options.guided_decoding or request.multi_modal_data:
                preparation_s = PREPARATION_S
            max_tokens = request.stop_conditions.max_tokens or _OUTPUT_TOKENS_ASSUMED
            context_tokens = len(request.token_ids) + max_tokens
        watched = WatchedRequest(
            self._watch.rank(dp_rank),
            priority or 0,
            pending_tokens,
            context_tokens,
            is_opaque=request is None,
            preparation_s=preparation_s,
        )
        now = asyncio.get_running_loop().time()
        self._watch.admit(watched, self._pending_tokens, now)
        return watched

    def _set_preparing(self, watched: WatchedRequest, is_preparing: bool) -> None:
        if is_preparing:
            self._watch.begin_preparation(watched)
        else:
            now = asyncio.get_running_loop().time()
            self._watch.end_preparation(watched, self._pending_tokens, now)

    def _check(self, leg_request: LegRequest) -> None:
        if self.is_draining:
            raise Unavailable(
                "the worker is draining; send the request to another", reason="DRAINING"
            )
        if len(self._active_requests) >= self._max_requests:
            raise Unavailable(
                f"too many concurrent requests: {len(self._active_requests)}/{self._max_requests};"
                " retry after 1 s",
                1.0,
                reason="FULL",
            )
        if leg_request.request is None:
            if not isinstance(self.engine, PassThroughEngine):
                raise Unsupported("payload", "the engine accepts token ids only, not OpenAI bodies")
            return
        if leg_request.phase == "embedding" and not isinstance(self.engine, EmbeddingEngine):
            raise Unimplemented("the engine computes no embeddings")
        if leg_request.phase == "score" and not isinstance(self.engine, ScoringEngine):
            raise Unimplemented("the engine scores no texts")
        model, hints = leg_request.request.model, leg_request.request.routing
        if model and self.model not in ("", model) and (not hints or hints.lora_name != model):
            raise UnknownModel(model)
        checksum = leg_request.request.card_checksum
        if checksum and checksum != self.card_checksum:
            raise InvalidRequest(
                f"the prompt was tokenized for card {checksum}, the worker serves card "
                f"{self.card_checksum or 'none'}",
                "mdc_sum",
                reason="CARD_MISMATCH",
            )
        self._check_vocabulary(leg_request.request)

    def _check_vocabulary(self, request: PreprocessedRequest) -> None:
        if self.vocab_size is None or not request.token_ids:
            return
        largest = request.token_ids.largest
        if largest >= self.vocab_size:
            raise InvalidRequest(
                f"token_ids: {largest} is above the largest token id {self.vocab_size - 1}",
                "token_ids",
            )

    async def run(self, key: int, emit: Emit) -> LLMEngineOutput:
        """Runs an admitted request: chunks go to `emit`, the terminal chunk is returned.

        Raises MeshError. Cancelling the task closes the engine's generator and frees its resources.
        """
        active_request = self._active_requests[key]
        span = self.spans.start(active_request.leg_request) if self.spans is not None else None
        if span is not None:
            emit = _with_span(emit, span)
        outcome = "closed"
        try:
            terminal = await self._run_engine(active_request, emit)
            outcome = "stopped" if terminal.finish_reason is FinishReason.CANCELLED else "finished"
        except (asyncio.CancelledError, Exception) as error:
            failure = _failure_of(active_request, error)
            if failure is None:
                if span is not None:
                    span.drop()
                raise
            outcome = "failed"
            if failure.reason in HANDOFF_FAILURES:
                self.handoff_failures[failure.reason] += 1
            if failure.reason == INVALID_OUTPUT:
                self.counters["invalid_output"] += 1
                log.error("invalid_output", message=failure.message)
            if span is not None:
                span.fail(failure)
            if failure is error:
                raise
            raise failure from error
        finally:
            self._finish(key, outcome)
        if span is not None:
            span.end(terminal)
        if outcome == "stopped" and active_request.ctx.stop_reason == "deadline":
            raise DeadlineExceeded("the request's deadline passed on the worker")
        return terminal

    async def _run_engine(self, active_request: _ActiveRequest, emit: Emit) -> LLMEngineOutput:
        """Returns the engine's terminal chunk, or a cancelled one if the engine does not end within
        ABORT_GRACE_S of an abort. Raises what the engine raises, and the failure of a request that
        the watch ended."""
        now = asyncio.get_running_loop().time
        rules = self._rules_of(active_request.leg_request)
        watched, rank, check = active_request.watched, active_request.watched.rank, rules.check
        terminal: LLMEngineOutput | None = None
        abort_timeout = active_request.abort_timeout = asyncio.timeout(None)
        outputs = self._stream(active_request)
        # Engines of other packages may return another iterator.
        closing = aclosing(outputs) if isinstance(outputs, AsyncGenerator) else nullcontext()
        try:
            async with abort_timeout, closing:
                if watched.preparation_s:
                    await self._check_constraint(active_request)
                if active_request.ctx.is_stopped:  # aborted before its start
                    self._start_abort_grace(abort_timeout)
                async for output in outputs:
                    check(output)
                    reason = output.finish_reason
                    if reason is None or reason not in _NO_OUTPUT_REASONS:
                        self.last_output_at = now()
                    if watched.output_at >= 0.0:
                        watched.output_at = rank.continued_at = self.last_output_at
                    elif output.token_ids or output.chunk_json is not None:
                        self._watch.start(watched, now())
                        active_request.ctx.notify_first_token()
                        self._started_tokens += active_request.pending_tokens
                        self._drop_pending(active_request)
                    elif output.prompt_logprobs:
                        # Of a prompt that the engine has computed: not counted by its load.
                        watched.quiet_since = self.last_output_at
                    if reason is None:
                        emit(output)
                    else:
                        # Continue reading: a further chunk breaks the rules.
                        terminal = output
                rules.end()
        except TimeoutError:
            if not abort_timeout.expired():  # the engine's own
                raise
            self.counters["stops_forced"] += 1
            terminal = chunk.cancelled()
        if active_request.failure is not None:
            raise active_request.failure
        assert terminal is not None, "the rules require one"
        if terminal.finish_reason is FinishReason.ERROR:
            raise InternalError(f"the engine failed: {terminal.error or 'no message'}")
        if terminal.completion_usage is not None:
            has_prompt = active_request.leg_request.phase != "decode"
            count_details(self.counters, terminal.completion_usage, has_prompt=has_prompt)
        return _with_prefill_details(terminal, active_request.leg_request.request)

    async def _check_constraint(self, active_request: _ActiveRequest) -> None:
        """Raises InvalidRequest if the request's constraint is invalid or exceeds a limit."""
        request, ctx = active_request.leg_request.request, active_request.ctx
        if self._constraints is None or request is None:
            return
        guided = request.sampling_options.guided_decoding
        if guided is None:
            return
        try:
            with ctx.preparing():
                await self._constraints.check(guided, ctx.tenant)
        except ConstraintError as error:
            text = f"Invalid '{_CONSTRAINT_FIELD}': {error}."
            raise InvalidRequest(text, _CONSTRAINT_FIELD) from error

    def _rules_of(self, leg_request: LegRequest) -> OutputRules:
        request, max_tokens = leg_request.request, None
        if request is not None:
            max_tokens = request.stop_conditions.max_tokens
        return OutputRules(
            leg_request.request_id, vocab_size=self.vocab_size, max_tokens=max_tokens
        )

    def _stream(self, active_request: _ActiveRequest) -> AsyncGenerator[LLMEngineOutput, None]:
        leg_request = active_request.leg_request
        if leg_request.phase == "embedding" and leg_request.request is not None:
            return self._embed(leg_request.request, active_request.ctx)
        if leg_request.phase == "score" and leg_request.request is not None:
            return self._score(leg_request.request, active_request.ctx)
        if leg_request.request is not None:
            return self.engine.generate(leg_request.request, active_request.ctx)
        assert isinstance(self.engine, PassThroughEngine), "checked at admission"
        ctx, body = active_request.ctx, leg_request.chat_json
        if body is not None:
            return self.engine.generate_pass_through("chat", body, ctx)
        body = leg_request.completion_json or b""
        return self.engine.generate_pass_through("completion", body, ctx)

    async def _embed(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the vector as one chunk, then the terminal chunk."""
        assert isinstance(self.engine, EmbeddingEngine), "checked at admission"
        vector = await self.engine.embed(request, ctx)
        if vector is None:
            yield chunk.cancelled()
            return
        yield LLMEngineOutput(chunk_json=dump_vector(vector))
        yield chunk.stop().with_usage(usage(len(request.token_ids), 0))

    async def _score(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the score as one chunk, then the terminal chunk."""
        assert isinstance(self.engine, ScoringEngine), "checked at admission"
        score = await self.engine.score(request, ctx)
        if score is None:
            yield chunk.cancelled()
            return
        if not math.isfinite(score):
            raise InternalError(f"the engine returned the score {score}")
        yield LLMEngineOutput(chunk_json=dump_score(score))
        yield chunk.stop().with_usage(usage(len(request.token_ids), 0))

    async def abort(self, key: int, reason: str) -> None:
        """Ends a request that is not needed any more; after ABORT_GRACE_S its generator is closed.

        `run` then returns a cancelled chunk. No effect if the request has ended.
        """
        active_request = self._active_requests.get(key)
        if active_request is None or active_request.ctx.is_stopped:
            return
        active_request.watched.is_watched = False
        active_request.ctx.stop_generating(reason)
        if active_request.abort_timeout is not None:
            self._start_abort_grace(active_request.abort_timeout)
        first_token = active_request.ctx.first_token
        if first_token is None or first_token.is_set():
            await self._abort_in_engine(active_request)
            return
        self.counters["aborts_deferred"] += 1
        active_request.abort_task = asyncio.create_task(
            self._abort_in_engine(active_request, first_token), name="first-token gate"
        )

    async def _abort_in_engine(
        self, active_request: _ActiveRequest, first_token: asyncio.Event | None = None
    ) -> None:
        if first_token is not None:
            await first_token.wait()
        try:
            await self.engine.abort(active_request.ctx)
        except Exception:
            log.exception("engine_abort_failed", request_id=active_request.leg_request.request_id)

    def find_stalled(self, now: float) -> list[StalledRequest]:
        """Returns the requests that the engine has lost; call it every SAMPLE_S."""
        if not self._watch.sample(self.engine.loads(), now):
            return []
        requests = self._active_requests
        keys = {request.watched: key for key, request in requests.items()}
        lost = self._watch.check(keys, self._pending_tokens, now)
        for request in requests.values():
            if request.pending_tokens and self._watch.has_no_prompt_left(request.watched):
                self._drop_pending(request)  # it does not lengthen a step any more
        return [StalledRequest(keys[w], w.output_at, needs_proof=w.needs_proof) for w in lost]

    async def end_stalled(self, stalled: StalledRequest) -> None:
        """Ends a request that the engine has lost: `run` raises WorkerLost. No effect if it has
        ended, was stopped, or has had output meanwhile."""
        key, request = stalled.key, self._active_requests.get(stalled.key)
        if request is None or request.ctx.is_stopped:
            return
        if request.watched.output_at != stalled.output_at:
            return
        watched = request.watched
        quiet_s = asyncio.get_running_loop().time() - watched.quiet_since
        request.failure = WorkerLost(
            f"the engine works, but has sent no {'more ' if watched.is_started else ''}output of"
            f" this request for {quiet_s:.1f} s",
            retryable=True,
            reason=REQUEST_STALLED,
        )
        self.counters["stalled"] += 1
        request_id = request.leg_request.request_id
        log.error("request_stalled", request_id=request_id, quiet_s=round(quiet_s, 1))
        await self.abort(key, "stalled")

    async def abort_request(self, request_id: str, reason: str) -> int:
        """Aborts all requests with this id. Returns how many."""
        active = self._active_requests.items()
        keys = [key for key, request in active if request.leg_request.request_id == request_id]
        for key in keys:
            await self.abort(key, reason)
        return len(keys)

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def discard(self, key: int) -> None:
        """Removes a request if its `run` never started.

        For done callbacks: a task that is cancelled before its first step runs no `finally`.
        """
        if key in self._active_requests:
            self._finish(key, "closed")

    def _finish(self, key: int, outcome: str) -> None:
        active_request = self._active_requests.pop(key)
        self._watch.end(active_request.watched)
        self._drop_pending(active_request)
        if active_request.abort_task is not None:
            active_request.abort_task.cancel()
        self.counters[outcome] += 1
        if not self._active_requests:
            self._idle.set()

    def _drop_pending(self, active_request: _ActiveRequest) -> None:
        self._pending_tokens -= active_request.pending_tokens
        active_request.pending_tokens = 0
        if not self._pending_tokens:
            self._longest_prompt = 0

    def _start_abort_grace(self, abort_timeout: asyncio.Timeout) -> None:
        abort_timeout.reschedule(asyncio.get_running_loop().time() + ABORT_GRACE_S)


def _with_prefill_details(
    terminal: LLMEngineOutput, request: PreprocessedRequest | None
) -> LLMEngineOutput:
    """Returns the terminal chunk with the details of the prompt that the prefill worker reported in
    the handoff, since it computed the prompt."""
    result, counts = request and request.prefill_result, terminal.completion_usage
    if not result or result.prompt_tokens_details is None or counts is None:
        return terminal
    details = result.prompt_tokens_details
    return terminal.with_usage(replace(counts, prompt_tokens_details=details))


def _failure_of(active_request: _ActiveRequest, error: BaseException) -> MeshError | None:
    """Returns the typed error of a request if its run raised `error`; None if its task was
    cancelled."""
    if isinstance(error, MeshError):
        return error
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            return None
        # Otherwise the engine cancelled something itself.
    log.exception("engine_failed", request_id=active_request.leg_request.request_id)
    return InternalError("the engine failed; the worker's log has the traceback")


def _with_span(emit: Emit, span: GenerateSpan) -> Emit:
    def emit_and_record(output: LLMEngineOutput) -> None:
        span.output(output)
        emit(output)

    return emit_and_record
