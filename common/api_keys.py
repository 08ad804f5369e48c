"""API keys of HTTP clients: scopes."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """What a key permits.

    INFER: generation, token counts and tokenizing. EMBEDDINGS: `/v1/embeddings`. ADMIN: `/metrics`,
    `/health`. ROUTING: hints that choose a worker or a place in the queue. EXPLAIN: why a request
    was placed so, and what was cached.
    """

    INFER = "infer"
    EMBEDDINGS = "embeddings"
    ADMIN = "admin"
    ROUTING = "routing"
    EXPLAIN = "explain"
