"""A query for a placement (pure); see `router.v1.Query`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from common.errors import MeshError
from common.kv.hashing import ChainState, PrefixHasher, hashes_to_bytes
from common.request.preprocessed import RouterConfigOverride, RoutingHints, TokenIds
from frontend_svc.request.types import RoutingDecision

# The router's error reason for an adapter that no worker has.
UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"
# Where the chain of prefix hashes begins.
ROOT_CHAIN = ChainState(0, 0)

# (request id, attempt)
PlacementKey = tuple[str, int]
PlacementCallback = Callable[[RoutingDecision | MeshError], None]


@dataclass(frozen=True, slots=True)
class Query:
    """What to place. arrived_at: loop time, seconds. hasher: extends the prefix hashes when the
    prompt grows; None: no hashes are added. chain: the state of the hash chain after
    `prefix_hashes`. is_query_only: the placement is not booked."""

    model: str
    total_tokens: int
    arrived_at: float
    prefix_hashes: bytes = b""
    hash_scheme: int = 0
    block_size: int = 0
    routing: RoutingHints | None = None
    config_override: RouterConfigOverride | None = None
    excluded: frozenset[int] = frozenset()
    expected_output_tokens: int | None = None
    traceparent: str = ""
    strict_priority: int = 0
    tenant: str = ""
    tenant_weight: float = 1.0
    is_query_only: bool = False
    hasher: PrefixHasher | None = None
    chain: ChainState = ROOT_CHAIN

    def extended(self, token_ids: TokenIds, count: int) -> Query:
        """Returns the query for a longer prompt. The last `count` of `token_ids` are new. New
        tokens no longer count as expected output. Only blocks without a hash are hashed."""
        expected = self.expected_output_tokens
        new_hashes, chain = next_hashes(self.hasher, self.chain, token_ids)
        return replace(
            self,
            total_tokens=self.total_tokens + count,
            expected_output_tokens=None if expected is None else max(0, expected - count),
            prefix_hashes=self.prefix_hashes + new_hashes,
            chain=chain,
        )


def next_hashes(
    hasher: PrefixHasher | None, chain: ChainState, token_ids: TokenIds
) -> tuple[bytes, ChainState]:
    """The hashes of the full blocks of a prompt after `chain`, and the state of the chain then.
    hasher: None: no hashes are added."""
    if hasher is None:
        return b"", chain
    hashes, sums = hasher.extend(chain, token_ids.array[chain.position * hasher.block_size :])
    if not len(sums):
        return b"", chain
    return hashes_to_bytes(hashes), ChainState(chain.position + len(sums), int(sums[-1]))
