"""The parts common to all RPCs: error status, request ids, deadlines, tracing, authentication.

One server interceptor does all of it, in this order: authenticate, take or create the request id,
start the SERVER span if the caller's span is sampled, limit the time, run the handler, convert its
errors. Services only raise `MeshError`s. Clients have no interceptors (those for stream-stream
calls leak, grpc#25449): `outgoing_metadata` returns the metadata of a call, and
`mesh_error_from_rpc` turns its failure back into the error that the peer raised.

Handlers of all shapes run as coroutines that write to the context. So the `finally` of an async
generator runs inside the RPC's task if the caller disconnects; grpc.aio alone leaves it to the
garbage collector.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import time
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from opentelemetry import context as otel_context
from opentelemetry import trace

from common import errors
from common.errors import MeshError
from common.rpc.roles import check_caller
from common.runtime import telemetry
from common.runtime.hosts import is_loopback
from common.runtime.mesh_auth import CALL_SCHEME, CallVerifier, MeshSecret

LOG = structlog.get_logger(__name__)

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
AUTHORIZATION_KEY = "authorization"
# In the metadata of a server, initial of streams and trailing of unary calls: it has the mesh token
# too.
REPLY_KEY = "x-kvmesh-proof"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "kvmesh"

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

_GRPC_CODE_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
# For a status that carries no details of ours: proxies, the gRPC library, other servers.
_ERROR_BY_CODE: Mapping[grpc.StatusCode, type[MeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Conflict,
    grpc.StatusCode.ALREADY_EXISTS: errors.Conflict,
    grpc.StatusCode.ABORTED: errors.Conflict,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    # Not by us, or it would carry details: a failure of the transport.
    grpc.StatusCode.INTERNAL: errors.Unavailable,
    # Not by us, or there would be no status to read: a stopping server answers so to calls that it
    # has not begun.
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unimplemented,
}

# What grpc reports for a write on a connection that was reset.
_RESET_TEXTS = {"Internal error from Core": "the connection was reset"}

# grpc rejects headers above 8 KiB with growing probability, so long errors are cut. Worst case in
# bytes: the message three times as percent-encoded text, and once in the details; their base64 is
# 4/3 of their sum.
_MESSAGE_BYTES_MAX = 768
_FIELD_BYTES_MAX = 256
_VALUE_BYTES_MAX = 128
_METADATA_ENTRIES_MAX = 8
# Keys in ErrorInfo's metadata that the receiver removes.
_KIND_KEY, _RETRYABLE_KEY = "kind", "retryable"

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_request_id: ContextVar[str | None] = ContextVar("kvmesh_request_id", default=None)
_deadline: ContextVar[float | None] = ContextVar("kvmesh_deadline", default=None)

# In quotes: these classes are generic in the stubs only.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
HandlerFunction: TypeAlias = Callable[[Any, Context], Any]


def request_id() -> str | None:
    """The request id of the current task, or None."""
    return _request_id.get()


def remaining_time_s(timeout_s: float) -> float:
    """Timeout of an outgoing call: `timeout_s`, or the shorter rest of the current RPC's time."""
    deadline = _deadline.get()
    if deadline is None:
        return timeout_s
    return max(0.0, min(timeout_s, deadline - asyncio.get_running_loop().time()))


def outgoing_metadata(credential: str | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata of an outgoing call: credential, request id and traceparent, if set."""
    entries = (
        (AUTHORIZATION_KEY, credential),
        (REQUEST_ID_KEY, _request_id.get()),
        (TRACEPARENT_KEY, telemetry.current_traceparent()),
    )
    return tuple((key, value) for key, value in entries if value is not None)


def mesh_error_to_status(error: MeshError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """The gRPC status code of an error, and its status with details. Long texts are cut."""
    code = errors.status_code(error)
    status = status_pb2.Status(code=code, message=_truncate(error.message, _MESSAGE_BYTES_MAX))
    entries = list(error.metadata.items())[:_METADATA_ENTRIES_MAX]
    metadata = {
        _truncate(key, _VALUE_BYTES_MAX): _truncate(value, _VALUE_BYTES_MAX)
        for key, value in entries
    }
    metadata[_KIND_KEY] = type(error).kind
    metadata[_RETRYABLE_KEY] = "true" if error.retryable else "false"
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(
            reason=_truncate(error.reason, _VALUE_BYTES_MAX), domain=ERROR_DOMAIN, metadata=metadata
        )
    )
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_truncate(error.field, _FIELD_BYTES_MAX),
            description=_truncate(error.message, _FIELD_BYTES_MAX),
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None and math.isfinite(error.retry_after_s):
        delay = Duration()
        delay.FromNanoseconds(round(max(0.0, error.retry_after_s) * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return _GRPC_CODE_BY_NUMBER[code], status


def mesh_error_from_rpc(error: grpc.aio.AioRpcError) -> MeshError:
    """The error that a peer raised; without usable details, the class nearest to the status."""
    trailing = error.trailing_metadata()
    raw = trailing.get(STATUS_DETAILS_KEY) if trailing is not None else None
    text = _RESET_TEXTS.get(error.details() or "", error.details() or "")
    return mesh_error_from_status(error.code(), text, raw if isinstance(raw, bytes) else None)


def mesh_error_from_status(
    code: grpc.StatusCode, message: str, raw_details: bytes | None
) -> MeshError:
    """The same for the parts of a status. raw_details: its STATUS_DETAILS_KEY."""
    message = message or code.name
    info, field, retry_after_s = _unpack_details(raw_details)
    cls = errors.ERROR_CLASS_BY_KIND.get(info.metadata[_KIND_KEY]) if info is not None else None
    if info is not None and cls is not None:
        metadata = {k: v for k, v in info.metadata.items() if k not in (_KIND_KEY, _RETRYABLE_KEY)}
        return cls.restore(
            message,
            field=field,
            retry_after_s=retry_after_s,
            reason=info.reason,
            metadata=metadata,
            retryable=info.metadata.get(_RETRYABLE_KEY) == "true",
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        # The library reports a message above the limit as "exhausted"; a retry cannot succeed.
        return errors.InvalidRequest(message, reason="MESSAGE_TOO_LARGE")
    cls = _ERROR_BY_CODE.get(code, errors.InternalError)
    return cls.restore(message, field=field, retry_after_s=retry_after_s)


@contextmanager
def map_rpc_errors() -> Iterator[None]:
    """Turns AioRpcErrors of the block into MeshErrors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise mesh_error_from_rpc(error) from error


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
            name = method if is_long_lived else f"{method} {_bind_incoming_request_id(headers)}"
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
                        limit_s = _bind_incoming_deadline(context.time_remaining(), timeout_s)
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
        current_id = _request_id.get()
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


def _bind_incoming_request_id(headers: Mapping[str, str | bytes]) -> str:
    header_value = headers.get(REQUEST_ID_KEY)
    # Ids appear in logs and headers: an unprintable or long one is replaced.
    is_valid = isinstance(header_value, str) and _REQUEST_ID.fullmatch(header_value)
    effective_id = header_value if isinstance(header_value, str) and is_valid else uuid.uuid4().hex
    # Each RPC is a task with its own context, so no reset is needed.
    _request_id.set(effective_id)
    structlog.contextvars.bind_contextvars(request_id=effective_id)
    return effective_id


def _bind_incoming_deadline(remaining_s: float | None, timeout_s: float | None) -> float | None:
    """Sets the RPC's deadline for outgoing calls; returns the limit to enforce here, or None.

    grpc cancels the handler at the caller's deadline, so only calls without one have a limit here.
    """
    left_s = timeout_s if remaining_s is None else remaining_s
    if left_s is not None:
        _deadline.set(asyncio.get_running_loop().time() + left_s)
    return timeout_s if remaining_s is None else None


def _is_local_peer(peer: str) -> bool:
    """Whether a grpc peer (`ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5`, `unix:...`) is on this host."""
    scheme, _, rest = peer.partition(":")
    if scheme == "unix":
        return True
    host = urllib.parse.unquote(rest).rpartition(":")[0]
    return is_loopback(host)


def _unpack_details(
    raw: bytes | None,
) -> tuple[error_details_pb2.ErrorInfo | None, str | None, float | None]:
    info, field, retry_after_s = None, None, None
    try:
        details = () if raw is None else status_pb2.Status.FromString(raw).details
    except DecodeError:
        LOG.debug("status_details_unreadable")
        return info, field, retry_after_s
    for detail in details:
        error_info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        try:
            if detail.Unpack(error_info) and error_info.domain == ERROR_DOMAIN:
                info = error_info
            elif detail.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        except DecodeError:
            LOG.debug("status_detail_unreadable", type=detail.type_url)
    return info, field, retry_after_s


def _truncate(text: str, bytes_max: int) -> str:
    """At most `bytes_max` bytes of UTF-8; lone surrogates (from a client's JSON) are replaced."""
    data = text.encode(errors="replace")
    if len(data) <= bytes_max:
        return data.decode()
    return data[: bytes_max - 3].decode(errors="ignore") + "…"
