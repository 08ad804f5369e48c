"""Configuration of the router: flags `--...` and variables `KVMESH_ROUTER_...`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from common.runtime.config import ConfigError, ServiceConfig, Share
from common.runtime.plugins import check_plugin_name, import_factory
from common.scaling.pool import ScalingSettings
from router_svc.core.admission import NO_QUEUE, QueuePolicy, QueueSettings
from router_svc.core.approx_index import ApproxLimits
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings
from router_svc.core.eligibility import (
    DEFAULT_BACKGROUND,
    BackgroundLimits,
    BusyLimits,
    LoraResidency,
)
from router_svc.core.load_tracker import BOOKING_EXPIRY_S
from router_svc.core.overlap import IndexSettings, derive_index_settings
from router_svc.core.pairing import (
    ISL_POLICIES,
    LOAD_POLICIES,
    NO_BYPASS,
    Bypass,
    BypassPolicy,
    TransferDomain,
)
from router_svc.core.policy import DEFAULT_POLICY, Policy
from router_svc.core.selectors import SELECTORS, WorkerSelector
from router_svc.core.sessions import AffinityMode

TTL_S_MAX = 31_536_000
# A frontend queues at most so many requests for its router.
QUEUE_REQUESTS_LIMIT = 8192


def load_selector(name: str) -> WorkerSelector:
    """Returns a built-in selector by name, or the result of `module:factory`, called without
    arguments. Call it once per process: a factory may open resources. Raises ConfigError.
    """
    try:
        selector = _selector_factory(name)()
    except Exception as error:
        # The factory is foreign code and may raise anything.
        problem = f"--selector: {name!r} failed: {type(error).__name__}: {error}"
        raise ConfigError([problem]) from error
    has_name = isinstance(getattr(selector, "name", None), str)
    if not has_name or not callable(getattr(selector, "select", None)):
        problem = f"--selector: {name!r} returned no WorkerSelector: it needs `name` and `select`"
        raise ConfigError([problem])
    return selector


def _selector_factory(name: str) -> Callable[[], WorkerSelector]:
    """Raises ValueError if the name has no factory."""
    if factory := SELECTORS.get(check_plugin_name(name, SELECTORS)):
        return factory
    return import_factory(name, "a WorkerSelector")


def _validate_ttl(value: float) -> float:
    if value == 0 or 1 <= value <= TTL_S_MAX:
        return value
    raise ValueError(f"must be 0 (off) or within 1..{TTL_S_MAX}")


def _validate_domain(value: str) -> str:
    name, equals, _ = value.partition("=")
    if equals:
        raise ValueError(f"is one value of a domain; give the name of the domain only: {name!r}")
    return value


def _validate_selector(name: str) -> str:
    _selector_factory(name)
    return name


_APPROX_DEFAULTS = ApproxLimits()
_SCALING_DEFAULTS = ScalingSettings()


class RouterConfig(ServiceConfig):
    """The settings of a router. ADR 0006 lists their equivalents in Dynamo."""

    selector: Annotated[str, AfterValidator(_validate_selector)] = Field(
        default="kv",
        description=f"Placement policy: {', '.join(SELECTORS)}, or module:factory of your own.",
    )
    overlap_score_credit: NonNegativeFloat = DEFAULT_COST_SETTINGS.overlap_score_credit
    """Blocks of prefill work that one cached block saves. Lower it to weigh load more. 0: the
    router does not track caches, unless another setting needs them."""
    overlap_score_credit_decay: NonNegativeFloat = DEFAULT_COST_SETTINGS.overlap_score_credit_decay
    """Reduces the credit of busy workers; 1 halves it at an excess of one request. Raise it if busy
    workers keep attracting the prompts that they have cached."""
    prefill_load_scale: NonNegativeFloat = DEFAULT_COST_SETTINGS.prefill_load_scale
    """Weight of prompt blocks against held blocks and requests."""
    decode_active_request_weight: NonNegativeFloat = (
        DEFAULT_COST_SETTINGS.decode_active_request_weight
    )
    """Blocks added to the load for each running request. Raise it for long responses."""
    host_cache_hit_weight: Share = DEFAULT_COST_SETTINGS.host_cache_hit_weight
    """Credit of a block that is only in host memory."""
    disk_cache_hit_weight: Share = DEFAULT_COST_SETTINGS.disk_cache_hit_weight
    """Credit of a block that is only on disk."""
    router_temperature: NonNegativeFloat = DEFAULT_COST_SETTINGS.router_temperature
    """Above 0 the router samples workers by cost instead of choosing the cheapest. For
    experiments."""
    assume_kv_reuse: bool = DEFAULT_COST_SETTINGS.assume_kv_reuse
    """Count cached blocks as already in use. Set it if prompts share much."""
    candidates_max: Annotated[int, Field(ge=16, le=100_000)] = DEFAULT_POLICY.candidates_max
    """Most ranks whose cost a decision of the selectors kv and dynamo computes. Of more eligible
    ones it compares those that hold most of the prompt, and others drawn at random."""
    track_prefill_tokens: bool = DEFAULT_COST_SETTINGS.track_prefill_tokens
    """Count uncached prompt tokens as load. Unset it if prefill costs nothing."""
    track_active_blocks: bool = DEFAULT_COST_SETTINGS.track_active_blocks
    """Count held blocks as load. Unset it if workers never run out of blocks."""
    uncached_block_weight: NonNegativeFloat = DEFAULT_COST_SETTINGS.uncached_block_weight
    """Cost of a prompt block that a worker has to compute, in blocks queued there. Raise it if
    caches are small against the prompts in use."""
    held_block_weight: NonNegativeFloat = DEFAULT_COST_SETTINGS.held_block_weight
    """Cost of a block held while decoding, in blocks queued. Raise it if engines preempt when
    full."""
    affinity_weight: Share = DEFAULT_COST_SETTINGS.affinity_weight
    """Share of a conversation's last prompt that counts as cached at its worker, if the client
    names the conversation and no index reports the cache. 0: such hints have no effect."""
    recent_miss_weight: NonNegativeFloat = DEFAULT_COST_SETTINGS.recent_miss_weight
    """Weight of a worker's recent prefill work in its cost. 0: an idle worker that has a common
    prefix attracts all prompts with it."""
    recent_miss_half_life_s: PositiveFloat = DEFAULT_COST_SETTINGS.recent_miss_half_life_s
    """Seconds after which recent prefill work counts half."""
    kv_events: bool = True
    """Track the KV events of the engines. Unset it if no engine publishes them: the router then
    approximates caches from the decisions of all routers."""
    router_ttl_secs: PositiveFloat = _APPROX_DEFAULTS.ttl_s
    """Seconds an approximate entry counts, for workers without KV events. About as long as a prompt
    stays cached there."""
    router_max_tree_size: PositiveInt = _APPROX_DEFAULTS.blocks_max
    """Maximum of approximate blocks over all workers, about 230 bytes each. Lower it on small
    hosts."""
    router_prune_target_ratio: Annotated[float, Field(gt=0, le=1)] = (
        _APPROX_DEFAULTS.prune_target_ratio
    )
    """Share of router_max_tree_size that remains after pruning. Lower it to prune less often."""
    router_predicted_ttl_secs: NonNegativeFloat = 5.0
    """The blocks of a prompt count as cached for so many seconds after the decision, at all
    routers, before KV events confirm them. Requests of a burst with a common prefix then meet on
    one worker. 0: only KV events count."""
    session_affinity_ttl_s: Annotated[float, AfterValidator(_validate_ttl)] = (
        DEFAULT_POLICY.session_ttl_s
    )
    """Seconds an idle session stays on its worker. About the longest pause of a user. 0: requests
    that name a session are refused."""
    session_affinity_mode: AffinityMode = DEFAULT_POLICY.session_mode
    """hard: only the worker of the session serves it, while that worker exists. soft: another one
    serves it if that worker is not eligible, or has no capacity and others have."""
    lora_residency: LoraResidency = DEFAULT_POLICY.lora_residency
    """required: adapters run only where they are resident. preferred: also on other workers if no
    worker has them, for engines that load adapters on request."""
    kv_transfer_domain: Annotated[str, AfterValidator(_validate_domain)] = (
        DEFAULT_POLICY.domain.name
    )
    """Domain within which KV moves from prefill to decode, such as zone for workers with the taint
    zone=a. Set it if links between zones are slow. Empty: no limit."""
    kv_transfer_enforcement: Literal["required", "preferred"] = "required"
    """preferred: pairs across domains are allowed if the load requires it."""
    kv_transfer_weight: Share = 1.0
    """Weight of a preferred domain, as for a preferred taint."""
    bypass_policy: BypassPolicy = NO_BYPASS.policy
    """When decode computes a prompt that could be split: isl_bounding for prompts that are nearly
    cached at decode, prefill_load while prefill is busy, isl_or_load for both."""
    bypass_eff_isl_threshold: NonNegativeInt = NO_BYPASS.eff_isl_threshold
    """isl_bounding: bypass if fewer tokens than this are uncached, with those that wait at the
    worker. About what decode computes without a noticeable delay (try 1024)."""
    bypass_eff_isl_ratio_threshold: NonNegativeFloat = NO_BYPASS.eff_isl_ratio_threshold
    """isl_bounding: and if a smaller share of the prompt is uncached. Above 1: any share."""
    bypass_prefill_busy_threshold: NonNegativeFloat | None = NO_BYPASS.prefill_busy_threshold
    """prefill_load: bypass if more work is queued at the prefill worker than it computes in so many
    steps. Unset: queue_threshold."""
    bypass_decode_busy_threshold: Share | None = NO_BYPASS.decode_busy_threshold
    """Bypass only to workers that use at most this share of their KV blocks, including the request.
    Set it if decode runs near its limit."""
    track_output_blocks: bool = False
    """Count the blocks of generated tokens as load. Set it if responses are long against
    prompts."""
    active_request_expiry_s: Annotated[float, Field(ge=200)] = BOOKING_EXPIRY_S
    """Seconds after which the router frees a booking that its frontend has not registered again.
    Frontends register theirs every 100 s."""
    queue_threshold: NonNegativeFloat | None = NO_QUEUE.threshold
    """Queue a request while all its workers have more uncomputed prompt tokens than so many of
    their batches. Set it (try 1) if priorities matter, or for less TTFT with one router. Unset: no
    queue, and priorities have no effect in the router."""
    queue_policy: QueuePolicy = NO_QUEUE.policy
    """Order within a strict priority: fcfs by arrival; wspt the least prefill work first, for a low
    mean wait; lcfs the latest first, for experiments."""
    queue_requests_max: Annotated[int, Field(ge=1, le=QUEUE_REQUESTS_LIMIT)] = NO_QUEUE.requests_max
    """Maximum of queued requests; further requests are refused. About what the workers prefill in
    queue_wait_max_s."""
    queue_tokens_max: PositiveInt = NO_QUEUE.tokens_max
    """Maximum of queued prompt tokens. The request that crosses it is still queued, the next one is
    refused."""
    queue_wait_max_s: PositiveFloat = NO_QUEUE.wait_max_s
    """Longest time in the queue in seconds; then the request is refused."""
    background_prefill_share: NonNegativeFloat = DEFAULT_BACKGROUND.prefill_share
    """Background requests, such as lines of batches, go to a worker only while it has at most so
    many of its batches of prompt tokens to compute. Raise it for more throughput of batches; lower
    it for less TTFT of the others."""
    background_load_share: Share = DEFAULT_BACKGROUND.load_share
    """Background requests go to a worker only while fewer than this share of its sequences run, and
    of its KV blocks are in use. The rest is free for the others at once."""
    active_decode_blocks_threshold: Share | None = None
    """Workers that use more than this share of their KV blocks receive no request. Set it if
    engines preempt when full."""
    active_prefill_tokens_threshold: NonNegativeInt | None = None
    """Workers with more uncomputed prompt tokens receive no request. Set it if a late response is
    worse than a refused request."""
    active_prefill_tokens_threshold_frac: NonNegativeFloat | None = None
    """The same limit in batches of the worker, for workers of different size."""
    scaling_ttft_target_s: PositiveFloat = _SCALING_DEFAULTS.ttft_target_s
    """Recommended worker counts keep the 95th percentile of the time to the first token below it,
    in seconds. Must exceed that of the longest usual prompt on an idle worker."""
    scaling_itl_target_s: PositiveFloat = _SCALING_DEFAULTS.itl_target_s
    """They keep the time between two tokens below it, in seconds."""
    scaling_min: Annotated[int, Field(ge=0, le=10_000)] = _SCALING_DEFAULTS.floor
    """Fewest recommended workers of a model and role. 0: a model without requests sleeps."""
    scaling_max: Annotated[int, Field(ge=1, le=10_000)] = _SCALING_DEFAULTS.ceiling
    """Most recommended workers of a model and role."""
    scaling_budget: Annotated[int, Field(ge=1)] | None = _SCALING_DEFAULTS.budget
    """Most recommended workers of all models and roles together. Unset: no limit."""
    scaling_up_window_s: NonNegativeFloat = _SCALING_DEFAULTS.up_window_s
    """Seconds for which more workers must be needed before a count rises."""
    scaling_down_window_s: Annotated[float, Field(ge=60, le=86_400)] = (
        _SCALING_DEFAULTS.down_window_s
    )
    """Seconds for which fewer workers must be enough before a count falls."""
    scaling_pending_s: NonNegativeFloat = _SCALING_DEFAULTS.pending_s
    """Longest start of a worker in seconds. For so long a missing worker counts as starting."""
    scaling_sleep_s: Annotated[float, Field(ge=1)] = _SCALING_DEFAULTS.sleep_after_s
    """Seconds without a request after which a model sleeps, if scaling_min is 0."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.kv_transfer_enforcement == "preferred" and not self.kv_transfer_domain:
            found.append("kv_transfer_domain: required by --kv-transfer-enforcement=preferred")
        if self.bypass_policy in LOAD_POLICIES and self._prefill_busy_threshold is None:
            policy = f"--bypass-policy={self.bypass_policy}"
            required = f"{policy} requires it, or --queue-threshold"
            found.append(f"bypass_prefill_busy_threshold: {required}")
        if self.scaling_min > self.scaling_max:
            found.append(f"scaling_min: {self.scaling_min} exceeds scaling_max {self.scaling_max}")
        return found

    @property
    def scaling(self) -> ScalingSettings:
        return ScalingSettings(
            ttft_target_s=self.scaling_ttft_target_s,
            itl_target_s=self.scaling_itl_target_s,
            floor=self.scaling_min,
            ceiling=self.scaling_max,
            budget=self.scaling_budget,
            up_window_s=self.scaling_up_window_s,
            down_window_s=self.scaling_down_window_s,
            pending_s=self.scaling_pending_s,
            sleep_after_s=self.scaling_sleep_s,
        )

    @property
    def policy(self) -> Policy:
        weight = self.kv_transfer_weight if self.kv_transfer_enforcement == "preferred" else None
        return Policy(
            candidates_max=self.candidates_max,
            session_ttl_s=self.session_affinity_ttl_s,
            session_mode=self.session_affinity_mode,
            lora_residency=self.lora_residency,
            domain=TransferDomain(self.kv_transfer_domain, weight),
            bypass=Bypass(
                policy=self.bypass_policy,
                eff_isl_threshold=self.bypass_eff_isl_threshold,
                eff_isl_ratio_threshold=self.bypass_eff_isl_ratio_threshold,
                prefill_busy_threshold=self._prefill_busy_threshold,
                decode_busy_threshold=self.bypass_decode_busy_threshold,
            ),
            queue=QueueSettings(
                threshold=self.queue_threshold,
                policy=self.queue_policy,
                requests_max=self.queue_requests_max,
                tokens_max=self.queue_tokens_max,
                wait_max_s=self.queue_wait_max_s,
            ),
            busy=BusyLimits(
                active_decode_blocks=self.active_decode_blocks_threshold,
                active_prefill_tokens=self.active_prefill_tokens_threshold,
                active_prefill_tokens_frac=self.active_prefill_tokens_threshold_frac,
            ),
            background=BackgroundLimits(
                prefill_share=self.background_prefill_share,
                load_share=self.background_load_share,
            ),
        )

    @property
    def _prefill_busy_threshold(self) -> float | None:
        configured = self.bypass_prefill_busy_threshold
        return self.queue_threshold if configured is None else configured

    @property
    def index_settings(self) -> IndexSettings:
        return derive_index_settings(
            overlap_score_credit=self.overlap_score_credit,
            uses_overlap_elsewhere=self._uses_overlap_elsewhere,
            kv_events=self.kv_events,
            limits=ApproxLimits(
                ttl_s=self.router_ttl_secs,
                blocks_max=self.router_max_tree_size,
                prune_target_ratio=self.router_prune_target_ratio,
            ),
            predicted_ttl_s=self.router_predicted_ttl_secs,
        )

    @property
    def _uses_overlap_elsewhere(self) -> bool:
        """Whether a setting other than overlap_score_credit needs to know cached blocks."""
        defaults = DEFAULT_COST_SETTINGS
        return (
            self.assume_kv_reuse
            or self.bypass_policy in ISL_POLICIES
            or (self.queue_threshold is not None and self.queue_policy == "wspt")
            or self.host_cache_hit_weight not in (0, defaults.host_cache_hit_weight)
            or self.disk_cache_hit_weight not in (0, defaults.disk_cache_hit_weight)
        )

    @property
    def cost_settings(self) -> CostSettings:
        return CostSettings(**{f.name: getattr(self, f.name) for f in fields(CostSettings)})
