"""gRPC channels, servers and client calls, with one set of options for all services.

Pings: clients ping every KEEPALIVE_INTERVAL_S, also without calls, and servers accept pings at any
such interval. So a silent stream (a long prefill) is neither lost nor ended by GOAWAY
`too_many_pings`, which a flood of pings is.
Messages may have MESSAGE_BYTES_MAX in both directions. A call continues if its client drops it
(since grpcio 1.83 even if the object is collected): always use `cancelling`.

Security: plaintext on loopback by default; a mesh token, which both sides of every call prove and
never send (`common/runtime/mesh_auth.py`); mutual TLS if certificates are given, and roles that
they name (`roles.py`); with either of them, keys of members, which both sides of a stream prove
(`common/runtime/member_key.py`). `bind` rejects an open port without token or mutual TLS.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry import trace

from common.errors import Conflict, InvalidRequest, Unauthenticated
from common.rpc.authentication import REPLY_KEY, CallerCheck, sign_call
from common.rpc.call_context import outgoing_metadata, remaining_time_s
from common.rpc.interceptors import MeshInterceptor, RunningCalls
from common.rpc.status import map_rpc_errors
from common.runtime.certificate_names import certificate_name
from common.runtime.certificates import CertificateFiles, Pem
from common.runtime.config import ServiceConfig, flag_name
from common.runtime.hosts import WILDCARD_HOSTS, is_loopback
from common.runtime.member_key import MemberKey, MemberKeys
from common.runtime.mesh_auth import MeshSecret
from common.runtime.tasks import TaskGroup

KEEPALIVE_INTERVAL_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
METADATA_BYTES_MAX = 32 * 1024
CONNECT_TIMEOUT_S = 2.0
# Of servers. A ping is a strike if it follows within 100 ms, and nothing was sent between; so peers
# that ping every KEEPALIVE_INTERVAL_S have none.
PING_STRIKES_MAX = 100
# Calls of one connection at a time.
STREAMS_MAX = 1024
# What a server reads at once from a connection.
READ_BYTES_MAX = 256 << 10
# In which a client finishes the TLS handshake, and sends its first settings.
HANDSHAKE_TIMEOUT_S = 10.0
RECONNECT_BACKOFF_MAX_S = 2.0
# After the grace period of `stop`, cancelled handlers have this long to clean up.
CLEANUP_TIMEOUT_S = 5.0

_CallT = TypeVar("_CallT", bound=grpc.aio.Call)
_Options = list[tuple[str, Any]]  # Values are ints or strings.


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials that a process proves to its peers and requires of them; by default none."""

    token: str | None = field(default=None, repr=False)
    """The mesh token, never sent."""

    admin_token: str | None = field(default=None, repr=False)
    """Required of callers of AdminService."""

    operator_token: str | None = field(default=None, repr=False)
    """Accepted of callers of methods for operators."""

    files: CertificateFiles | None = field(default=None, repr=False)
    """Certificates and key for mutual TLS."""

    server_name: str | None = None
    """The name in the peers' certificates if it is not their address."""

    role_domain: str | None = None
    """Domain of the names that bind certificates to roles."""

    insecure: bool = False
    """Permits an open bind without token or mutual TLS."""

    members: MemberKeys = field(default_factory=MemberKeys, repr=False, compare=False)
    """The key of this process, and the keys that its peers have proved."""

    def peer_name(self, role: str) -> str | None:
        """Returns the name in the certificate of a peer; None: its address. role: required if roles
        are bound to certificates."""
        if self.role_domain is None:
            return self.server_name
        assert role, "a call without the role of its peer"
        return certificate_name(role, self.role_domain)

    @property
    def uses_mutual_tls(self) -> bool:
        return self.files is not None


PLAINTEXT = Security()


def security_from_config(config: ServiceConfig, member_key: MemberKey | None = None) -> Security:
    """Returns the security of a configuration. Raises InvalidRequest with an unreadable file's
    setting.

    member_key: of this process; None: it is no member, or one without a key.
    """
    settings = ("tls_cert_path", "tls_key_path", "tls_ca_path")
    paths = {setting: getattr(config, setting) for setting in settings}
    return Security(
        token=config.mesh_token,
        admin_token=config.admin_token,
        operator_token=config.operator_token,
        files=CertificateFiles(paths) if all(paths.values()) else None,
        server_name=config.tls_server_name,
        role_domain=config.tls_role_domain,
        insecure=config.insecure,
        members=MemberKeys(member_key, is_required=config.has_mesh_secret),
    )


class MeshChannel(grpc.aio.Channel):
    """A channel that adds request id, traceparent and proof of the mesh token to each call.

    It wraps a channel in place of client interceptors: those for stream-stream calls leak
    (grpc#25449), and the others cost a task a call.
    """

    def __init__(self, address: str, secret: MeshSecret | None, wrapped: grpc.aio.Channel) -> None:
        """Creates it.

        address: of the peer, `host:port`.
        secret: of the mesh token; None: calls carry no proof, and none is required.
        wrapped: does the calls.
        """
        self._address = address
        self._secret = secret
        self._wrapped = wrapped

    # Any: the types of the messages are those of the stubs.

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._add_metadata(method, self._wrapped.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._add_metadata(method, self._wrapped.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._add_metadata(method, self._wrapped.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._add_metadata(method, self._wrapped.stream_stream(method, *args, **kwargs))

    def _add_metadata(self, method: str, start: Callable[..., Any]) -> ChannelMethod:
        return ChannelMethod(method, self._address, self._secret, start)

    async def close(self, grace: float | None = None) -> None:
        await self._wrapped.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._wrapped.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._wrapped.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._wrapped.channel_ready()

    async def __aenter__(self) -> Self:
        await self._wrapped.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._wrapped.__aexit__(*error)


@dataclass(frozen=True, slots=True)
class ChannelMethod:
    """A method of a channel: starts calls that carry the metadata of their moment."""

    name: str
    """`/package.Service/Method`."""
    address: str
    """Of the peer, `host:port`."""
    secret: MeshSecret | None
    start: Callable[..., Any]
    """Starts a call without metadata of its own."""

    def __call__(self, *args: Any, metadata: Iterable[Any] = (), **kwargs: Any) -> Any:
        """Starts a call and returns it. Whether its peer has the mesh token is not checked."""
        credential, _ = sign_call(self.secret, self.name, self.address)
        return self.start(*args, metadata=(*outgoing_metadata(credential), *metadata), **kwargs)

    def start_call(self, request: Any, timeout_s: float) -> tuple[Any, str | None]:
        """Starts a call with one request. Returns it, and the reply that proves its peer; None:
        none is required."""
        credential, expected_reply = sign_call(self.secret, self.name, self.address)
        call = self.start(request, metadata=outgoing_metadata(credential), timeout=timeout_s)
        return call, expected_reply


def channel(
    address: str,
    *,
    role: str = "",
    security: Security = PLAINTEXT,
    keepalive_s: float = KEEPALIVE_INTERVAL_S,
) -> MeshChannel:
    """Returns a channel to `host:port`.

    `unary` requires that the peer proves the mesh token; streams that carry messages which not
    every process may receive use `stream.py`, which requires it too.

    role: of the peer, which its certificate proves if roles are bound to certificates; then it is
    required. The channel keeps the certificates of now: open one for each stream.
    """
    options = _channel_options(keepalive_s)
    if security.files is None:
        wrapped = grpc.aio.insecure_channel(address, options=options)
    else:
        if (name := security.peer_name(role)) is not None:
            options.append(("grpc.ssl_target_name_override", name))
        pem = security.files.newest()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        wrapped = grpc.aio.secure_channel(address, credentials, options=options)
    secret = None if security.token is None else MeshSecret(security.token)
    return MeshChannel(address, secret, wrapped)


def server(
    *,
    security: Security = PLAINTEXT,
    addresses: Collection[str] = (),
    calls: RunningCalls | None = None,
    tracer: trace.Tracer | None = None,
) -> grpc.aio.Server:
    """Returns a server with `MeshInterceptor`.

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
    """Returns the interceptor of a server; see `server`."""
    callers = CallerCheck(
        token=security.token,
        admin_token=security.admin_token,
        operator_token=security.operator_token,
        role_domain=security.role_domain,
        members=security.members,
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
        return grpc_server.add_secure_port(address, server_credentials(security.files))
    except RuntimeError as error:
        raise Conflict(f"cannot bind {address}: {error}", reason="ADDRESS_IN_USE") from error


def check_open_host(host: str, security: Security) -> None:
    """Raises InvalidRequest for an open host without token, mutual TLS or `insecure`."""
    if not (is_loopback(host) or security.token or security.uses_mutual_tls or security.insecure):
        raise InvalidRequest(
            f"{host!r} is open to other hosts: needs a token or mutual TLS", "host"
        )


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Returns credentials that follow the files. They require a certificate of clients if the files
    have authorities."""
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
        require_client_authentication=bool(used.ca),
    )


def _server_configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca or None)


def own_addresses(host: str, port: int, advertise_host: str | None = None) -> set[str]:
    """Returns each `host:port` under which peers dial a server that is bound so."""
    hosts = {host, advertise_host or host}
    if is_loopback(host) or host in WILDCARD_HOSTS:
        hosts |= {"127.0.0.1", "::1", "localhost"}
    return {join_address(host, port) for host in hosts}


def join_address(host: str, port: int) -> str:
    """Returns `host:port`, an IPv6 host in brackets."""
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
    """Returns why none of the host's addresses can be bound now, or None."""
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


async def unary(method: Callable[..., Any], request: Any, *, timeout_s: float) -> Any:
    """Returns the response of a stub's unary-unary method. Raises MeshError.

    method: of a stub on a `channel`.
    timeout_s: upper limit; the time left of the current RPC may be shorter. Any: annotate the
    variable that takes the response.
    """
    assert isinstance(method, ChannelMethod), "a method of a `channel`"
    call, expected_reply = method.start_call(request, remaining_time_s(timeout_s))
    with map_rpc_errors():
        async with cancelling(call):
            response = await call
            await _check_peer(call, expected_reply)
            return response


async def unary_stream(
    method: Callable[..., Any], request: Any, *, timeout_s: float
) -> AsyncIterator[Any]:
    """Yields the responses of a stub's unary-stream method, as `unary`. That the peer has the mesh
    token is checked after the last one: what is final must be in that."""
    assert isinstance(method, ChannelMethod), "a method of a `channel`"
    call, expected_reply = method.start_call(request, remaining_time_s(timeout_s))
    with map_rpc_errors():
        async with cancelling(call):
            async for response in call:
                yield response
            await _check_peer(call, expected_reply)


async def _check_peer(call: Any, expected_reply: str | None) -> None:
    """Raises Unauthenticated unless a call that has ended has the reply of a peer of the mesh."""
    if expected_reply is not None:
        trailing = dict(await call.trailing_metadata() or ())
        if trailing.get(REPLY_KEY) != expected_reply:
            raise Unauthenticated("the peer does not prove that it has the mesh token")


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
        ("grpc.http2.max_ping_strikes", PING_STRIKES_MAX),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.experimental.tcp_max_read_chunk_size", READ_BYTES_MAX),
        ("grpc.experimental.tcp_max_read_buffer_size", READ_BYTES_MAX),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
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
