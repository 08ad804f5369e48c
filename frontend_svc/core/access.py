"""The client of a request: its tenant and what its key permits (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from common.api_keys import Scope
from common.errors import PermissionDenied


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request, as its API key names it. tenant, key_id: "" without keys."""

    tenant: str
    key_id: str
    scopes: frozenset[Scope]

    def require(self, scope: Scope, field: str | None = None) -> None:
        """Raises PermissionDenied, which names the scope, if the key does not have it. field: of
        the body, the part of the request that needs it."""
        if scope not in self.scopes:
            part = f"'{field}'" if field else "this request"
            text = f"{part} needs an API key with the scope {scope.value!r}"
            raise PermissionDenied(text, field=field, reason="MISSING_SCOPE")


ANONYMOUS = Caller("", "", frozenset(Scope))
"""Every client of a frontend without keys."""
