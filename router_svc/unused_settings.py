"""Settings that have no effect in combination with others (pure)."""

from __future__ import annotations

from dataclasses import fields

from router_svc.config import RouterConfig
from router_svc.core.cost import CostSettings
from router_svc.core.pairing import ISL_POLICIES, LOAD_POLICIES
from router_svc.core.selectors import COST_SELECTORS, SELECTORS

# The load tracker uses these with every selector.
_TRACKING = {"track_prefill_tokens", "track_active_blocks"}
# Terms that Dynamo's cost lacks.
_KV_COST = "uncached_block_weight held_block_weight recent_miss_weight recent_miss_half_life_s"
_COST = {spec.name for spec in fields(CostSettings)} - _TRACKING


def settings_without_effect(config: RouterConfig) -> dict[str, str]:
    """Returns reason by setting, for each setting that is not at its default and has no effect."""
    bypass = config.bypass_policy
    bypass_reason = f"bypass_policy is {bypass}"
    index = config.index_settings.kind
    # A credit of 0 also disables the index, with every selector.
    cost = _COST - ({"overlap_score_credit"} if config.overlap_score_credit == 0 else set())
    is_enforced = config.kv_transfer_enforcement == "required"
    has_other_cost = config.selector in SELECTORS and config.selector not in COST_SELECTORS
    table: list[tuple[bool, str, str]] = [
        (has_other_cost, f"selector is {config.selector}", " ".join(cost)),
        (config.selector == "dynamo", "selector is dynamo", _KV_COST),
        (
            index == "none",
            "overlap_score_credit is 0",
            "router_predicted_ttl_secs router_ttl_secs router_max_tree_size"
            " router_prune_target_ratio overlap_score_credit_decay",
        ),
        (index == "approx", "kv_events is off", "router_predicted_ttl_secs"),
        (
            bypass not in ISL_POLICIES,
            bypass_reason,
            "bypass_eff_isl_threshold bypass_eff_isl_ratio_threshold",
        ),
        (bypass not in LOAD_POLICIES, bypass_reason, "bypass_prefill_busy_threshold"),
        (bypass == "off", "bypass_policy is off", "bypass_decode_busy_threshold"),
        (
            config.queue_threshold is None,
            "queue_threshold is unset",
            "queue_policy queue_requests_max queue_tokens_max queue_wait_max_s",
        ),
        (
            not config.track_prefill_tokens,
            "track_prefill_tokens is off",
            "queue_threshold active_prefill_tokens_threshold active_prefill_tokens_threshold_frac"
            " bypass_prefill_busy_threshold",
        ),
        (not config.track_active_blocks, "track_active_blocks is off", "track_output_blocks"),
        (is_enforced, "kv_transfer_enforcement is required", "kv_transfer_weight"),
        (not config.session_affinity_ttl_s, "session_affinity_ttl_s is 0", "session_affinity_mode"),
    ]
    return {
        name: reason
        for has_no_effect, reason, names in table
        if has_no_effect
        for name in names.split()
        if getattr(config, name) != RouterConfig.model_fields[name].default
    }
