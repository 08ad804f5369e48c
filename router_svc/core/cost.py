"""The cost of a placement, and its settings (pure).

The unit is one block of KV cache: of prompt tokens to compute, or of cache held while decoding.
Lower is better. For a worker rank w and a request of `total_tokens` (block size b,
R = ceil(total_tokens / b) blocks), with the estimated load of w (queued prompt tokens Q, blocks D,
requests N) and the part of the prompt that w holds (leading blocks on the device, beyond them on
the host, and beyond those on disk):

    excess  = (Q - min Q over the eligible) / b / R               0 unless prefill is tracked
    device  = overlap_score_credit / (1 + overlap_score_credit_decay * excess)
    credit  = device * on_device + host_cache_hit_weight * on_host + disk_cache_hit_weight * on_disk
    held    = D + R - reused + decode_active_request_weight * (N + 1)

The cost of the selector `kv`, chosen by replay of traces (ADR 0021):

    prefill = prefill_load_scale * slowness * (work / b + uncached_block_weight * U)
    U       = max(0, total_tokens / b - credit)
    misses  = uncached_block_weight * recent_miss_weight * R * M / (M + mean M of the eligible + R)
    cost    = (prefill + held_block_weight * held + misses) * taints
    taints  = exp(-tanh(sum of matching preferred taints))

`work` are the prompt tokens that w still has to compute, less its progress since the last prompt
was done; `slowness` is the time of w for a token, divided by the mean of all ranks
(`RankLoads.prefill_work`). An uncached block counts more than a queued one, since it also evicts a
block that another prompt would reuse. A held block costs little: it delays no prompt until the
cache is full.

The cost of the selector `dynamo`, as NVIDIA Dynamo 1.6 documents it:

    cost    = (prefill_load_scale * max(0, (Q + total_tokens) / b - credit) + held) * taints

The credit never exceeds the work it saves. On the decode leg of a pair, which computes no prompt,
both cost max(0, D + R - reused - credit) + decode_active_request_weight * (N + 1), times taints.

Misses. The load of idle workers is equal, so overlap alone would decide, and the worker of the
first of many short prompts with a common prefix would get all of them. M is the recent prefill work
of w in blocks, halved every `recent_miss_half_life_s` (`RecentPrefill`). At weights of 1 the
term grows like M while M is small and stays below R. A rank with much
recent prefill is more expensive for prompts that it holds in part; a prompt that it holds nearly
whole stays; if all compute equally much, the term is the same for all. The reference is the mean,
not the minimum: one worker that computes nothing (a stuck one, for example) changes the terms of
the others little, and equally.

Affinity keys. If a query has an affinity key (`key_affinity`), on_device of the rank that computed
the last prompt of the key is at least affinity_weight times the blocks of that prompt, unless the
index reports the cache of the rank exactly. A prompt of unknown length has UNKNOWN_PROMPT_TOKENS
then.

Reused. Bookings contain counts and no hash lists, so all blocks of each request are counted, also
shared ones. With `assume_kv_reuse`, blocks of the prompt that w holds count as in use already, up
to D: reused = min(D, blocks held), else 0. It is off by default (Dynamo: on, with exact hash
lists): counting all blocks prevents that a very common prompt gathers on one worker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from common.errors import InvalidRequest, Unsupported
from common.request.placement import Placement
from common.request.preprocessed import RouterConfigOverride

# Move the reference time before the powers of two reach the limits of a float.
_REBASE_HALF_LIVES = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings:
    """The settings of the cost; names and defaults as in NVIDIA Dynamo 1.6 where it has them.

    The formulas are in the docstring of the module.
    """

    overlap_score_credit: float = 1.0
    """Blocks of work that a block held on the device saves."""

    overlap_score_credit_decay: float = 0.0
    """How fast the credit falls with queued prefill; 1 halves it for one request's worth."""

    prefill_load_scale: float = 1.0
    """Weight of the prefill term."""

    decode_active_request_weight: float = 1.0
    """Extra blocks per request; above 0, requests of unknown length count."""

    host_cache_hit_weight: float = 0.75
    """Credit of a block held on the host only, 0..1."""

    disk_cache_hit_weight: float = 0.25
    """Credit of a block held on disk only, 0..1."""

    router_temperature: float = 0.0
    """0 takes the cheapest; above 0, a draw from the softmax of the costs."""

    assume_kv_reuse: bool = False
    """Blocks of the prompt that the rank holds count as in use already."""

    recent_miss_weight: float = 1.0
    """Weight of recent prefill work, in the term `misses`."""

    recent_miss_half_life_s: float = 60.0
    """Seconds in which the recent prefill work of a rank is halved."""

    track_prefill_tokens: bool = True
    """Bookings include prompt tokens to be computed."""

    track_active_blocks: bool = True
    """Bookings include blocks held."""

    uncached_block_weight: float = 2.0
    """Weight of an uncached block for the selector `kv`, in queued blocks."""

    held_block_weight: float = 0.02
    """Weight of a held block for the selector `kv`, in queued blocks."""

    affinity_weight: float = 1.0
    """Share of the last prompt of an affinity key that counts as cached at its rank."""

    def with_override(self, override: RouterConfigOverride | None) -> CostSettings:
        """Returns the settings for one request. Raises InvalidRequest for a field out of range,
        Unsupported for a shared_cache_multiplier above 0: there is no shared cache.
        """
        if override is None:
            return self
        credit, scale = override.overlap_score_credit, override.prefill_load_scale
        legacy_scale = override.overlap_score_weight
        _check_override(override)
        if override.shared_cache_multiplier:
            field = f"{_OVERRIDE_PATH}.shared_cache_multiplier"
            raise Unsupported(field, "there is no shared cache")
        if legacy_scale is not None:
            if scale not in (None, legacy_scale):
                raise InvalidRequest(
                    f"overlap_score_weight ({legacy_scale}) and prefill_load_scale ({scale}) "
                    "are names of one setting: set only one",
                    f"{_OVERRIDE_PATH}.overlap_score_weight",
                )
            scale = legacy_scale
            credit = 0.0 if legacy_scale == 0 else credit
        overridden: dict[str, Any] = {
            "overlap_score_credit": credit,
            "prefill_load_scale": scale,
            "router_temperature": override.router_temperature,
            "assume_kv_reuse": override.assume_kv_reuse,
            "track_prefill_tokens": override.track_prefill_tokens,
        }
        return replace(self, **{n: value for n, value in overridden.items() if value is not None})

    def reject_cost_overrides(self, override: RouterConfigOverride | None, selector: str) -> None:
        """Raises Unsupported for a field that only a selector with a cost can apply."""
        for name in _COST_OVERRIDE_FIELDS:
            if override is not None and getattr(override, name) is not None:
                reason = f"the selector {selector} has no such cost"
                raise Unsupported(f"{_OVERRIDE_PATH}.{name}", reason)

    def reject_overlap_overrides(self, override: RouterConfigOverride | None, reason: str) -> None:
        """Raises Unsupported for a field that uses overlap, if the router has no index."""
        for name in ("overlap_score_credit", "assume_kv_reuse"):
            if override is not None and getattr(override, name):
                reason = f"this router has no cache index: {reason}"
                raise Unsupported(f"{_OVERRIDE_PATH}.{name}", reason)

    def for_decode_leg(self) -> CostSettings:
        """Returns the settings for the decode leg of a pair: its cache comes from prefill."""
        return replace(
            self, overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False
        )


DEFAULT_COST_SETTINGS = CostSettings()


class Terms(NamedTuple):
    """The parts of a cost, in blocks; the names are those of `Explain`."""

    prefill: float
    """The prompt tokens to compute, on a prefill or whole leg less the credit."""

    decode: float
    """The blocks held, on a decode leg less the credit."""

    active: float
    """The active requests, each counting `decode_active_request_weight` blocks."""

    misses: float
    """The recent prefill work of the rank."""

    overlap_credit: float
    """The credit for cached blocks; `prefill` or `decode` contains it already."""

    taint_factor: float = 1.0
    """Greater than 1 with unwanted taints, less with preferred ones."""

    @property
    def total(self) -> float:
        """The sum of the parts without `overlap_credit`, times `taint_factor`."""
        return (self.prefill + self.decode + self.active + self.misses) * self.taint_factor


class RecentPrefill:
    """The recent prefill work of each rank: a sum of the blocks that prompts placed on it lacked,
    which halves in each half-life, idle or not. Sums are stored undecayed: an addition at time t
    times 2^(t / half_life), and divided by 2^(now / half_life) when read. Times are seconds of one
    clock. Invariant: one entry per rank that was added to and not forgotten.
    """

    def __init__(self, half_life_s: float) -> None:
        assert half_life_s > 0, "half_life_s must be positive"
        self._half_life_s = half_life_s
        self._reference_s: float | None = None
        self._scaled_blocks: dict[Placement, float] = {}

    def add(self, placement: Placement, blocks: float, now: float) -> None:
        """Counts a placed prompt of which `blocks` must be computed."""
        rebase_s = _REBASE_HALF_LIVES * self._half_life_s
        if self._reference_s is None or now - self._reference_s > rebase_s:
            self._rebase(now)
        scaled = blocks / self._decay_factor(now)
        self._scaled_blocks[placement] = self._scaled_blocks.get(placement, 0.0) + scaled

    def blocks_of(self, placements: Iterable[Placement], now: float) -> list[float]:
        scaled_blocks = self._scaled_blocks
        if not scaled_blocks:
            return [0.0 for _ in placements]
        decay_factor = self._decay_factor(now)
        return [scaled_blocks.get(placement, 0.0) * decay_factor for placement in placements]

    def forget(self, worker_id: int) -> None:
        for placement in [p for p in self._scaled_blocks if p.worker_id == worker_id]:
            del self._scaled_blocks[placement]

    def __len__(self) -> int:
        return len(self._scaled_blocks)

    def _decay_factor(self, now: float) -> float:
        assert self._reference_s is not None, "call add first"
        # Older blocks are below the range of a float: count them as 0.
        return float(2.0 ** -min((now - self._reference_s) / self._half_life_s, 1000.0))

    def _rebase(self, now: float) -> None:
        if self._reference_s is not None:
            decay_factor = self._decay_factor(now)
            self._scaled_blocks = {p: v * decay_factor for p, v in self._scaled_blocks.items()}
        self._reference_s = now


def draw_index(costs: Sequence[float], temperature: float, u: float) -> int:
    """Returns a random index with probability proportional to exp(-x / temperature), x: the costs
    scaled to 0..1; equal for equal costs. u: uniform in [0, 1). temperature must be above 0.
    """
    cheapest_cost = min(costs)
    span = max(costs) - cheapest_cost
    if span == 0:
        return min(int(u * len(costs)), len(costs) - 1)
    # The least cost has weight 1, so the sum is never 0.
    weights = [math.exp((cheapest_cost - cost) / span / temperature) for cost in costs]
    left = u * sum(weights)
    for at, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return at
    return costs.index(cheapest_cost)  # Only after a rounding error.


_OVERRIDE_PATH = "query.config_override"
# Fields that change more than the booked load.
_COST_OVERRIDE_FIELDS = (
    "overlap_score_credit",
    "prefill_load_scale",
    "overlap_score_weight",
    "router_temperature",
    "assume_kv_reuse",
)
# The numbers among them, and their limits.
_OVERRIDE_LIMITS = MappingProxyType(
    {**dict.fromkeys(_COST_OVERRIDE_FIELDS[:-1], math.inf), "shared_cache_multiplier": 1.0}
)


def _check_override(override: RouterConfigOverride) -> None:
    for name, maximum in _OVERRIDE_LIMITS.items():
        value: float | None = getattr(override, name)
        if value is not None and not (math.isfinite(value) and 0 <= value <= maximum):
            is_bounded = maximum != math.inf
            limit = f"within 0..{maximum:g}" if is_bounded else "a finite number of 0 or more"
            raise InvalidRequest(f"{name} must be {limit}, not {value}", f"{_OVERRIDE_PATH}.{name}")
