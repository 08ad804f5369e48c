"""By which hints clients name their conversation, and the affinity key of a name (pure).

Coding agents and SDKs send a stable name with each turn: a header, `prompt_cache_key`, or the
response that they continue. A name is a hint for routers, never a requirement: see
`router_svc/core/key_affinity.py`. Routers receive a hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

# The first one that is present counts. The first two have no product in their name; `session-id`
# and `session_id` are those of Codex, by version; then those of Claude Code and OpenCode.
SESSION_HEADERS = (
    b"x-session-affinity",
    b"x-session-id",
    b"session-id",
    b"session_id",
    b"x-claude-code-session-id",
    b"x-opencode-session",
)
_SESSION_HEADERS = frozenset(SESSION_HEADERS)
# Of a session that stays on its worker.
SESSION_HEADER = b"x-kvmesh-session-id"


def conversation_name(
    headers: Mapping[bytes, bytes], cache_key: str | None, continued: str | None = None
) -> bytes:
    """Returns the client's name of the conversation of a request; b"" without one. A header wins,
    since many conversations may share one `prompt_cache_key`.

    - headers: names in lower case.
    - cache_key: `prompt_cache_key` of the body.
    - continued: the first response of a stored conversation.
    """
    if not _SESSION_HEADERS.isdisjoint(headers):
        for header in SESSION_HEADERS:
            if value := headers.get(header, b"").strip():
                return value
    return (cache_key or continued or "").encode()


def affinity_key(tenant: str, model: str, name: bytes) -> int:
    """Returns the key of a conversation, the same at every frontend; 0 without a name. Tenants and
    models with equal names have different keys.

    - model: a model, or an adapter.
    """
    if not name:
        return 0
    # Names of tenants and models have no NUL.
    text = f"{tenant}\0{model}\0".encode() + name
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") or 1
