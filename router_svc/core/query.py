"""Checks of queries, and the load that their bookings add (pure)."""

from __future__ import annotations

import math

from common.errors import InvalidRequest
from common.request.placement import Query
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings

# Tokens per block if neither the query nor the worker reports them.
DEFAULT_BLOCK_SIZE = 16
HASH_BYTES = 8
# Length at which a prompt that the frontend does not tokenize counts, if it has an affinity key.
UNKNOWN_PROMPT_TOKENS = 8192


def validate_query(query: Query) -> None:
    """Raises InvalidRequest, which names the field, for a malformed query."""
    if not query.model:
        raise InvalidRequest("query.model must name a model", "query.model")
    priority_jump_s = query.routing.priority_jump if query.routing is not None else None
    if priority_jump_s is not None and not math.isfinite(priority_jump_s):
        field = "query.routing.priority_jump"
        raise InvalidRequest(f"{field} must be a finite number, not {priority_jump_s}", field)
    if not 0 < query.tenant_weight < math.inf:
        field = "query.tenant_weight"
        raise InvalidRequest(f"{field} must be above 0, not {query.tenant_weight}", field)
    for name in ("ttft_target_ms", "itl_target_ms"):
        target_ms: float | None = getattr(query, name)
        if target_ms is not None and not 0 < target_ms < math.inf:
            field = f"query.{name}"
            raise InvalidRequest(f"{field} must be above 0, not {target_ms}", field)
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
    """Returns tokens per block: of the query, else of the worker, else the default."""
    return query.block_size or worker_block_size or DEFAULT_BLOCK_SIZE


def predicted_cached_tokens(query: Query, overlap_blocks: int, block_size: int) -> int:
    """Returns prompt tokens served from cache, as engines count: whole blocks, never the last
    token.

    min(overlap_blocks * block_size, floor((total_tokens - 1) / block_size) * block_size)
    """
    reusable = max(0, query.total_tokens - 1) // block_size
    return min(overlap_blocks, reusable) * block_size


def bookable_prefill_tokens(
    query: Query, cached_tokens: int, cost_settings: CostSettings = DEFAULT_COST_SETTINGS
) -> int:
    """Returns prompt tokens still to be computed: total - cached, or 0 if prefill is not
    tracked."""
    if not cost_settings.track_prefill_tokens:
        return 0
    return max(0, query.total_tokens - cached_tokens)


def bookable_decode_blocks(
    query: Query, block_size: int, cost_settings: CostSettings = DEFAULT_COST_SETTINGS
) -> int:
    """Returns KV blocks of the prompt: ceil(total_tokens / block_size), or 0 if they are not
    tracked."""
    if not cost_settings.track_active_blocks:
        return 0
    return -(-query.total_tokens // block_size)
