"""Permissions of callers, and the proof that both ends of a call have the mesh token.

A caller sends a credential for each call; a server checks it and replies with a proof of its own
(`common/runtime/mesh_auth.py`). Certificates bind callers to roles (`roles.py`).
"""

from __future__ import annotations

import hmac
import time
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import grpc.aio
import structlog

from common import errors
from common.rpc.call_context import AUTHORIZATION_KEY
from common.rpc.roles import check_caller
from common.runtime.hosts import is_loopback
from common.runtime.mesh_auth import CALL_SCHEME, CallVerifier, MeshSecret

LOG = structlog.get_logger(__name__)

# In the metadata of a server, initial of streams and trailing of unary calls: it has the mesh token
# too.
REPLY_KEY = "x-kvmesh-proof"

# Open to callers on this host even if a token is required: they expose nothing confidential.
_UNAUTHENTICATED_SERVICES = (
    "/grpc.health.v1.Health/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)
# Operations on a process. They need the admin token, on loopback too.
_ADMIN_SERVICE = "/kvmesh.engine.v1.AdminService/"

# In quotes: this class is generic in the stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def is_open_on_loopback(method: str) -> bool:
    """Returns whether callers on this host need no token for a method."""
    return method.startswith(_UNAUTHENTICATED_SERVICES)


def sign_call(
    secret: MeshSecret | None, method: str, address: str
) -> tuple[str | None, str | None]:
    """Returns the credential of a call, and the reply that proves its peer.

    secret: None: the call carries no credential, and no reply is required.
    address: that the caller dials, `host:port`.
    """
    if secret is None:
        return None, None
    credential = secret.sign_call(method, address, time.time())
    return credential, None if is_open_on_loopback(method) else secret.reply_to(credential)


class CallerCheck:
    """Checks the callers of one server."""

    def __init__(
        self,
        *,
        token: str | None,
        admin_token: str | None,
        role_domain: str | None,
        addresses: Collection[str],
    ) -> None:
        """Creates it with the server's credentials.

        token: the mesh token that callers must prove, or None.
        admin_token: callers of AdminService send it in place of a proof; None: they are refused.
        role_domain: of the names that bind the certificates of callers to roles; None: any
            certificate.
        addresses: under which callers dial; read at each call.
        """
        self._verifier = None if token is None else CallVerifier(MeshSecret(token), addresses)
        self._mesh_bearer = _authorization(token)
        self._admin_authorization = _authorization(admin_token)
        self._role_domain = role_domain

    def check(
        self, method: str, headers: Mapping[str, str | bytes], context: Context
    ) -> str | None:
        """Returns the reply that proves this process to the caller; None if no proof is required.
        Raises Unauthenticated, PermissionDenied, Overloaded."""
        is_open = is_open_on_loopback(method)
        if self._role_domain is not None and not is_open:
            check_caller(method, _certificate_names(context), self._role_domain)
        header = headers.get(AUTHORIZATION_KEY)
        if method.startswith(_ADMIN_SERVICE):
            self._authorize_admin(header.encode() if isinstance(header, str) else header)
            LOG.info("admin_call", method=method, peer=context.peer())
            return None
        if self._verifier is None or (is_open and is_local_peer(context.peer())):
            return None
        return self._verifier.check(method, header if isinstance(header, str) else "", time.time())

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


def is_local_peer(peer: str) -> bool:
    """Returns whether a grpc peer is on this host.

    peer: `ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5`, `unix:...`.
    """
    scheme, _, rest = peer.partition(":")
    if scheme == "unix":
        return True
    host = urllib.parse.unquote(rest).rpartition(":")[0]
    return is_loopback(host)


def _certificate_names(context: Context) -> set[str]:
    """Returns the alternative names of the caller's certificate."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return {name.decode(errors="replace") for name in names}


def _authorization(token: str | None) -> bytes | None:
    """Returns the header that carries the token."""
    return None if token is None else f"Bearer {token}".encode()
