"""Runs requests on the engine: admission, the engine contract, stops, deadlines and counting.

Every way in (Attach, Generate) goes through `admit` and `run`; every way out is exactly one of a
terminal chunk, a typed error, or the cancellation of the calling task, which closes the engine's
generator. The counters prove it: at rest accepted == finished + stopped + failed + closed.

An abort has two times. The context of the request is stopped at once, so that its slot and compute
end; the engine's `abort` of a decode leg waits for the leg's first token, since until then its KV
may be in flight (the first-token gate). A leg that ends before has no `abort` called at all.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from common.errors import (
    Bug,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    Unavailable,
    Unsupported,
)
from common.request.token_stream import Order
from worker_svc.engines.contract import (
    CountingEngine,
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PassThroughEngine,
    chunk,
    validated,
)
from worker_svc.tracing import GenerateSpan, GenerateSpans

# How long an engine may take to end a stopped request before its generator is closed on it.
STOP_GRACE_S = 0.15
# Ends that an engine may tell of without having computed anything.
_NO_ANSWER = (FinishReason.CANCELLED, FinishReason.ERROR)

Emit = Callable[[LLMEngineOutput], None]

log = structlog.get_logger()


@dataclass(slots=True)
class _Running:
    order: Order
    ctx: GenerateContext
    limit: asyncio.Timeout | None = None
    # Waits for the first token to call the engine's abort.
    gate: asyncio.Task[None] | None = None


class Runner:
    """The engine's door. max_requests: how many may be inside; the rest is refused.

    role: the engine's, which legs play that do not say otherwise.
    last_output_at: loop time at which the engine last gave a part of an answer; -inf: never. That a
    request was cancelled, or failed, is none.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        card_checksum: str = "",
        max_requests: int = 4096,
        role: str = "aggregated",
    ) -> None:
        self.engine = engine
        self.card_checksum = card_checksum
        self.counters: Counter[str] = Counter()
        self.is_draining = False
        self.spans: GenerateSpans | None = None
        self.last_output_at = -math.inf
        self._max_requests = max_requests
        self._role = role
        self._running: dict[int, _Running] = {}
        self._last_key = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def counts(self) -> dict[str, int]:
        """Its own counters, and the engine's as `engine_<name>`."""
        counts = dict(self.counters)
        if isinstance(self.engine, CountingEngine):
            counts |= {f"engine_{name}": n for name, n in self.engine.counters.items()}
        return counts

    @property
    def open_requests(self) -> int:
        """Requests inside."""
        return len(self._running)

    def admit(self, order: Order) -> int:
        """Takes an order in and returns its key for `run`. Raises what it is refused with."""
        try:
            self._check(order)
        except MeshError:
            self.counters["rejected"] += 1
            raise
        self._last_key += 1
        ctx = GenerateContext(
            EngineContext(order.request_id),
            asyncio.Event() if (order.phase or self._role) == "decode" else None,
            traceparent=order.traceparent,
            priority=order.priority,
            tenant=order.tenant,
        )
        self._running[self._last_key] = _Running(order, ctx)
        self.counters["accepted"] += 1
        self._idle.clear()
        return self._last_key

    def _check(self, order: Order) -> None:
        if self.is_draining:
            raise Unavailable("this worker is draining", reason="DRAINING")
        if len(self._running) >= self._max_requests:
            raise Unavailable("this worker has all the requests it can hold", 1.0, reason="FULL")
        if order.request is None:
            if not isinstance(self.engine, PassThroughEngine):
                raise Unsupported("payload", "this engine takes no OpenAI bodies, only token ids")
            return
        checksum = order.request.mdc_sum
        if checksum and checksum != self.card_checksum:
            raise InvalidRequest(
                f"the prompt was made with card {checksum}, this worker serves "
                f"{self.card_checksum or 'none'}",
                "mdc_sum",
                reason="CARD_MISMATCH",
            )

    async def run(self, key: int, emit: Emit) -> LLMEngineOutput:
        """Runs an admitted order; chunks go to `emit`, the terminal one is returned.

        Raises MeshError. Cancelling the task closes the engine's generator and frees all at once.
        """
        running = self._running[key]
        limit = running.limit = asyncio.timeout(None)
        how = "closed"
        span = self.spans.start(running.order) if self.spans is not None else None
        if span is not None:
            emit = _observed(emit, span)
        try:
            async with limit:
                if running.ctx.is_stopped:  # before it began
                    self._limit_stop(limit)
                terminal = await self._consume(running, emit)
            how = "stopped" if terminal.finish_reason is FinishReason.CANCELLED else "finished"
        except MeshError as error:
            how = "failed"
            if span is not None:
                span.fail(error)
            raise
        except asyncio.CancelledError as error:
            if _is_cancelled():
                if span is not None:
                    span.drop()
                raise
            how = "failed"  # the engine's own business, which nobody here was cancelled for
            raise _engine_failed(running, span) from error
        except Exception as error:
            if not (isinstance(error, TimeoutError) and limit.expired()):
                how = "failed"
                raise _engine_failed(running, span) from error
            self.counters["stops_forced"] += 1
            how, terminal = "stopped", chunk.cancelled()
        finally:
            self._left(key, how)
        if span is not None:
            span.end(terminal)
        if how == "stopped" and running.ctx.stop_reason == "deadline":
            raise DeadlineExceeded("the request's deadline passed at the worker")
        return terminal

    async def _consume(self, running: _Running, emit: Emit) -> LLMEngineOutput:
        request_id = running.order.request_id
        now = asyncio.get_running_loop().time
        terminal: LLMEngineOutput | None = None
        async with aclosing(validated(self._stream(running), request_id=request_id)) as outputs:
            async for output in outputs:
                if output.finish_reason not in _NO_ANSWER:
                    self.last_output_at = now()
                if output.token_ids:
                    running.ctx.notify_first_token()
                if output.finish_reason is None:
                    emit(output)
                else:
                    terminal = output  # read on: `validated` objects to whatever follows
        assert terminal is not None, "validated() raises where there is none"
        if terminal.finish_reason is FinishReason.ERROR:
            raise Bug(f"the engine failed: {terminal.error or 'it does not say how'}")
        return terminal

    def _stream(self, running: _Running) -> AsyncGenerator[LLMEngineOutput, None]:
        order = running.order
        if order.request is not None:
            return self.engine.generate(order.request, running.ctx)
        assert isinstance(self.engine, PassThroughEngine), "checked when it was admitted"
        if order.chat_json is not None:
            return self.engine.generate_pass_through("chat", order.chat_json, running.ctx)
        return self.engine.generate_pass_through(
            "completion", order.completion_json or b"", running.ctx
        )

    async def stop(self, key: int, reason: str) -> None:
        """Asks for the end of a request: gracefully, and STOP_GRACE_S later without mercy.

        `run` returns a cancelled chunk then. A key that has ended is a no-op.
        """
        running = self._running.get(key)
        if running is None or running.ctx.is_stopped:
            return
        running.ctx.inner_arc().stop_generating(reason)
        if running.limit is not None:
            self._limit_stop(running.limit)
        first_token = running.ctx.first_token_sender()
        if first_token is None or first_token.is_set():
            await self._abort(running)
            return
        self.counters["aborts_deferred"] += 1
        running.gate = asyncio.create_task(
            self._abort_after(first_token, running), name="first-token gate"
        )

    async def _abort_after(self, first_token: asyncio.Event, running: _Running) -> None:
        await first_token.wait()
        await self._abort(running)

    async def _abort(self, running: _Running) -> None:
        try:
            await self.engine.abort(running.ctx)
        except Exception:
            log.exception("engine_abort_failed", request_id=running.order.request_id)

    async def stop_request(self, request_id: str, reason: str) -> int:
        """Stops all that runs under a request id; how many that were."""
        keys = [k for k, r in self._running.items() if r.order.request_id == request_id]
        for key in keys:
            await self.stop(key, reason)
        return len(keys)

    async def idle(self) -> None:
        """Returns once nothing is inside."""
        await self._idle.wait()

    def forget(self, key: int) -> None:
        """Lets go of an order whose `run` never began; a no-op for any other.

        For done callbacks: a task that is cancelled before its first step runs no `finally`.
        """
        if key in self._running:
            self._left(key, "closed")

    def _left(self, key: int, how: str) -> None:
        running = self._running.pop(key)
        if running.gate is not None:
            running.gate.cancel()
        self.counters[how] += 1
        if not self._running:
            self._idle.set()

    def _limit_stop(self, limit: asyncio.Timeout) -> None:
        limit.reschedule(asyncio.get_running_loop().time() + STOP_GRACE_S)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _engine_failed(running: _Running, span: GenerateSpan | None) -> Bug:
    log.exception("engine_failed", request_id=running.order.request_id)
    error = Bug("the engine failed; the worker's log says how")
    if span is not None:
        span.fail(error)
    return error


def _observed(emit: Emit, span: GenerateSpan) -> Emit:
    def both(output: LLMEngineOutput) -> None:
        span.output(output)
        emit(output)

    return both
