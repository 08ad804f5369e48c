"""Routing hints of a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from common.request.preprocessed.codecs import I32, U32, U64, no_op


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParams:
    """Latency targets in milliseconds for a router of routers (`nvext.router`)."""

    ttft_target: float | None = None
    itl_target: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConstraints:
    """Taints: a worker must have all `required_taints`; `preferred_taints` have weights."""

    required_taints: frozenset[str] = frozenset()
    preferred_taints: Mapping[str, float] = field(default_factory=dict)


class SessionAction(StrEnum):
    """Effect of a request on the placement of its session."""

    OPEN = "open"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class SessionControl:
    """Routes the requests of one session to one worker."""

    session_id: str
    action: SessionAction | None = None


# Not frozen: the constructor of a frozen class takes three times as long.
@dataclass(slots=True, kw_only=True)
class RoutingHints:
    """Preferences and requirements for the placement of a request; never changed."""

    backend_instance_id: U64 | None = None
    """The only worker that may run the request."""
    prefill_worker_id: U64 | None = None
    """The worker of the prefill leg."""
    decode_worker_id: U64 | None = None
    """The worker of the decode leg."""
    dp_rank: U32 | None = None
    """Data-parallel rank of the worker, or of the decode worker."""
    prefill_dp_rank: U32 | None = None
    """Data-parallel rank of the prefill worker."""
    expected_output_tokens: U32 | None = None
    """The client's estimate."""
    lora_name: str | None = field(default=None, metadata=no_op(""))
    """The adapter; None or "": the base model."""
    priority_jump: float | None = None
    """Seconds; a positive value moves the request forward in the queue."""
    priority: I32 | None = None
    """For the engine's scheduler; a larger number goes first."""
    allowed_worker_ids: frozenset[U64] | None = None
    """None allows every worker, the empty set none."""
    routing_constraints: RoutingConstraints | None = None
    """Taints of the workers."""
    session_control: SessionControl | None = None
    """The client session; all its requests run on one worker."""
    cache_salt: str | None = field(default=None, metadata=no_op(""))
    """The request shares KV only with requests of the same salt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfigOverride:
    """Settings of the router's cost for one request; None keeps the router's own."""

    overlap_score_credit: float | None = None
    prefill_load_scale: float | None = None
    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """The agent session a request belongs to."""

    session_type_id: str | None = None
    session_id: str | None = None
    trajectory_id: str | None = None
    parent_trajectory_id: str | None = None
