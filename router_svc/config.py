"""The router's configuration."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

from common.runtime.config import ConfigError, ServiceConfig, at_least, between, setting
from router_svc.core.admission import NO_QUEUE, QueuePolicy, QueueSettings
from router_svc.core.approx_index import ApproxLimits
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings
from router_svc.core.eligibility import BusyLimits, LoraResidency
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
from router_svc.unused_settings import unused_settings

TTL_S_MAX = 31_536_000
# As many as one frontend lets wait for its router.
QUEUE_REQUESTS_LIMIT = 8192


def load_selector(name: str) -> WorkerSelector:
    """A built-in selector by name, or what `module:factory` makes, called without arguments.

    To be called once a process: a factory may open what must not be opened twice. Raises
    ConfigError.
    """
    problem = f"--selector: {name!r}"
    try:
        selector = _selector_factory(name)()
    except Exception as error:
        # It is somebody else's code: whatever it raises means that there is no selector.
        reason = f"cannot be made: {type(error).__name__}: {error}"
        raise ConfigError([f"{problem} {reason}"]) from error
    if not isinstance(getattr(selector, "name", None), str) or not callable(
        getattr(selector, "select", None)
    ):
        reason = "makes something that is no WorkerSelector: it needs name and select"
        raise ConfigError([f"{problem} {reason}"])
    return selector


def _selector_factory(name: str) -> Callable[[], WorkerSelector]:
    """What makes the selector. Raises ValueError, whose message continues "<name> …"."""
    if name in SELECTORS:
        return SELECTORS[name]
    module_name, colon, factory_name = name.partition(":")
    if not (module_name and colon and factory_name):
        raise ValueError(f"is none of {', '.join(SELECTORS)}, nor module:factory")
    try:
        factory: Callable[[], WorkerSelector]
        factory = getattr(importlib.import_module(module_name), factory_name)
    except Exception as error:
        # Importing runs somebody else's code, too.
        raise ValueError(f"cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ValueError("cannot be called: it is to make a WorkerSelector")
    return factory


def _positive_problem(value: float) -> str | None:
    return None if value > 0 else f"must be above 0, not {value:g}"


def _ttl_problem(value: float) -> str | None:
    if value == 0 or 1 <= value <= TTL_S_MAX:
        return None
    return f"must be 0 (off) or within 1..{TTL_S_MAX}, not {value:g}"


def _fraction_problem(value: float) -> str | None:
    return None if 0 < value <= 1 else f"must be above 0 and at most 1, not {value:g}"


def _domain_problem(value: str) -> str | None:
    if "=" not in value:
        return None
    return f"{value!r} is a place; name the domain alone: {value.partition('=')[0]!r}"


def _selector_problem(name: str) -> str | None:
    try:
        _selector_factory(name)
    except ValueError as error:
        return f"{name!r} {error}"
    return None


_APPROX_DEFAULTS = ApproxLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ServiceConfig):
    """Flags and `KVMESH_ROUTER_*` variables of `python -m router_svc`."""

    selector: str = field(
        default="kv",
        metadata=setting(
            f"Placement policy: {', '.join(SELECTORS)}, or module:factory of your own.",
            check=_selector_problem,
        ),
    )
    overlap_score_credit: float = field(
        default=DEFAULT_COST_SETTINGS.overlap_score_credit,
        metadata=setting(
            "Blocks of work that a cached block saves; lower it to weigh load more. 0: caches are "
            "not followed, unless another knob asks what they hold.",
            check=at_least(0),
        ),
    )
    overlap_score_credit_decay: float = field(
        default=DEFAULT_COST_SETTINGS.overlap_score_credit_decay,
        metadata=setting(
            "Raise it (1 halves the credit at one request's excess) when busy workers keep drawing "
            "what they hold.",
            check=at_least(0),
        ),
    )
    prefill_load_scale: float = field(
        default=DEFAULT_COST_SETTINGS.prefill_load_scale,
        metadata=setting(
            "Weight of prompt blocks against blocks held; raise it for time to first token.",
            check=at_least(0),
        ),
    )
    decode_active_request_weight: float = field(
        default=DEFAULT_COST_SETTINGS.decode_active_request_weight,
        metadata=setting(
            "Blocks that a running request counts beside its own; raise it for long answers.",
            check=at_least(0),
        ),
    )
    host_cache_hit_weight: float = field(
        default=DEFAULT_COST_SETTINGS.host_cache_hit_weight,
        metadata=setting("Credit of a block held in host memory only.", check=between(0.0, 1.0)),
    )
    disk_cache_hit_weight: float = field(
        default=DEFAULT_COST_SETTINGS.disk_cache_hit_weight,
        metadata=setting("Credit of a block held on disk only.", check=between(0.0, 1.0)),
    )
    router_temperature: float = field(
        default=DEFAULT_COST_SETTINGS.router_temperature,
        metadata=setting(
            "Above 0, workers are drawn by cost instead of taking the cheapest; for experiments.",
            check=at_least(0),
        ),
    )
    assume_kv_reuse: bool = field(
        default=DEFAULT_COST_SETTINGS.assume_kv_reuse,
        metadata=setting("Count cached blocks as in use already; set it where prompts share much."),
    )
    track_prefill_tokens: bool = field(
        default=DEFAULT_COST_SETTINGS.track_prefill_tokens,
        metadata=setting("Charge prompts to be computed; unset it where prefill costs nothing."),
    )
    track_active_blocks: bool = field(
        default=DEFAULT_COST_SETTINGS.track_active_blocks,
        metadata=setting("Charge blocks held; unset it where workers never run out of them."),
    )
    recent_miss_weight: float = field(
        default=DEFAULT_COST_SETTINGS.recent_miss_weight,
        metadata=setting(
            "How much a worker's recent prefill counts against it; 0 lets idle workers with a "
            "common beginning of prompts draw all of them.",
            check=at_least(0),
        ),
    )
    recent_miss_half_life_s: float = field(
        default=DEFAULT_COST_SETTINGS.recent_miss_half_life_s,
        metadata=setting("After this, recent prefill counts half.", check=_positive_problem),
    )
    kv_events: bool = field(
        default=True,
        metadata=setting(
            "Follow what engines tell of their caches; unset it where none can, to guess from "
            "this router's own decisions instead, of which other routers know nothing."
        ),
    )
    router_ttl_secs: float = field(
        default=_APPROX_DEFAULTS.ttl_s,
        metadata=setting(
            "Seconds a guess counts, for workers whose cache is not told; about as long as a "
            "prompt survives there.",
            check=_positive_problem,
        ),
    )
    router_max_tree_size: int = field(
        default=_APPROX_DEFAULTS.blocks_max,
        metadata=setting(
            "Blocks guessed at most, over all workers, some 230 bytes each; lower it on small "
            "hosts.",
            check=at_least(1),
        ),
    )
    router_prune_target_ratio: float = field(
        default=_APPROX_DEFAULTS.prune_target_ratio,
        metadata=setting(
            "Part of router_max_tree_size that is kept when it was reached; lower it to make "
            "room more seldom.",
            check=_fraction_problem,
        ),
    )
    router_predicted_ttl_secs: float = field(
        default=0.0,
        metadata=setting(
            "Above 0, a prompt's blocks count for this long from its decision on, before events "
            "tell, at the router that decided; try 5 where requests with a common beginning come "
            "in bursts.",
            check=at_least(0),
        ),
    )
    session_affinity_ttl_s: float = field(
        default=DEFAULT_POLICY.session_ttl_s,
        metadata=setting(
            "How long an idle session stays bound to its worker; about as long as its users "
            "pause. 0: requests that name a session are refused.",
            check=_ttl_problem,
        ),
    )
    session_affinity_mode: AffinityMode = field(
        default=DEFAULT_POLICY.session_mode,
        metadata=setting(
            "hard: a session's worker or none, while it is there; soft: another one where its own "
            "may not serve, or has no room and others have."
        ),
    )
    lora_residency: LoraResidency = field(
        default=DEFAULT_POLICY.lora_residency,
        metadata=setting(
            "required: adapters run where they are resident; preferred: elsewhere too if nobody "
            "has them, for engines that load them when asked."
        ),
    )
    kv_transfer_domain: str = field(
        default=DEFAULT_POLICY.domain.name,
        metadata=setting(
            "Domain inside which KV goes from prefill to decode, such as zone with workers of "
            "taint zone=a; set it where links between places are slow. Empty: anywhere.",
            check=_domain_problem,
        ),
    )
    kv_transfer_enforcement: Literal["required", "preferred"] = field(
        default="required",
        metadata=setting("preferred: pairs across places are allowed where load says so."),
    )
    kv_transfer_weight: float = field(
        default=1.0,
        metadata=setting(
            "How much a preferred domain weighs, as a preferred taint does.",
            check=between(0.0, 1.0),
        ),
    )
    bypass_policy: BypassPolicy = field(
        default=NO_BYPASS.policy,
        metadata=setting(
            "When a request that could be split is not: isl_bounding for prompts that are nearly "
            "cached at decode, prefill_load while prefill is busy, isl_or_load for both."
        ),
    )
    bypass_eff_isl_threshold: int = field(
        default=NO_BYPASS.eff_isl_threshold,
        metadata=setting(
            "isl_bounding: fewer uncached tokens than this; what decode can compute unnoticed.",
            check=at_least(0),
        ),
    )
    bypass_eff_isl_ratio_threshold: float = field(
        default=NO_BYPASS.eff_isl_ratio_threshold,
        metadata=setting(
            "isl_bounding: and a smaller part of the prompt than this; above 1: whatever part.",
            check=at_least(0),
        ),
    )
    bypass_prefill_busy_threshold: float | None = field(
        default=NO_BYPASS.prefill_busy_threshold,
        metadata=setting(
            "prefill_load: more waits at the prefill worker than this many of its steps compute; "
            "unset: queue_threshold.",
            check=at_least(0),
        ),
    )
    bypass_decode_busy_threshold: float | None = field(
        default=NO_BYPASS.decode_busy_threshold,
        metadata=setting(
            "Bypass only to workers that use no more than this share of their KV blocks with it; "
            "set it where decode runs near its limit.",
            check=between(0.0, 1.0),
        ),
    )
    track_output_blocks: bool = field(
        default=False,
        metadata=setting(
            "Charge blocks that answers grow by; set it where answers are long against prompts."
        ),
    )
    active_request_expiry_s: float = field(
        default=BOOKING_EXPIRY_S,
        metadata=setting(
            "A booking that its frontend has not announced for so long is forgotten; frontends "
            "announce theirs each 100 s.",
            check=at_least(200),
        ),
    )
    queue_threshold: float | None = field(
        default=NO_QUEUE.threshold,
        metadata=setting(
            "Requests wait here while all their workers have more prompt tokens before them than "
            "so many of their batches; set it (try 2) where priorities shall count. Unset: nobody "
            "waits, and priorities have no effect here.",
            check=at_least(0),
        ),
    )
    queue_policy: QueuePolicy = field(
        default=NO_QUEUE.policy,
        metadata=setting(
            "Who goes first of equal strict priority: fcfs by arrival; wspt the least work to "
            "compute, for a low mean wait; lcfs the latest, for experiments."
        ),
    )
    queue_requests_max: int = field(
        default=NO_QUEUE.requests_max,
        metadata=setting(
            "Requests that may wait; beyond, callers are told to come again. About what your "
            "workers prefill in queue_wait_max_s.",
            check=between(1, QUEUE_REQUESTS_LIMIT),
        ),
    )
    queue_tokens_max: int = field(
        default=NO_QUEUE.tokens_max,
        metadata=setting(
            "Prompt tokens that may wait; the request that crosses it is let in, the next is not.",
            check=at_least(1),
        ),
    )
    queue_wait_max_s: float = field(
        default=NO_QUEUE.wait_max_s,
        metadata=setting(
            "Longest wait, then callers are told to come again; what your clients put up with.",
            check=_positive_problem,
        ),
    )
    active_decode_blocks_threshold: float | None = field(
        default=None,
        metadata=setting(
            "Workers that use more than this share of their KV blocks get no request; set it where "
            "engines preempt when full.",
            check=between(0.0, 1.0),
        ),
    )
    active_prefill_tokens_threshold: int | None = field(
        default=None,
        metadata=setting(
            "Workers with more prompt tokens to compute get no request; set it where late answers "
            "are worse than refused ones.",
            check=at_least(0),
        ),
    )
    active_prefill_tokens_threshold_frac: float | None = field(
        default=None,
        metadata=setting(
            "The same in batches of the worker; for unequal workers.", check=at_least(0)
        ),
    )
    metrics_port: int | None = field(
        default=None,
        metadata=setting(
            "Serve Prometheus metrics over HTTP on this port (0: any); set it to be scraped.",
            check=between(0, 65535),
        ),
    )

    def problems(self) -> list[str]:
        """See ServiceConfig."""
        found = ServiceConfig.problems(self)
        if self.kv_transfer_enforcement == "preferred" and not self.kv_transfer_domain:
            found.append("kv_transfer_domain: kv_transfer_enforcement needs one to prefer")
        if self.bypass_policy in LOAD_POLICIES and self._prefill_busy_threshold is None:
            found.append(
                f"bypass_prefill_busy_threshold: {self.bypass_policy} needs it, or queue_threshold"
            )
        return found + unused_settings(self)

    @property
    def policy(self) -> Policy:
        """What holds for placements beside the cost."""
        is_preferred = self.kv_transfer_enforcement == "preferred"
        return Policy(
            session_ttl_s=self.session_affinity_ttl_s,
            session_mode=self.session_affinity_mode,
            lora_residency=self.lora_residency,
            domain=TransferDomain(
                self.kv_transfer_domain, self.kv_transfer_weight if is_preferred else None
            ),
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
        )

    @property
    def _prefill_busy_threshold(self) -> float | None:
        configured = self.bypass_prefill_busy_threshold
        return self.queue_threshold if configured is None else configured

    @property
    def index_settings(self) -> IndexSettings:
        """Which ways to know the caches these fields choose."""
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
        """Whether a knob that is set, beside overlap_score_credit, asks what caches hold."""
        lower_tiers = ("host_cache_hit_weight", "disk_cache_hit_weight")
        return (
            self.assume_kv_reuse
            or self.bypass_policy in ISL_POLICIES
            or (self.queue_threshold is not None and self.queue_policy == "wspt")
            or any(
                getattr(self, n) not in (0, getattr(DEFAULT_COST_SETTINGS, n)) for n in lower_tiers
            )
        )

    @property
    def cost_settings(self) -> CostSettings:
        """Those of the fields that are knobs of the cost."""
        return CostSettings(
            **{spec.name: getattr(self, spec.name) for spec in fields(CostSettings)}
        )
