"""A request to place, and the load that its booking adds (pure).

A Query carries no prompt content: its tokens are a count, its blocks are hashes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import InvalidRequest
from common.request.preprocessed import RouterConfigOverride, RoutingHints
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings

# Tokens per block if neither the query nor the worker reports them.
DEFAULT_BLOCK_SIZE = 16
HASH_BYTES = 8


@dataclass(slots=True)
class Query:
    """One request to place; fields and defaults as in `kvmesh/router/v1/router.proto`.
    total_tokens: of the whole prompt, 0 if it is not tokenized (pass-through kinds). prefix_hashes:
    8 bytes, little endian, per block of block_size tokens, by hash_scheme. excluded_worker_ids:
    workers that failed this request before. waited_s: since the request arrived at the frontend.
    strict_priority: level in the queue, 0 or more; higher first. tenant: of the client; waiting
    tenants get shares of the prompt tokens by tenant_weight, above 0.
    """

    model: str
    total_tokens: int = 0
    prefix_hashes: bytes = b""
    hash_scheme: int = 0
    block_size: int = 0
    routing: RoutingHints | None = None
    override: RouterConfigOverride | None = None
    excluded_worker_ids: frozenset[int] = frozenset()
    waited_s: float = 0.0
    expected_output_tokens: int | None = None
    strict_priority: int = 0
    tenant: str = ""
    tenant_weight: float = 1.0


def validate_query(query: Query) -> None:
    """Raise InvalidRequest, which names the field, for a malformed query."""
    if not query.model:
        raise InvalidRequest("query.model must name a model", "query.model")
    priority_jump_s = query.routing.priority_jump if query.routing is not None else None
    if priority_jump_s is not None and not math.isfinite(priority_jump_s):
        field = "query.routing.priority_jump"
        raise InvalidRequest(f"{field} must be a finite number, not {priority_jump_s}", field)
    if not 0 < query.tenant_weight < math.inf:
        field = "query.tenant_weight"
        raise InvalidRequest(f"{field} must be above 0, not {query.tenant_weight}", field)
    if not query.prefix_hashes:
        return
    blocks, remainder = divmod(len(query.prefix_hashes), HASH_BYTES)
    if remainder:
        size = f"{len(query.prefix_hashes)} bytes, not a multiple of {HASH_BYTES}"
        raise InvalidRequest(f"query.prefix_hashes has {size}", "query.prefix_hashes")
    if query.block_size < 1:
        raise InvalidRequest("query.prefix_hashes needs block_size", "query.block_size")
    if query.hash_scheme < 1:
        raise InvalidRequest("query.prefix_hashes needs hash_scheme", "query.hash_scheme")
    if blocks * query.block_size > query.total_tokens:
        raise InvalidRequest(
            f"query.prefix_hashes names {blocks} blocks of {query.block_size} tokens, but "
            f"total_tokens is {query.total_tokens}",
            "query.total_tokens",
        )


def block_size_of(query: Query, worker_block_size: int | None) -> int:
    """Tokens per block: of the query, else of the worker, else the default."""
    return query.block_size or worker_block_size or DEFAULT_BLOCK_SIZE


def predicted_cached_tokens(query: Query, overlap_blocks: int, block_size: int) -> int:
    """Prompt tokens served from cache, as engines count: whole blocks, never the last token.

    min(overlap_blocks * block_size, floor((total_tokens - 1) / block_size) * block_size)
    """
    reusable = max(0, query.total_tokens - 1) // block_size
    return min(overlap_blocks, reusable) * block_size


def bookable_prefill_tokens(
    query: Query, cached_tokens: int, cost_settings: CostSettings = DEFAULT_COST_SETTINGS
) -> int:
    """Prompt tokens still to be computed: total - cached, or 0 if prefill is not tracked."""
    if not cost_settings.track_prefill_tokens:
        return 0
    return max(0, query.total_tokens - cached_tokens)


def bookable_decode_blocks(
    query: Query, block_size: int, cost_settings: CostSettings = DEFAULT_COST_SETTINGS
) -> int:
    """KV blocks of the prompt: ceil(total_tokens / block_size), or 0 if they are not tracked."""
    if not cost_settings.track_active_blocks:
        return 0
    return -(-query.total_tokens // block_size)
