"""gRPC channels, servers and client calls, with one set of options for all services.

Pings: clients ping every KEEPALIVE_INTERVAL_S, also without calls, and servers accept any number of
pings. So a silent stream (a long prefill) is neither lost nor ended by GOAWAY `too_many_pings`.
Messages may have MESSAGE_BYTES_MAX in both directions. A call continues if its client drops it
(since grpcio 1.83 even if the object is collected): always use `cancelling`.

Security: plaintext on loopback by default; a mesh token, which both sides of every call prove and
never send (`common/runtime/mesh_auth.py`); mutual TLS if certificates are given, and roles that
they name (`roles.py`). `bind` rejects an open port without token or mutual TLS.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry import trace

from common.errors import Conflict, InvalidRequest, Unauthenticated
from common.rpc.authentication import REPLY_KEY, CallerCheck, is_open_on_loopback
from common.rpc.call_context import outgoing_metadata, remaining_time_s
from common.rpc.interceptors import MeshInterceptor, RunningCalls
from common.rpc.roles import certificate_name
from common.rpc.status import map_rpc_errors, mesh_error_from_rpc
from common.runtime.certificates import CertificateFiles, Pem
from common.runtime.config import ServiceConfig, flag_name
from common.runtime.hosts import WILDCARD_HOSTS, is_loopback
from common.runtime.mesh_auth import MeshSecret
from common.runtime.tasks import TaskGroup

KEEPALIVE_INTERVAL_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
METADATA_BYTES_MAX = 32 * 1024
CONNECT_TIMEOUT_S = 2.0
RECONNECT_BACKOFF_MAX_S = 2.0
# After the grace period of `stop`, cancelled handlers have this long to clean up.
CLEANUP_TIMEOUT_S = 5.0
# The status of a refused call comes at once.
STATUS_TIMEOUT_S = 1.0

_SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_CallT = TypeVar("_CallT", bound=grpc.aio.Call)
_MessageT = TypeVar("_MessageT")
_Options = list[tuple[str, Any]]  # Values are ints or strings.


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials that a process proves to its peers and requires of them; by default none.

    token: the mesh token, never sent; admin_token: required of callers of AdminService; files:
    for mutual TLS; server_name: the name in the peers' certificates if it is not their address;
    role_domain: of the names that bind certificates to roles; insecure: allow an open bind without
    token or mutual TLS.
    """

    token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    files: CertificateFiles | None = field(default=None, repr=False)
    server_name: str | None = None
    role_domain: str | None = None
    insecure: bool = False

    def peer_name(self, role: str) -> str | None:
        """The name in the certificate of a peer; None: its address. role: required if roles are
        bound to certificates."""
        if self.role_domain is None:
            return self.server_name
        assert role, "a call without the role of its peer"
        return certificate_name(role, self.role_domain)

    @property
    def uses_mutual_tls(self) -> bool:
        return self.files is not None


PLAINTEXT = Security()


def security_from_config(config: ServiceConfig) -> Security:
    """The security of a configuration. Raises InvalidRequest with an unreadable file's setting."""
    settings = ("tls_cert_path", "tls_key_path", "tls_ca_path")
    paths = {setting: getattr(config, setting) for setting in settings}
    return Security(
        token=config.mesh_token,
        admin_token=config.admin_token,
        files=CertificateFiles(paths) if all(paths.values()) else None,
        server_name=config.tls_server_name,
        role_domain=config.tls_role_domain,
        insecure=config.insecure,
    )


def channel(
    address: str,
    *,
    role: str = "",
    security: Security = PLAINTEXT,
    keepalive_s: float = KEEPALIVE_INTERVAL_S,
) -> grpc.aio.Channel:
    """A channel to `host:port`. Its calls carry request id, traceparent and proof of the token.

    role: of the peer, which its certificate proves if roles are bound to certificates; then it is
    required. The channel keeps the certificates of now: open one for each stream.
    """
    options = _channel_options(keepalive_s)
    if security.files is None:
        made = grpc.aio.insecure_channel(address, options=options)
    else:
        if (name := security.peer_name(role)) is not None:
            options.append(("grpc.ssl_target_name_override", name))
        pem = security.files.newest()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        made = grpc.aio.secure_channel(address, credentials, options=options)
    secret = None if security.token is None else MeshSecret(security.token)
    # In place of client interceptors, which leak (`common/rpc/interceptors.py`).
    for shape in _SHAPES:
        setattr(made, shape, partial(_with_metadata, getattr(made, shape), secret, address))
    return made


def _with_metadata(
    make: Callable[..., Any],
    secret: MeshSecret | None,
    address: str,
    method: str,
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """A stub's method whose calls carry the metadata of their moment."""
    multi_callable = make(method, *args, **kwargs)

    def start_call(*args: Any, metadata: Iterable[Any] = (), **kwargs: Any) -> Any:
        credential = None if secret is None else secret.sign_call(method, address, time.time())
        sent = (*outgoing_metadata(credential), *metadata)
        call = multi_callable(*args, metadata=sent, **kwargs)
        if secret is not None and credential is not None and not is_open_on_loopback(method):
            _expected_replies[call] = secret.reply_to(credential)
        return call

    return start_call


# Call -> the reply that proves the peer, until it has come.
_expected_replies: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


async def confirm_peer(call: Any) -> None:
    """Returns once the peer of a stream has proved the mesh token; at once if it has, or if there
    is none. To be awaited before the first message that is not for every process.

    Raises Unauthenticated, or the MeshError with which the peer refused the call.
    """
    expected = _expected_replies.get(call)
    if expected is None:
        return
    with map_rpc_errors():
        replied = dict(await call.initial_metadata() or ())
        if replied.get(REPLY_KEY) != expected:
            try:
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    failed = await call.code() is not grpc.StatusCode.OK
            except TimeoutError:
                failed = False
            if failed:
                raise await _failure_of(call)
            raise _unproved()
    _expected_replies.pop(call, None)


def _unproved() -> Unauthenticated:
    return Unauthenticated("the peer does not prove that it has the mesh token")


async def _failure_of(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
    )


def server(
    *,
    security: Security = PLAINTEXT,
    addresses: Collection[str] = (),
    calls: RunningCalls | None = None,
    tracer: trace.Tracer | None = None,
) -> grpc.aio.Server:
    """A server with `MeshInterceptor`.

    addresses: under which peers dial it, `own_addresses` of the bound port. May be filled later.
    """
    interceptor = mesh_interceptor(security, addresses, calls, tracer)
    return grpc.aio.server(interceptors=[interceptor], options=_server_options())


def mesh_interceptor(
    security: Security,
    addresses: Collection[str],
    calls: RunningCalls | None = None,
    tracer: trace.Tracer | None = None,
) -> MeshInterceptor:
    """The interceptor of a server; see `server`."""
    callers = CallerCheck(
        token=security.token,
        admin_token=security.admin_token,
        role_domain=security.role_domain,
        addresses=addresses,
    )
    return MeshInterceptor(callers=callers, calls=calls, tracer=tracer)


def bind(
    grpc_server: grpc.aio.Server, host: str, port: int, *, security: Security = PLAINTEXT
) -> int:
    """Opens a port (0: any) and returns it. Call before `start`.

    New connections use the newest certificates. Raises InvalidRequest for an open host without
    token, mutual TLS or `insecure`, and Conflict if the address cannot be bound.
    """
    check_open_host(host, security)
    check_bindable(host, port, "port")
    address = join_address(host, port)
    try:
        if security.files is None:
            return grpc_server.add_insecure_port(address)
        return grpc_server.add_secure_port(address, _server_credentials(security.files))
    except RuntimeError as error:
        raise Conflict(f"cannot bind {address}: {error}", reason="ADDRESS_IN_USE") from error


def check_open_host(host: str, security: Security) -> None:
    """Raises InvalidRequest for an open host without token, mutual TLS or `insecure`."""
    if not (is_loopback(host) or security.token or security.uses_mutual_tls or security.insecure):
        raise InvalidRequest(
            f"{host!r} is open to other hosts: needs a token or mutual TLS", "host"
        )


def _server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """They require a certificate of clients, and follow the files."""
    used = files.newest()

    # In each handshake, in a thread of grpc.
    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        before, used = used, files.newest()
        return None if used is before else _server_configuration(used)

    # The stub omits the None that leaves the certificates as they are.
    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(used),
        cast(Callable[[], grpc.ServerCertificateConfiguration], fetch),
        require_client_authentication=True,
    )


def _server_configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def own_addresses(host: str, port: int, advertise_host: str | None = None) -> set[str]:
    """Each `host:port` under which peers dial a server that is bound so."""
    hosts = {host, advertise_host or host}
    if is_loopback(host) or host in WILDCARD_HOSTS:
        hosts |= {"127.0.0.1", "::1", "localhost"}
    return {join_address(one, port) for one in hosts}


def join_address(host: str, port: int) -> str:
    """`host:port`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_bindable(host: str, port: int, setting: str) -> None:
    """Raises Conflict with the reason, which grpc hides. setting: the field `port` is from."""
    if (bind_error := _find_bind_error(host, port)) is not None:
        raise Conflict(
            f"cannot bind {join_address(host, port)} (--host, {flag_name(setting)}): "
            f"{bind_error.strerror}",
            field=setting,
            reason="ADDRESS_IN_USE",
        ) from bind_error


def _find_bind_error(host: str, port: int) -> OSError | None:
    """Why none of the host's addresses can be bound now, or None."""
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    for family, socket_type, _, _, address in addresses:
        try:
            with socket.socket(family, socket_type) as probe_socket:
                probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe_socket.bind(address)
                return None
        except OSError as error:
            bind_error = error
    return bind_error


async def stop(
    grpc_server: grpc.aio.Server,
    grace_s: float,
    calls: RunningCalls,
    *,
    end_streams: Callable[[], None] = lambda: None,
    cleanup_timeout_s: float = CLEANUP_TIMEOUT_S,
) -> list[str]:
    """Rejects new calls, gives running ones `grace_s`, cancels the rest and awaits their cleanup.

    calls: as passed to `server`. end_streams: cancels calls of another server that `calls` counts.
    Returns the names of the cancelled calls.
    """
    async with TaskGroup() as group:
        group.create_task(grpc_server.stop(grace_s + cleanup_timeout_s), name="refuse new calls")
        cancelled_calls = await calls.wait_idle(grace_s)
        end_streams()
        await grpc_server.stop(None)
    await calls.wait_idle(cleanup_timeout_s)
    return cancelled_calls


def add_health(grpc_server: grpc.aio.Server, servicer: health.aio.HealthServicer) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(servicer, grpc_server)


def enable_reflection(grpc_server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Lets grpcurl list and call the named services (full names), health and reflection."""
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, grpc_server)


@asynccontextmanager
async def cancelling(call: _CallT) -> AsyncIterator[_CallT]:
    """Cancels the call at the end of the block, however that is reached; no-op if finished."""
    try:
        yield call
    finally:
        call.cancel()


async def read(
    call: grpc.aio.UnaryStreamCall[Any, _MessageT] | grpc.aio.StreamStreamCall[Any, _MessageT],
) -> _MessageT | None:
    """The next message of a stream; None at its end. Raises MeshError if the call failed."""
    try:
        await confirm_peer(call)
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise mesh_error_from_rpc(error) from error
    return None if message is grpc.aio.EOF else cast(_MessageT, message)


async def unary(method: Callable[..., Any], request: Any, *, timeout_s: float) -> Any:
    """The response of a stub's unary-unary method. Raises MeshError.

    timeout_s: upper limit; the time left of the current RPC may be shorter. Any: annotate the
    variable that takes the response.
    """
    call = method(request, timeout=remaining_time_s(timeout_s))
    with map_rpc_errors():
        async with cancelling(call):
            response = await call
            expected = _expected_replies.pop(call, None)
            if expected is not None:
                trailing = dict(await call.trailing_metadata() or ())
                if trailing.get(REPLY_KEY) != expected:
                    raise _unproved()
            return response


def _channel_options(keepalive_s: float) -> _Options:
    return [
        *_shared_options(keepalive_s),
        # A channel owns its connection: closing it ends the connection and its back-off.
        ("grpc.use_local_subchannel_pool", 1),
        # The mesh is direct: no proxy from the environment, no service config from DNS.
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(RECONNECT_BACKOFF_MAX_S * 1000)),
    ]


def _server_options() -> _Options:
    return [
        *_shared_options(KEEPALIVE_INTERVAL_S),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
        ("grpc.http2.max_ping_strikes", 0),  # 0: never a GOAWAY for pings.
        ("grpc.max_concurrent_streams", 2**31 - 1),
        ("grpc.so_reuseport", 0),  # Two processes on one port would share it silently.
    ]


def _shared_options(keepalive_s: float) -> _Options:
    return [
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # 0: no limit.
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        # Between these two limits grpc rejects headers at random; ours stay below both.
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
    ]
