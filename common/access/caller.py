"""Which client sent a request, and what its API key permits (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Self

from common.api_keys import NO_LIMITS, ApiKey, KeyDocument, Limits, Permission, hash_of
from common.errors import PermissionDenied, Unauthenticated
from common.request.preprocessed import PreprocessedRequest, RoutingHints

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request, as its API key names it. tenant, key_id: "" without keys. limits: of
    its tenant."""

    tenant: str
    key_id: str
    scopes: frozenset[Permission]
    limits: Limits = NO_LIMITS

    def require(self, scope: Permission, field: str | None = None) -> None:
        """Raises PermissionDenied, which names the scope, if the key does not have it. field: of
        the body, the part of the request that needs it."""
        if scope not in self.scopes:
            part = f"'{field}'" if field else "this request"
            text = f"{part} needs an API key with the scope {scope.value!r}"
            raise PermissionDenied(text, field=field, reason="MISSING_SCOPE")

    def confine(self, request: PreprocessedRequest) -> None:
        """Separates the request's KV and session from those of other tenants: their names become
        hashes of the tenant and the client's names. Without keys they stay as they are."""
        if not self.tenant:
            return
        hints = request.routing or RoutingHints()
        if (session := hints.session_control) is not None:
            session = replace(session, session_id=self._own(session.session_id))
        salt = self._own(hints.cache_salt or "")
        request.routing = replace(hints, cache_salt=salt, session_control=session)

    def _own(self, name: str) -> str:
        # The name of a tenant has no NUL.
        return sha256(f"{self.tenant}\0{name}".encode()).hexdigest()


ANONYMOUS = Caller("", "", frozenset(Permission))
"""Every client of a frontend without keys."""


@dataclass(frozen=True, slots=True)
class KeyTable:
    """The callers by the hash of their key; with the key, for its expiry."""

    callers: Mapping[str, tuple[Caller, ApiKey]]

    @classmethod
    def of(cls, document: KeyDocument) -> Self:
        return cls(
            {
                key.sha256: (Caller(name, key.id, key.scopes, tenant.limits), key)
                for name, tenant in document.tenants.items()
                for key in tenant.keys
            }
        )

    def identify(self, headers: Headers, now_s: float) -> Caller:
        """Returns the client with the key in the headers. now_s: Unix seconds. Raises
        Unauthenticated."""
        credentials = set(_credentials(headers))
        if not credentials:
            raise Unauthenticated(
                "no API key: send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                reason="NO_API_KEY",
            )
        if len(credentials) > 1:
            raise Unauthenticated("the request has several API keys", reason="SEVERAL_API_KEYS")
        return self.find(hash_of(credentials.pop()), now_s)

    def find_id(self, tenant: str, key_id: str, now_s: float) -> Caller:
        """Returns the client with the key of this tenant and id. Raises Unauthenticated."""
        for digest, (caller, _) in self.callers.items():
            if (caller.tenant, caller.key_id) == (tenant, key_id):
                return self.find(digest, now_s)
        raise Unauthenticated("the API key is not valid any more", reason="INVALID_API_KEY")

    def find(self, sha256: str, now_s: float) -> Caller:
        """Returns the client with the key that has this hash. Raises Unauthenticated."""
        found = self.callers.get(sha256)
        if found is None:
            raise Unauthenticated("the API key is not valid", reason="INVALID_API_KEY")
        caller, key = found
        if key.expires is not None and key.expires.timestamp() <= now_s:
            text = f"the API key {key.id!r} expired at {key.expires.isoformat()}"
            raise Unauthenticated(text, reason="EXPIRED_API_KEY")
        return caller


def _credentials(headers: Headers) -> Iterable[bytes]:
    """Yields the keys in the headers, whose names are in lower case."""
    for name, value in headers:
        if name == b"x-api-key":
            yield value.strip()
        elif name == b"authorization":
            scheme, _, credential = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield credential.strip()
