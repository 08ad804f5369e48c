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
import hmac
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
import structlog
from opentelemetry import context as otel_context
from opentelemetry import trace

from common import errors
from common.errors import MeshError
from common.rpc.call_context import (
    AUTHORIZATION_KEY,
    TRACEPARENT_KEY,
    bind_incoming_deadline,
    bind_incoming_request_id,
    request_id,
)
from common.rpc.roles import check_caller
from common.rpc.status import STATUS_DETAILS_KEY, mesh_error_to_status
from common.runtime import telemetry
from common.runtime.hosts import is_loopback
from common.runtime.mesh_auth import CALL_SCHEME, CallVerifier, MeshSecret

LOG = structlog.get_logger(__name__)

# In the metadata of a server, initial of streams and trailing of unary calls: it has the mesh token
# too.
REPLY_KEY = "x-kvmesh-proof"

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

# Open to callers on this host even if a token is required: they expose nothing confidential.
_UNAUTHENTICATED_SERVICES = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)
# Their concurrent calls, health watches for example.
OPEN_CALLS_MAX = 128
# Operations on a process. They need the admin token, on loopback too.
_ADMIN_SERVICE = "/kvmesh.engine.v1.AdminService/"


# In quotes: these classes are generic in the stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
HandlerFunction: TypeAlias = Callable[[Any, Context], Any]


class RunningCalls:
    """The running calls of a server: a drain reports the ones it cancels and awaits their cleanup.

    grpc's `server.stop` returns once the connections are closed, before handlers have cleaned up.
    """

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], str] = {}

    def names(self) -> list[str]:
        """`/package.Service/Method request-id` of each call, oldest first."""
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


class MeshInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler as described above.

    token: the mesh token that callers must prove, or None. addresses: under which they dial.
    admin_token: the token that callers of AdminService send in its place; None: they are refused.
    role_domain: of the names that bind the certificates of callers to roles; None: any certificate.
    calls: tracks running calls. tracer: makes the SERVER spans; None: of the global provider.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        admin_token: str | None = None,
        role_domain: str | None = None,
        addresses: Collection[str] = (),
        calls: RunningCalls | None = None,
        tracer: trace.Tracer | None = None,
    ) -> None:
        self._verifier = None if token is None else CallVerifier(MeshSecret(token), addresses)
        self._mesh_bearer = _authorization(token)
        self._admin_authorization = _authorization(admin_token)
        self._role_domain = role_domain
        self._calls = RunningCalls() if calls is None else calls
        self._tracer = trace.get_tracer("kvmesh") if tracer is None else tracer
        self._open_calls = 0
        # By method; bounded, since unknown methods have no handler.
        self._wrapped_handlers: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The wrapped handler of a known method; for others grpc returns UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped_handlers.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped_handlers[method] = (handler, self.wrap(method, handler))
        return known[1]

    def wrap(self, method: str, handler: Handler) -> Handler:
        """The handler of a method with all that the interceptor adds."""
        is_stream = handler.response_streaming
        if is_stream and not handler.request_streaming:
            handler = _as_stream(handler)
        request_arity = "stream" if handler.request_streaming else "unary"
        arity = f"{request_arity}_{'stream' if is_stream else 'unary'}"
        run: HandlerFunction = getattr(handler, arity)
        if is_stream:
            run = partial(_run_stream, run)
        make_handler: Callable[..., Handler] = getattr(grpc, f"{arity}_rpc_method_handler")
        is_long_lived = method.rpartition("/")[2] in LONG_LIVED_METHODS
        default_timeout_s = STREAM_TIMEOUT_S if is_stream else UNARY_TIMEOUT_S
        timeout_s = None if is_long_lived else default_timeout_s

        async def serve(request: Any, context: Context) -> Any:
            headers = dict(context.invocation_metadata() or ())
            name = method if is_long_lived else f"{method} {bind_incoming_request_id(headers)}"
            # A drain does not wait for health watchers.
            is_tracked = not is_open_on_loopback(method)
            with self._calls.track(name) if is_tracked else self._count_open_call():
                try:
                    if not is_tracked and self._open_calls > OPEN_CALLS_MAX:
                        raise errors.Overloaded(
                            1.0, f"too many health and reflection calls: {OPEN_CALLS_MAX}"
                        )
                    if self._role_domain is not None and is_tracked:
                        check_caller(method, _certificate_names(context), self._role_domain)
                    if reply := self._authenticate(method, headers, context.peer()):
                        await _send_proof(reply, context, is_unary=arity == "unary_unary")
                    with nullcontext() if is_long_lived else self._server_span(method, headers):
                        limit_s = bind_incoming_deadline(context.time_remaining(), timeout_s)
                        return await _run_with_timeout(limit_s, run(request, context))
                except Exception as error:
                    await _abort_call(method, error, context)

        return make_handler(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    @contextmanager
    def _count_open_call(self) -> Iterator[None]:
        self._open_calls += 1
        try:
            yield
        finally:
            self._open_calls -= 1

    def _authenticate(
        self, method: str, headers: Mapping[str, str | bytes], peer: str
    ) -> str | None:
        """What proves this process to the caller, if a mesh token is required."""
        text = headers.get(AUTHORIZATION_KEY)
        header = text.encode() if isinstance(text, str) else text
        if method.startswith(_ADMIN_SERVICE):
            self._authorize_admin(header)
            LOG.info("admin_call", method=method, peer=peer)
            return None
        if self._verifier is None or (is_open_on_loopback(method) and _is_local_peer(peer)):
            return None
        return self._verifier.check(method, text if isinstance(text, str) else "", time.time())

    def _authorize_admin(self, header: bytes | None) -> None:
        if self._admin_authorization is None:
            raise errors.PermissionDenied(
                "AdminService is off: start the process with --admin-token to permit it"
            )
        if header is None:
            raise errors.Unauthenticated("an admin token is required: authorization: Bearer ...")
        if hmac.compare_digest(header, self._admin_authorization):
            return
        is_bearer = self._mesh_bearer and hmac.compare_digest(header, self._mesh_bearer)
        if is_bearer or header.startswith(CALL_SCHEME.encode()):
            raise errors.PermissionDenied("the mesh token does not permit AdminService")
        raise errors.Unauthenticated("the admin token is wrong")

    @contextmanager
    def _server_span(self, method: str, headers: Mapping[str, str | bytes]) -> Iterator[None]:
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
        with self._tracer.start_as_current_span(
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


async def _send_proof(reply: str, context: Context, *, is_unary: bool) -> None:
    """Sends the reply that proves this process. The response of a unary call takes it along: on its
    own it would cost a third of the call, and the caller has sent its only message already."""
    if is_unary:
        context.set_trailing_metadata(((REPLY_KEY, reply),))
    else:
        await context.send_initial_metadata(((REPLY_KEY, reply),))


def _as_stream(handler: Handler) -> Handler:
    """The handler of one request, called as for a stream of requests: before the request comes. A
    client with a mesh token sends the request only after the proof of this process."""

    async def serve(requests: Any, context: Context) -> None:
        async for request in requests:
            await _run_stream(cast(HandlerFunction, handler.unary_stream), request, context)
            return
        raise errors.InvalidRequest("the call has no request")

    return grpc.stream_stream_rpc_method_handler(
        serve,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


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


async def _run_with_timeout(limit_s: float | None, work: Awaitable[Any]) -> Any:
    try:
        async with asyncio.timeout(limit_s) as timeout_scope:
            return await work
    except TimeoutError:
        if not timeout_scope.expired():
            raise  # Raised by the handler: a bug, reported as an internal error.
        raise errors.DeadlineExceeded(
            f"call not finished within {limit_s:g} s, the limit for calls without a deadline"
        ) from None


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


def is_open_on_loopback(method: str) -> bool:
    """Whether callers on this host need no token for a method."""
    return method.startswith(_UNAUTHENTICATED_SERVICES)


def _certificate_names(context: Context) -> set[str]:
    """The alternative names of the caller's certificate."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return {name.decode(errors="replace") for name in names}


def _authorization(token: str | None) -> bytes | None:
    """The header that carries the token."""
    return None if token is None else f"Bearer {token}".encode()


def _is_local_peer(peer: str) -> bool:
    """Whether a grpc peer (`ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5`, `unix:...`) is on this host."""
    scheme, _, rest = peer.partition(":")
    if scheme == "unix":
        return True
    host = urllib.parse.unquote(rest).rpartition(":")[0]
    return is_loopback(host)
