"""Knobs that would do nothing as the others are set. Whoever sets one is told so at start (pure).

A knob counts as set when it differs from its default: defaults fit every selector and policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from router_svc.core.cost import CostKnobs
from router_svc.core.pairing import ISL_POLICIES, LOAD_POLICIES
from router_svc.core.selectors import SELECTORS, Direct, Kv

if TYPE_CHECKING:
    from router_svc.config import RouterConfig

# What the load book goes by, whatever the selector.
_OF_THE_CHARGES = ("track_prefill_tokens", "track_active_blocks")
_OF_THE_QUEUE = ("queue_policy", "queue_requests_max", "queue_tokens_max", "queue_wait_max_s")
_OF_PROMPT_TOKENS = (
    "queue_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
)


class _Idle(NamedTuple):
    """Knobs that have no effect, and why."""

    names: Iterable[str]
    why: str


def idle_knobs(config: RouterConfig) -> list[str]:
    """One sentence for each knob that is set and has no effect; it begins with the knob's name."""
    defaults = {spec.name: spec.default for spec in fields(config)}
    return [
        f"{name}: {idle.why}"
        for idle in _idle(config)
        for name in idle.names
        if getattr(config, name) != defaults[name]
    ]


def _idle(config: RouterConfig) -> Iterator[_Idle]:
    yield from _of_the_selector(config)
    yield from _of_the_index(config)
    yield from _of_the_bypass(config)
    if config.queue_threshold is None:
        yield _Idle(_OF_THE_QUEUE, "nobody waits, queue_threshold is unset")
    if not config.track_prefill_tokens:
        why = "no prompt tokens are charged, track_prefill_tokens is off"
        yield _Idle(_OF_PROMPT_TOKENS, why)
    if not config.track_active_blocks:
        yield _Idle(("track_output_blocks",), "no blocks are charged, track_active_blocks is off")
    if config.kv_transfer_enforcement == "required":
        why = "nothing is to be weighed, kv_transfer_enforcement is required"
        yield _Idle(("kv_transfer_weight",), why)
    if config.recent_miss_weight == 0:
        yield _Idle(("recent_miss_half_life_s",), "misses do not count, recent_miss_weight is 0")
    if config.session_affinity_ttl_s == 0:
        yield _Idle(("session_affinity_mode",), "no sessions are kept, session_affinity_ttl_s is 0")


def _of_the_selector(config: RouterConfig) -> Iterator[_Idle]:
    selector = config.selector
    if selector in SELECTORS and selector != Kv.name:
        knobs = {spec.name for spec in fields(CostKnobs)} - set(_OF_THE_CHARGES)
        if config.overlap_score_credit == 0:
            knobs.discard("overlap_score_credit")  # It says that no index is wanted, too.
        yield _Idle(sorted(knobs), f"selector {selector} has no such cost")
    if selector == Direct.name:
        why = "selector direct goes by pins, and a pinned prefill is never bypassed"
        yield _Idle(("bypass_policy",), why)


def _of_the_index(config: RouterConfig) -> Iterator[_Idle]:
    kind = config.index_choice.kind
    if kind == "none":
        names = (
            "router_predicted_ttl_secs",
            "router_ttl_secs",
            "router_max_tree_size",
            "router_prune_target_ratio",
            "overlap_score_credit_decay",
        )
        why = "nothing asks what caches hold, overlap_score_credit is 0"
        yield _Idle(names, why)
    elif kind == "approx":
        why = "predictions stand beside KV events, and kv_events is off"
        yield _Idle(("router_predicted_ttl_secs",), why)


def _of_the_bypass(config: RouterConfig) -> Iterator[_Idle]:
    policy = config.bypass_policy
    if policy not in ISL_POLICIES:
        names = ("bypass_eff_isl_threshold", "bypass_eff_isl_ratio_threshold")
        yield _Idle(names, f"bypass_policy {policy} does not ask how short a prompt is")
    if policy not in LOAD_POLICIES:
        why = f"bypass_policy {policy} does not ask how busy prefill is"
        yield _Idle(("bypass_prefill_busy_threshold",), why)
    elif not config.track_prefill_tokens:
        why = "no prompt tokens are charged, track_prefill_tokens is off"
        yield _Idle(("bypass_prefill_busy_threshold",), why)
    if policy == "off":
        yield _Idle(("bypass_decode_busy_threshold",), "nothing is bypassed, bypass_policy is off")
