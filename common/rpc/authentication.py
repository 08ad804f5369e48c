"""Permissions of callers, and the proofs that both ends of a call give.

A caller sends a credential for each call; a server checks it and replies with a proof of its own
that it has the mesh token (`common/runtime/mesh_auth.py`). On streams between members, both ends
prove their ids too (`common/runtime/member_key.py`). Certificates bind callers to roles
(`roles.py`).
"""

from __future__ import annotations

import hmac
import time
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio
import structlog

from common import errors
from common.instance_ids import MEMBER_IDS
from common.rpc.call_context import AUTHORIZATION_KEY
from common.rpc.roles import check_caller, is_for_operators
from common.runtime.hosts import is_loopback
from common.runtime.member_key import REPLY_USE, MemberKeys
from common.runtime.mesh_auth import CALL_SCHEME, FreshCalls, MeshSecret

LOG = structlog.get_logger(__name__)

# In the metadata of a server, initial of streams and trailing of unary calls: it has the mesh token
# too.
REPLY_KEY = "x-kvmesh-proof"

# In the metadata of a stream: the caller's proof of its id, and the server's reply to it.
MEMBER_KEY = "x-kvmesh-member"

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


@dataclass(frozen=True, slots=True)
class PeerCheck:
    """What the server of a stream must prove before it receives a message."""

    reply: str | None
    """The proof of the mesh token; None: not required."""

    challenge: str | None
    """The caller's proof of its id, which the server's key must have signed; None: it need not."""

    peer_id: int
    """The instance that the caller dialled."""

    members: MemberKeys

    def error(self, headers: Mapping[str, str] | None) -> errors.Unauthenticated | None:
        """Returns why the initial metadata of a server does not prove what it must, or None."""
        headers = headers or {}
        if self.reply is not None and headers.get(REPLY_KEY) != self.reply:
            return errors.Unauthenticated("the peer does not prove that it has the mesh token")
        if self.challenge is None:
            return None
        try:
            proof = headers.get(MEMBER_KEY, "")
            peer_id = self.members.check(REPLY_USE, self.challenge.encode(), proof)
        except errors.Unauthenticated as error:
            text = f"the peer does not prove that it is instance {self.peer_id}: {error.message}"
            return errors.Unauthenticated(text)
        if peer_id != self.peer_id:
            return errors.Unauthenticated(f"the peer is instance {peer_id}, not {self.peer_id}")
        return None


def prove_stream(
    secret: MeshSecret | None, members: MemberKeys, method: str, address: str, peer_id: int
) -> tuple[list[tuple[str, str]], PeerCheck | None]:
    """Returns the metadata that proves the caller of a stream, and what its peer must prove.

    secret: None: without the mesh token.
    address: that the caller dials, `host:port`.
    peer_id: of the instance that it dials; 0: unknown.
    """
    credential, reply = sign_call(secret, method, address)
    metadata = [] if credential is None else [(AUTHORIZATION_KEY, credential)]
    challenge = None
    if members.own is not None:
        proof = members.own.sign_call(method, address, time.time())
        metadata.append((MEMBER_KEY, proof))
        if peer_id in MEMBER_IDS:
            challenge = proof
    if reply is None and challenge is None:
        return metadata, None
    return metadata, PeerCheck(reply, challenge, peer_id, members)


@dataclass(frozen=True, slots=True)
class Admission:
    """What a caller has proved, and the metadata with which the server proves itself."""

    caller_id: int | None = None
    """As in `bind_caller_id`."""

    metadata: tuple[tuple[str, str], ...] = ()

    is_operator: bool = False
    """Whether the caller has the token of operators, in place of a proof."""


class CallerCheck:
    """Checks the callers of one server."""

    def __init__(
        self,
        *,
        token: str | None,
        admin_token: str | None,
        operator_token: str | None,
        role_domain: str | None,
        members: MemberKeys,
        addresses: Collection[str],
    ) -> None:
        """Creates it with the server's credentials.

        token: the mesh token that callers must prove, or None.
        admin_token: callers of AdminService send it in place of a proof; None: they are refused.
        operator_token: callers of methods for operators may send it in place of a proof; None: they
            may not.
        role_domain: of the names that bind the certificates of callers to roles; None: any
            certificate.
        members: checks and makes proofs of ids.
        addresses: under which callers dial; read at each call.
        """
        self._secret = None if token is None else MeshSecret(token)
        self._members = members
        # Of the token, and of the keys of members.
        self._token_calls, self._member_calls = FreshCalls(addresses), FreshCalls(addresses)
        self._mesh_bearer = _authorization(token)
        self._admin_authorization = _authorization(admin_token)
        self._operator_authorization = _authorization(operator_token)
        self._role_domain = role_domain

    def check(self, method: str, headers: Mapping[str, str | bytes], context: Context) -> Admission:
        """Admits a caller. Raises Unauthenticated, PermissionDenied, Overloaded."""
        is_open = is_open_on_loopback(method)
        if self._role_domain is not None and not is_open:
            check_caller(method, _certificate_names(context), self._role_domain)
        header = headers.get(AUTHORIZATION_KEY)
        if method.startswith(_ADMIN_SERVICE):
            self._authorize_admin(header.encode() if isinstance(header, str) else header)
            LOG.info("admin_call", method=method, peer=context.peer())
            return Admission()
        metadata: list[tuple[str, str]] = []
        if self._is_operator(method, header):
            return Admission(0 if self._members.is_required else None, is_operator=True)
        if self._secret is not None and not (is_open and is_local_peer(context.peer())):
            credential = header if isinstance(header, str) else ""
            metadata.append((REPLY_KEY, self._check_credential(self._secret, method, credential)))
        if not self._members.is_required:
            return Admission(None, tuple(metadata))
        proof = headers.get(MEMBER_KEY)
        if not isinstance(proof, str):
            return Admission(0, tuple(metadata))
        caller_id, stamp = self._members.check_call(method, proof)
        self._member_calls.check(stamp, time.time())
        if (own := self._members.own) is not None:
            metadata.append((MEMBER_KEY, own.sign(REPLY_USE, proof.encode())))
        return Admission(caller_id, tuple(metadata))

    def _check_credential(self, secret: MeshSecret, method: str, credential: str) -> str:
        """Returns the reply to the credential of a call."""
        self._token_calls.check(secret.check_call(method, credential), time.time())
        return secret.reply_to(credential)

    def _is_operator(self, method: str, header: str | bytes | None) -> bool:
        """Returns whether a call of a method for operators has their token."""
        expected = self._operator_authorization
        if expected is None or not isinstance(header, str) or not is_for_operators(method):
            return False
        return hmac.compare_digest(header.encode(), expected)

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
