"""What a placement costs, and the knobs of that cost (pure).

The unit is one block of KV cache: of prompt tokens still to be computed, or of cache held while
decoding. Lower is better. For a worker rank w and a request of `total_tokens` (block size b,
R = ceil(total_tokens / b) blocks), with the estimated load of w (queued prompt tokens Q, blocks D,
requests N) and what w holds of the prompt (leading blocks on the device, and beyond them on the
host, and beyond those on disk):

    excess  = (Q - min Q over the eligible) / b / R               0 unless prefill is tracked
    device  = overlap_score_credit / (1 + overlap_score_credit_decay * excess)
    credit  = device * on_device + host_cache_hit_weight * on_host + disk_cache_hit_weight * on_disk
    prefill = prefill_load_scale * max(0, (Q + total_tokens) / b - credit)
    decode  = D + R - reused
    active  = decode_active_request_weight * (N + 1)
    misses  = recent_miss_weight * R * M / (M + mean M over the eligible + R)
    cost    = (prefill + decode + active + misses) * exp(-tanh(sum of matching preferred taints))

On the decode leg of a pair, which computes no prompt: prefill = misses = 0, and decode =
max(0, D + R - reused - credit).

All but `misses` is the cost that NVIDIA Dynamo 1.6 documents. The credit is never more than the
work it saves: the prefill term stops at zero.

Misses. Idle workers have no load to tell them apart, so overlap alone decides, and whoever got the
first of many short prompts with a common beginning gets all of them for ever. M is what w had to
compute of the prompts placed on it, in blocks, halved every `recent_miss_half_life_s` (`misses`);
the term grows like recent_miss_weight * M while M is small and stays below recent_miss_weight * R.
So a rank that computed much lately looks more expensive to prompts that it holds in part; a prompt
that it holds nearly whole stays; and where all compute equally much, the term is the same for all.
It is measured against the mean, not the least: one worker that computes nothing (because it is
stuck, say) changes the others' terms by little, and equally.

Reused. A replica of the books carries charges and no hash lists, so each request's blocks are
counted whole, also those that requests share. `assume_kv_reuse` says that blocks which w holds of
the prompt are in use there already, as far as D reaches: reused = min(D, blocks held), else 0. It
is off by default (Dynamo: on, with exact hash lists): counting whole blocks is what keeps a prompt
that everybody sends from gathering on one worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from common.errors import InvalidRequest, Unsupported
from common.request.preprocessed import RouterConfigOverride

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """The knobs of the cost; names and defaults as in NVIDIA Dynamo 1.6 where it has them.

    overlap_score_credit: blocks of work that a block held on the device saves.
    overlap_score_credit_decay: how fast that credit falls with queued prefill; 1 halves it for one
    request's worth of it.
    prefill_load_scale: weight of the prefill term.
    decode_active_request_weight: blocks that a request counts beside its own; above 0, requests of
    unknown length count too.
    host_cache_hit_weight, disk_cache_hit_weight: credit of a block held there only, 0..1.
    router_temperature: 0 takes the cheapest; above, the softmax of the costs is drawn from.
    assume_kv_reuse, recent_miss_weight, recent_miss_half_life_s: see the module.
    track_prefill_tokens: bookings charge the prompt tokens to be computed.
    track_active_blocks: bookings charge the blocks held.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 1.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    router_temperature: float = 0.0
    assume_kv_reuse: bool = False
    recent_miss_weight: float = 1.0
    recent_miss_half_life_s: float = 60.0
    track_prefill_tokens: bool = True
    track_active_blocks: bool = True

    def with_override(self, override: RouterConfigOverride | None) -> CostSettings:
        """The knobs for one request.

        InvalidRequest names a field that is out of range, Unsupported a shared_cache_multiplier
        above 0: no shared cache is known here.
        """
        if override is None:
            return self
        credit, scale = override.overlap_score_credit, override.prefill_load_scale
        legacy_scale = override.overlap_score_weight
        _check_override(override)
        if override.shared_cache_multiplier:
            field = f"{_OVERRIDE_PATH}.shared_cache_multiplier"
            raise Unsupported(field, "this router knows of no shared cache")
        if legacy_scale is not None:
            if scale not in (None, legacy_scale):
                raise InvalidRequest(
                    f"overlap_score_weight {legacy_scale} is the older name of prefill_load_scale "
                    f"({scale}): give one",
                    f"{_OVERRIDE_PATH}.overlap_score_weight",
                )
            scale = legacy_scale
            credit = 0.0 if legacy_scale == 0 else credit
        return replace(
            self,
            overlap_score_credit=_or_default(credit, self.overlap_score_credit),
            prefill_load_scale=_or_default(scale, self.prefill_load_scale),
            router_temperature=_or_default(override.router_temperature, self.router_temperature),
            assume_kv_reuse=_or_default(override.assume_kv_reuse, self.assume_kv_reuse),
            track_prefill_tokens=_or_default(
                override.track_prefill_tokens, self.track_prefill_tokens
            ),
        )

    def reject_cost_overrides(self, override: RouterConfigOverride | None, selector: str) -> None:
        """Unsupported, naming the field, for what only a selector with a cost can honour."""
        for name in _COST_OVERRIDE_FIELDS:
            if override is not None and getattr(override, name) is not None:
                reason = f"this router places by {selector}, which has no such cost"
                raise Unsupported(f"{_OVERRIDE_PATH}.{name}", reason)

    def reject_overlap_overrides(self, override: RouterConfigOverride | None, reason: str) -> None:
        """Unsupported, naming the field, for what asks for overlap where none is ever known."""
        for name in ("overlap_score_credit", "assume_kv_reuse"):
            if override is not None and getattr(override, name):
                raise Unsupported(
                    f"{_OVERRIDE_PATH}.{name}", f"this router follows no caches: {reason}"
                )

    def for_decode_leg(self) -> CostSettings:
        """Those of the decode leg of a pair: its cache comes from prefill."""
        return replace(
            self, overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False
        )


DEFAULT_COST_SETTINGS = CostSettings()


class Terms(NamedTuple):
    """The parts of a cost, in blocks; `total` is their sum times `taint_factor`.

    overlap_credit is part of `prefill` (of `decode` on a decode leg) already, and not added.
    """

    prefill: float
    decode: float
    active: float
    misses: float
    overlap_credit: float
    taint_factor: float = 1.0

    @property
    def total(self) -> float:
        return (self.prefill + self.decode + self.active + self.misses) * self.taint_factor


def draw_index(costs: Sequence[float], temperature: float, u: float) -> int:
    """The index drawn by exp(-x / temperature), x being the costs scaled to 0..1.

    u: uniform in [0, 1). All costs equal: all with equal chance. temperature must be above 0.
    """
    cheapest_cost = min(costs)
    span = max(costs) - cheapest_cost
    if span == 0:
        return min(int(u * len(costs)), len(costs) - 1)
    # The least cost weighs 1, so the sum is never 0.
    weights = [math.exp((cheapest_cost - cost) / span / temperature) for cost in costs]
    left = u * sum(weights)
    for at, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return at
    return costs.index(cheapest_cost)  # Rounding has left a crumb.


_OVERRIDE_PATH = "query.config_override"
# What an override changes beside what is booked.
_COST_OVERRIDE_FIELDS = (
    "overlap_score_credit",
    "prefill_load_scale",
    "overlap_score_weight",
    "router_temperature",
    "assume_kv_reuse",
)
_NON_NEGATIVE_FIELDS = (
    "overlap_score_credit",
    "prefill_load_scale",
    "overlap_score_weight",
    "router_temperature",
)
_OVERRIDE_LIMITS = MappingProxyType(
    {**dict.fromkeys(_NON_NEGATIVE_FIELDS, math.inf), "shared_cache_multiplier": 1.0}
)


def _check_override(override: RouterConfigOverride) -> None:
    for name, maximum in _OVERRIDE_LIMITS.items():
        value: float | None = getattr(override, name)
        if value is not None and not (math.isfinite(value) and 0 <= value <= maximum):
            limit = (
                "a finite number of 0 or more" if maximum == math.inf else f"within 0..{maximum:g}"
            )
            raise InvalidRequest(f"{name} must be {limit}, not {value}", f"{_OVERRIDE_PATH}.{name}")


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value
