"""What a request asks a router for, and what the frontend keeps meanwhile (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from common.errors import MeshError
from common.kv.hashing import HASH_SCHEME_ID, ChainState, PrefixHasher, hashes_to_bytes
from common.request.placement import REASON_CHARS_MAX, REASONS_MAX, Decision, Query
from common.request.preprocessed import TokenIds

# The router's error reason for an adapter that no worker has.
UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"
# Where the chain of prefix hashes begins.
ROOT_CHAIN = ChainState(0, 0)

# (request id, attempt)
PlacementKey = tuple[str, int]
PlacementCallback = Callable[[Decision | MeshError], None]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A query, and what only this frontend keeps of it."""

    query: Query

    arrived_at: float
    """Loop time, seconds."""

    traceparent: str = ""
    """W3C traceparent of the request's span. Empty: no trace."""

    is_query_only: bool = False
    """Whether the placement is not booked."""

    hasher: PrefixHasher | None = None
    """Extends the prefix hashes when the prompt grows. None: no hashes are added."""

    chain: ChainState = ROOT_CHAIN
    """State of the hash chain after `query.prefix_hashes`."""

    def extended(self, token_ids: TokenIds, count: int) -> PlacementRequest:
        """Returns the request for a longer prompt. The last `count` of `token_ids` are new. New
        tokens no longer count as expected output. Only blocks without a hash are hashed."""
        query = self.query
        expected = query.expected_output_tokens
        new_hashes, chain = next_hashes(self.hasher, self.chain, token_ids)
        longer = replace(
            query,
            total_tokens=query.total_tokens + count,
            expected_output_tokens=None if expected is None else max(0, expected - count),
            prefix_hashes=query.prefix_hashes + new_hashes,
            # A response that has begun is not refused.
            ttft_target_ms=None,
            itl_target_ms=None,
        )
        return replace(self, query=longer, chain=chain)

    def excluding(self, worker_ids: frozenset[int], reasons: Mapping[int, str]) -> PlacementRequest:
        """Returns the request for an attempt that avoids these workers. reasons: by worker; the
        others failed this request."""
        texts = tuple(
            reasons.get(worker_id, "it failed this request")[:REASON_CHARS_MAX]
            for worker_id in sorted(worker_ids)[:REASONS_MAX]
        )
        query = replace(self.query, excluded_worker_ids=worker_ids, exclusion_reasons=texts)
        return replace(self, query=query)


def exclusion_reasons(
    open_circuits: Mapping[int, str], unsuitable: Mapping[int, str]
) -> dict[int, str]:
    """Returns why workers are avoided, by worker. The arguments have the reasons without this."""
    circuits = {one: f"its circuit is open: {text}" for one, text in open_circuits.items()}
    return {**circuits, **{one: f"it cannot continue: {t}" for one, t in unsuitable.items()}}


def new_placement(
    query: Query,
    prompt: TokenIds,
    hasher: PrefixHasher | None,
    arrived_at: float,
    traceparent: str = "",
) -> PlacementRequest:
    """Returns the request for the placement of a prompt: the query, with the hashes of its blocks.

    prompt: the tokens to route by.
    hasher: of the prompt; None: it gets no hashes.
    """
    if hasher is None:
        return PlacementRequest(query, arrived_at, traceparent)
    prefix_hashes, chain = next_hashes(hasher, ROOT_CHAIN, prompt)
    query = replace(
        query,
        prefix_hashes=prefix_hashes,
        hash_scheme=HASH_SCHEME_ID,
        block_size=hasher.block_size,
    )
    return PlacementRequest(query, arrived_at, traceparent, hasher=hasher, chain=chain)


def next_hashes(
    hasher: PrefixHasher | None, chain: ChainState, token_ids: TokenIds
) -> tuple[bytes, ChainState]:
    """Returns the hashes of the full blocks of a prompt after `chain`, and the state of the
    chain then.
    hasher: None: no hashes are added."""
    if hasher is None:
        return b"", chain
    hashes, sums = hasher.extend(chain, token_ids.array[chain.position * hasher.block_size :])
    if not len(sums):
        return b"", chain
    return hashes_to_bytes(hashes), ChainState(chain.position + len(sums), int(sums[-1]))
