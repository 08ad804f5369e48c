"""The server's side of all RPCs: error status, request ids, deadlines, tracing, authentication.

One server interceptor does all of it, in this order: authenticate, take or create the request id,
start the SERVER span if the caller's span is sampled, limit the time, run the handler, convert its
errors (`status.py`). Clients have no interceptors: those for stream-stream calls leak, grpc#25449.

Handlers of all shapes run as coroutines that write to the context. So the `finally` of an async
generator runs inside the RPC's task if the caller disconnects; grpc.aio alone leaves it to the
garbage collector.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace

from common import errors
from common.errors import MeshError
from common.rpc.authentication import CallerCheck, Context, is_open_on_loopback
from common.rpc.call_context import (
    TRACEPARENT_KEY,
    bind_incoming_deadline,
    bind_incoming_request_id,
    request_id,
)
from common.rpc.claimed_id import bind_caller_id
from common.rpc.status import STATUS_DETAILS_KEY, mesh_error_to_status
from common.runtime import telemetry

LOG = structlog.get_logger(__name__)

# Streams that live as long as their peers: no deadline, no span, no request id of their own.
LONG_LIVED_METHODS = frozenset(
    {
        "Attach",
        "Session",
        "Publish",
        "Subscribe",
        "Sync",
        "MatchStream",
        "Watch",
        "ServerReflectionInfo",
    }
)
# Time limit of a call without a deadline, by the shape of its response.
UNARY_TIMEOUT_S = 60.0
STREAM_TIMEOUT_S = 3600.0

# Concurrent calls of methods that are open on loopback, health watches for example.
OPEN_CALLS_MAX = 128
# In the metadata of responses to these calls: the clock of this process, Unix time in ms. Tools
# compare it with theirs.
TIME_KEY = "x-kvmesh-time-ms"

# In quotes: this class is generic in the stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
HandlerFunction: TypeAlias = Callable[[Any, Context], Any]
Headers: TypeAlias = Mapping[str, str | bytes]


class RunningCalls:
    """The running calls of a server: a drain reports the ones it cancels and awaits their cleanup.

    grpc's `server.stop` returns once the connections are closed, before handlers have cleaned up.
    """

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], str] = {}

    def names(self) -> list[str]:
        """Returns `/package.Service/Method request-id` of each call, oldest first."""
        return list(self._running.values())

    async def wait_idle(self, timeout_s: float) -> list[str]:
        """Waits until every handler has returned; returns the names of those that have not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._running and (left_s := deadline - loop.time()) > 0:
            await asyncio.wait(set(self._running), timeout=left_s)
        return self.names()

    @contextmanager
    def track(self, name: str) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._running[task] = name
        try:
            yield
        finally:
            del self._running[task]


class _OpenCalls:
    """Limits the concurrent calls of methods that are open on loopback. A drain ignores them."""

    def __init__(self) -> None:
        self._running = 0

    @contextmanager
    def count(self) -> Iterator[None]:
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def check(self) -> None:
        """Raises Overloaded if the running calls, with this one, exceed the limit."""
        if self._running > OPEN_CALLS_MAX:
            raise errors.Overloaded(1.0, f"too many health and reflection calls: {OPEN_CALLS_MAX}")


class MeshInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler as described above."""

    def __init__(
        self,
        *,
        callers: CallerCheck,
        calls: RunningCalls | None = None,
        tracer: trace.Tracer | None = None,
    ) -> None:
        """Creates it for one server.

        callers: authenticates the callers.
        calls: tracks running calls.
        tracer: makes the SERVER spans; None: of the global provider.
        """
        self._callers = callers
        self._calls = RunningCalls() if calls is None else calls
        self._tracer = trace.get_tracer("kvmesh") if tracer is None else tracer
        self._open_calls = _OpenCalls()
        # By method; bounded, since unknown methods have no handler.
        self._wrapped_handlers: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the wrapped handler of a known method; for others grpc returns UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped_handlers.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped_handlers[method] = (handler, self.wrap(method, handler))
        return known[1]

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Returns the handler of a method with all that the interceptor adds."""
        make_handler, run = _as_coroutine(handler)
        is_long_lived = method.rpartition("/")[2] in LONG_LIVED_METHODS
        default_timeout_s = STREAM_TIMEOUT_S if handler.response_streaming else UNARY_TIMEOUT_S
        served = _ServedMethod(
            name=method,
            run=run,
            callers=self._callers,
            calls=self._calls,
            open_calls=self._open_calls if is_open_on_loopback(method) else None,
            tracer=self._tracer,
            is_long_lived=is_long_lived,
            timeout_s=None if is_long_lived else default_timeout_s,
            is_unary=not (handler.request_streaming or handler.response_streaming),
        )
        return make_handler(
            served.serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServedMethod:
    """One method of a server, and what the interceptor does around each of its calls."""

    name: str
    """`/package.Service/Method`."""
    run: HandlerFunction
    callers: CallerCheck
    calls: RunningCalls
    open_calls: _OpenCalls | None
    """Counts the calls, in place of `calls`, of a method that is open on loopback."""
    tracer: trace.Tracer
    is_long_lived: bool
    """Whether calls live as long as their peers; then without span and request id."""
    timeout_s: float | None
    """Limit of a call without a deadline; None: no limit."""
    is_unary: bool
    """Whether request and response are one message each."""

    async def serve(self, request: Any, context: Context) -> Any:
        headers = dict(context.invocation_metadata() or ())
        with self._count(headers):
            try:
                if proofs := self._admit(headers, context):
                    await self._send_proofs(proofs, context)
                with self._trace(headers):
                    return await self._run_in_time(request, context)
            except Exception as error:
                await _abort_call(self.name, error, context)

    def _count(self, headers: Headers) -> AbstractContextManager[None]:
        """Counts the call as running, under its request id, until the end of `with`."""
        name = self.name
        if not self.is_long_lived:
            name = f"{name} {bind_incoming_request_id(headers)}"
        return self.calls.track(name) if self.open_calls is None else self.open_calls.count()

    def _admit(self, headers: Headers, context: Context) -> tuple[tuple[str, str], ...]:
        """Returns metadata with the proofs of this process for the caller. Raises MeshError for a
        caller that may not call the method."""
        if self.open_calls is not None:
            self.open_calls.check()
        admission = self.callers.check(self.name, headers, context)
        bind_caller_id(admission.caller_id, is_operator=admission.is_operator)
        if self.open_calls is not None:
            return (*admission.metadata, (TIME_KEY, f"{time.time() * 1000:.0f}"))
        return admission.metadata

    async def _send_proofs(self, proofs: tuple[tuple[str, str], ...], context: Context) -> None:
        """Sends the proofs of this process. The response of a unary call takes them along: on their
        own they would cost a third of the call, and the caller has sent its only message
        already."""
        if self.is_unary:
            context.set_trailing_metadata(proofs)
        else:
            await context.send_initial_metadata(proofs)

    def _trace(self, headers: Headers) -> AbstractContextManager[None]:
        """Runs `with` in the caller's trace."""
        if self.is_long_lived:
            return nullcontext()
        return _server_span(self.tracer, self.name, headers)

    async def _run_in_time(self, request: Any, context: Context) -> Any:
        """Runs the handler. Raises DeadlineExceeded after the limit of a call without deadline."""
        limit_s = bind_incoming_deadline(context.time_remaining(), self.timeout_s)
        try:
            async with asyncio.timeout(limit_s) as timeout_scope:
                return await self.run(request, context)
        except TimeoutError:
            if not timeout_scope.expired():
                raise  # Raised by the handler: a bug, reported as an internal error.
            raise errors.DeadlineExceeded(
                f"call not finished within {limit_s:g} s, the limit for calls without a deadline"
            ) from None


@contextmanager
def _server_span(tracer: trace.Tracer, method: str, headers: Headers) -> Iterator[None]:
    """A SERVER span, if the caller's span is sampled."""
    header = headers.get(TRACEPARENT_KEY)
    parent = telemetry.context_from_traceparent(header if isinstance(header, str) else None)
    if parent is None:
        yield
        return
    if not telemetry.is_sampled(parent):
        # No span, but outgoing calls still belong to the caller's trace.
        token = otel_context.attach(parent)
        try:
            yield
        finally:
            otel_context.detach(token)
        return
    name = method.lstrip("/")
    with tracer.start_as_current_span(
        name,
        parent,
        trace.SpanKind.SERVER,
        {"rpc.system.name": "grpc", "rpc.method": name},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        except Exception as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(trace.StatusCode.ERROR)
            raise


def _as_coroutine(handler: Handler) -> tuple[Callable[..., Handler], HandlerFunction]:
    """Returns the function that makes handlers of this shape, and the handler as a coroutine.

    A handler of one request and many responses is called as for a stream of requests: before the
    request comes. A client with a mesh token sends the request only after the proof of this
    process.
    """
    # Any: which of the functions is set depends on the shape.
    functions: Any = handler
    if not handler.response_streaming:
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler, functions.stream_unary
        return grpc.unary_unary_rpc_method_handler, functions.unary_unary
    if handler.request_streaming:
        run = partial(_run_stream, functions.stream_stream)
    else:
        run = partial(_run_first_request, functions.unary_stream)
    return grpc.stream_stream_rpc_method_handler, run


async def _run_first_request(
    handler_function: HandlerFunction, requests: AsyncIterable[Any], context: Context
) -> None:
    async for request in requests:
        await _run_stream(handler_function, request, context)
        return
    raise errors.InvalidRequest("the call has no request")


async def _run_stream(handler_function: HandlerFunction, request: Any, context: Context) -> None:
    result = handler_function(request, context)
    if not hasattr(result, "__aiter__"):
        await result  # It writes to the context itself.
        return
    try:
        async for message in result:
            await context.write(message)
    finally:
        if (close := getattr(result, "aclose", None)) is not None:
            await close()


async def _abort_call(method: str, error: Exception, context: Context) -> None:
    """Ends the call with the status of an error; always raises."""
    if isinstance(error, grpc.aio.AbortError) or context.done():
        raise error  # The handler has aborted the call, or the caller has disconnected.
    known = error if isinstance(error, MeshError) else None
    if known is None or isinstance(known, errors.InternalError):
        LOG.error("rpc_failed", method=method, exc_info=error)
    if known is None:
        # Details of unexpected errors are logged and not sent to the caller.
        current_id = request_id()
        known = errors.InternalError(
            "internal error", metadata={"request_id": current_id} if current_id else None
        )
    code, status = mesh_error_to_status(known)
    await context.abort(code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
