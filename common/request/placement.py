"""What a frontend requests of a router, and what the router decides. Pure.

The messages of the same names in `kvmesh/router/v1/router.proto` derive from these declarations
(`common/wire/preprocessed.py`).

No value is changed once it is made. `Query` and `Decision` are not declared frozen, since a frozen
dataclass takes twice as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from common.request.preprocessed import BootstrapInfo, RouterConfigOverride, RoutingHints
from common.request.preprocessed.codecs import LOCAL, U32, U64, BytesCodec

# Of `Query.exclusion_reasons`.
REASONS_MAX, REASON_CHARS_MAX = 64, 160
# The router's error reason if a latency target of a request cannot be met.
TARGET_UNMET = "TARGET_UNMET"
# Begins the request ids of canaries, which frontends send by themselves.
CANARY_ID_PREFIX = "canary-"


class Placement(NamedTuple):
    """A worker and one of its data-parallel ranks. A tuple, because every path hashes it."""

    worker_id: U64
    dp_rank: U32 = 0


@dataclass(slots=True)
class Query:
    """A request to place. It has no prompt content: tokens are a count, blocks are hashes."""

    model: str
    """Model name of the client."""

    total_tokens: U64 = 0
    """Tokens of the whole prompt. 0: it is not tokenized (pass-through bodies)."""

    prefix_hashes: Annotated[bytes, BytesCodec()] = b""
    """The full blocks of the prompt: 8 bytes, little endian, for each block."""

    hash_scheme: U32 = 0
    """Scheme of `prefix_hashes`. 0: none."""

    block_size: U32 = 0
    """Tokens per block of `prefix_hashes`. 0: none."""

    routing: RoutingHints | None = None
    """Pins, allow-list, taints, priority, session."""

    config_override: RouterConfigOverride | None = None
    """Cost settings for this request. None: the router's own."""

    excluded_worker_ids: frozenset[U64] = frozenset()
    """Workers that failed this request before, or have an open circuit."""

    exclusion_reasons: tuple[str, ...] = ()
    """Why, in ascending order of these ids; later ones may have none."""

    waited_ms: U32 = 0
    """Milliseconds since the request arrived at the frontend, set when the query is sent."""

    expected_output_tokens: U32 | None = None
    """A load hint. None: unknown."""

    strict_priority: U32 = 0
    """Level in the router's queue; higher first."""

    tenant: str = ""
    """The client. Tenants that wait get shares of the prompt tokens by `tenant_weight`."""

    tenant_weight: float = 1.0
    """Above 0."""

    is_background: bool = False
    """It runs on idle capacity only: below every level of `strict_priority`, and not before a rank
    has room (`router_svc/core/eligibility.py`)."""

    affinity_key: U64 = 0
    """Hash of what names the client's conversation, with tenant and model. Its requests prefer one
    rank. 0: none."""

    ttft_target_ms: float | None = None
    """The first token is to be there so many milliseconds after the arrival at the frontend, else
    the request is refused. None: no target."""

    itl_target_ms: float | None = None
    """The same for the mean time of a further token."""


@dataclass(slots=True)
class Decision:
    """Where a request runs, and the load that its booking adds."""

    worker: Placement
    """Placement of the whole request, or of its decode."""

    prefill: Placement | None = None
    """Placement of its prefill. None: the request is not split."""

    overlap_blocks: U32 = 0
    """Blocks of the prompt that the rank which computes the prompt holds."""

    bootstrap: BootstrapInfo | None = None
    """Rendezvous of prefill and decode. None: not split, or prefill completes first."""

    reasons: tuple[str, ...] = ()
    """Short clauses, the most important first."""

    predicted_cached_tokens: U64 = 0
    """Prompt tokens predicted to be cached, as the engine counts them."""

    queued_ms: U32 = 0
    """Milliseconds in the router's queue."""

    worker_address: str = ""
    """gRPC address of `worker`, set when the decision is sent. Empty: it has left."""

    prefill_address: str = ""
    """The same of `prefill`."""

    prefill_tokens: U64 = field(default=0, metadata={"proto": "charged_prefill_tokens"})
    """Booked prompt tokens to compute."""

    decode_blocks: U64 = field(default=0, metadata={"proto": "charged_decode_blocks"})
    """Booked KV blocks of the prompt."""

    session_revision: U64 = 0
    """Revision of the session record. 0: no session."""

    is_unrouted: bool = field(default=False, metadata=LOCAL)
    """Not on the wire: the frontend decided, without a router and without a prediction."""

    router_id: int = field(default=0, metadata=LOCAL)
    """Not on the wire: the router that decided, set by the frontend. 0: none."""
