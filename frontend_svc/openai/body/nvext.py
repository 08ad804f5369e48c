"""The extension object `nvext` of request bodies (pure)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from frontend_svc.openai.body.fields import (
    ANNOTATIONS_MAX,
    I32,
    NO_THINKING_LIMIT,
    SESSION_ID_CHARS_MAX,
    TAINTS_MAX,
    U32,
    WORKER_IDS_MAX,
    CacheSalt,
    Factor,
    GuidedFields,
    Name,
    StrictModel,
    Taint,
    Target,
    Timestamp,
    Weight,
    WorkerId,
    refuse,
)
from frontend_svc.openai.body.sampling import ExtensionSampling
from frontend_svc.openai.output.extension import ExtraField


class AgentHints(StrictModel):
    """priority: if positive, moves the request forward in the queue; the engine receives it too.
    strict_priority: level in the router's queue; a higher level goes first. osl: expected output
    tokens."""

    priority: I32 | None = None
    strict_priority: U32 | None = None
    osl: U32 | None = None


class NvextRoutingConstraints(StrictModel):
    """Taints that a worker must have, and weights of others: see `RoutingConstraints`."""

    required_taints: Annotated[list[Taint], Field(max_length=TAINTS_MAX, fail_fast=True)] | None = (
        None
    )
    preferred_taints: Annotated[dict[Taint, Weight], Field(max_length=TAINTS_MAX)] | None = None


class NvextSessionControl(StrictModel):
    """Keeps requests on one worker: see `SessionControl`."""

    session_id: Annotated[str, Field(min_length=1, max_length=SESSION_ID_CHARS_MAX)]
    action: Literal["open", "close"] | None = None


class NvextRouter(StrictModel):
    """Latency targets in milliseconds, from the arrival at the frontend: ttft_target of the first
    token, itl_target of the mean of further ones. A request that cannot meet them is refused."""

    ttft_target: Target | None = None
    itl_target: Target | None = None


class NvextRouterConfigOverride(StrictModel):
    """Settings of the router's cost for one request: see `RouterConfigOverride`."""

    overlap_score_credit: Factor | None = None
    prefill_load_scale: Factor | None = None
    overlap_score_weight: Factor | None = None
    router_temperature: Factor | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    shared_cache_multiplier: Annotated[object, refuse("there is no shared cache", 0, 0.0)] = None


class NvextAgentContext(StrictModel):
    """The agent session that a request belongs to: see `AgentContext`."""

    session_type_id: Name | None = None
    session_id: Name | None = None
    trajectory_id: Name | None = None
    parent_trajectory_id: Name | None = None


_NO_NVEXT = "not available yet"


class PlacementFields(GuidedFields):
    """Where a request runs, and what its response has."""

    backend_instance_id: WorkerId | None = None
    """The only worker that may run the request."""
    prefill_worker_id: WorkerId | None = None
    """The worker of the prefill leg."""
    decode_worker_id: WorkerId | None = None
    """The worker of the decode leg."""
    dp_rank: U32 | None = None
    """Data-parallel rank of the worker, or of the decode worker."""
    prefill_dp_rank: U32 | None = None
    """Data-parallel rank of the prefill worker."""
    allowed_worker_ids: (
        Annotated[list[WorkerId], Field(max_length=WORKER_IDS_MAX, fail_fast=True)] | None
    ) = None
    """Only these workers run the request."""
    router: NvextRouter | None = None
    """Latency targets."""
    router_config_override: NvextRouterConfigOverride | None = None
    """Settings of the router's cost."""
    agent_hints: AgentHints | None = None
    """Priorities and the expected length of the output."""
    routing_constraints: NvextRoutingConstraints | None = None
    """Taints of the workers."""
    session_control: NvextSessionControl | None = None
    """The session, whose requests run on one worker."""
    agent_context: NvextAgentContext | None = None
    """For log lines and spans only."""
    request_timestamp_ms: Timestamp | None = None
    """Milliseconds since the Unix epoch by the client's clock."""
    annotations: Annotated[list[Name], Field(max_length=ANNOTATIONS_MAX, fail_fast=True)] | None = (
        None
    )
    """`key` or `key:value`; docs/extensions.md lists the keys that the frontend reads."""
    extra_fields: Annotated[list[ExtraField], Field(max_length=ANNOTATIONS_MAX)] | None = None
    """Facts that the response has in its own `nvext`."""
    extra_args: dict[str, Any] | None = None
    """For engines that declare it."""
    token_data: Annotated[list[U32], Field(min_length=1, fail_fast=True)] | None = None
    """The prompt as token ids, instead of `prompt` or `messages`."""
    ignore_eos: bool | None = None
    """As in the body, like `cache_salt` and the sampling fields: the top level wins."""


# The bases stand in reverse, as those of `GenerationRequest`.
class Nvext(ExtensionSampling, PlacementFields):
    """Extensions of the Dynamo family: placement, and sampling fields under older names."""

    cache_salt: CacheSalt | None = None
    """The request shares KV only with requests of the same salt."""

    greed_sampling: Annotated[object, refuse("set temperature to 0", False)] = None
    use_raw_prompt: Annotated[object, refuse(_NO_NVEXT, False)] = None
    max_thinking_tokens: Annotated[object, refuse(NO_THINKING_LIMIT)] = None
    cache_control: Annotated[object, refuse(_NO_NVEXT)] = None
    metadata_upload: Annotated[object, refuse(_NO_NVEXT)] = None
