"""Knobs that would do nothing as the others are set. Whoever sets one is told so at start (pure).

A knob counts as set when it differs from its default: defaults fit every selector and policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from router_svc.core.cost import CostSettings
from router_svc.core.pairing import ISL_POLICIES, LOAD_POLICIES
from router_svc.core.selectors import SELECTORS, DirectSelector, KvSelector

if TYPE_CHECKING:
    from router_svc.config import RouterConfig

# What the load book goes by, whatever the selector.
_BOOKED_LOAD_SETTINGS = ("track_prefill_tokens", "track_active_blocks")
_QUEUE_SETTINGS = ("queue_policy", "queue_requests_max", "queue_tokens_max", "queue_wait_max_s")
_PROMPT_TOKEN_SETTINGS = (
    "queue_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
)


class _UnusedSettings(NamedTuple):
    """Knobs that have no effect, and why."""

    names: Iterable[str]
    reason: str


def unused_settings(config: RouterConfig) -> list[str]:
    """One sentence for each knob that is set and has no effect; it begins with the knob's name."""
    defaults = {spec.name: spec.default for spec in fields(config)}
    return [
        f"{name}: {unused.reason}"
        for unused in _find_unused(config)
        for name in unused.names
        if getattr(config, name) != defaults[name]
    ]


def _find_unused(config: RouterConfig) -> Iterator[_UnusedSettings]:
    yield from _unused_by_selector(config)
    yield from _unused_by_index(config)
    yield from _unused_by_bypass(config)
    if config.queue_threshold is None:
        yield _UnusedSettings(_QUEUE_SETTINGS, "nobody waits, queue_threshold is unset")
    if not config.track_prefill_tokens:
        reason = "no prompt tokens are charged, track_prefill_tokens is off"
        yield _UnusedSettings(_PROMPT_TOKEN_SETTINGS, reason)
    if not config.track_active_blocks:
        yield _UnusedSettings(
            ("track_output_blocks",), "no blocks are charged, track_active_blocks is off"
        )
    if config.kv_transfer_enforcement == "required":
        reason = "nothing is to be weighed, kv_transfer_enforcement is required"
        yield _UnusedSettings(("kv_transfer_weight",), reason)
    if config.recent_miss_weight == 0:
        yield _UnusedSettings(
            ("recent_miss_half_life_s",), "misses do not count, recent_miss_weight is 0"
        )
    if config.session_affinity_ttl_s == 0:
        yield _UnusedSettings(
            ("session_affinity_mode",), "no sessions are kept, session_affinity_ttl_s is 0"
        )


def _unused_by_selector(config: RouterConfig) -> Iterator[_UnusedSettings]:
    selector = config.selector
    if selector in SELECTORS and selector != KvSelector.name:
        cost_settings = {spec.name for spec in fields(CostSettings)} - set(_BOOKED_LOAD_SETTINGS)
        if config.overlap_score_credit == 0:
            cost_settings.discard("overlap_score_credit")  # It says that no index is wanted, too.
        yield _UnusedSettings(sorted(cost_settings), f"selector {selector} has no such cost")
    if selector == DirectSelector.name:
        reason = "selector direct goes by pins, and a pinned prefill is never bypassed"
        yield _UnusedSettings(("bypass_policy",), reason)


def _unused_by_index(config: RouterConfig) -> Iterator[_UnusedSettings]:
    kind = config.index_settings.kind
    if kind == "none":
        names = (
            "router_predicted_ttl_secs",
            "router_ttl_secs",
            "router_max_tree_size",
            "router_prune_target_ratio",
            "overlap_score_credit_decay",
        )
        reason = "nothing asks what caches hold, overlap_score_credit is 0"
        yield _UnusedSettings(names, reason)
    elif kind == "approx":
        reason = "predictions stand beside KV events, and kv_events is off"
        yield _UnusedSettings(("router_predicted_ttl_secs",), reason)


def _unused_by_bypass(config: RouterConfig) -> Iterator[_UnusedSettings]:
    policy = config.bypass_policy
    if policy not in ISL_POLICIES:
        names = ("bypass_eff_isl_threshold", "bypass_eff_isl_ratio_threshold")
        yield _UnusedSettings(names, f"bypass_policy {policy} does not ask how short a prompt is")
    if policy not in LOAD_POLICIES:
        reason = f"bypass_policy {policy} does not ask how busy prefill is"
        yield _UnusedSettings(("bypass_prefill_busy_threshold",), reason)
    elif not config.track_prefill_tokens:
        reason = "no prompt tokens are charged, track_prefill_tokens is off"
        yield _UnusedSettings(("bypass_prefill_busy_threshold",), reason)
    if policy == "off":
        yield _UnusedSettings(
            ("bypass_decode_busy_threshold",), "nothing is bypassed, bypass_policy is off"
        )
