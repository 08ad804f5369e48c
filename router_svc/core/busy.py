"""When a worker has too much to do already (pure).

Two notions. A rank is *prefill-busy* for the admission queue when more than `threshold` batches of
prompt tokens wait or run there; requests then wait at the router. A worker is *busy* when each of
its ranks exceeds one of `BusyLimits`; it then gets no request, and where nobody else may serve one
the caller is told to come again. Both as NVIDIA Dynamo 1.6 has them; by default neither is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router_svc.core.types import Candidate, Leg, LoadTotals, Placement

# Tokens a batch where a worker does not say: then only absurd loads are busy.
BATCH_TOKENS_UNKNOWN = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLimits:
    """What a rank may have before it counts as busy; None: no limit.

    active_decode_blocks: share of its KV blocks in use, where it says how many it has; not for the
    prefill leg. active_prefill_tokens: prompt tokens to compute; active_prefill_tokens_frac: the
    same in batches, where it says how many tokens a batch has; neither for the decode leg.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None
    active_prefill_tokens_frac: float | None = None

    @property
    def is_disabled(self) -> bool:
        """Whether nobody is ever busy."""
        return self == NO_LIMITS

    def is_exceeded(self, candidate: Candidate, load: LoadTotals, leg: Leg) -> bool:
        """Whether a rank with this load is busy."""
        worker, tokens = candidate.instance, load.prefill_tokens
        if leg != "decode":
            if self.active_prefill_tokens is not None and tokens > self.active_prefill_tokens:
                return True
            max_share, batch_tokens = self.active_prefill_tokens_frac, worker.max_num_batched_tokens
            if (
                max_share is not None
                and batch_tokens is not None
                and tokens > max_share * batch_tokens
            ):
                return True
        max_share, blocks = self.active_decode_blocks, worker.total_kv_blocks
        if leg == "prefill" or max_share is None or blocks is None:
            return False
        return load.decode_blocks > max_share * blocks


NO_LIMITS = BusyLimits()


def is_prefill_busy(candidate: Candidate, load: LoadTotals, threshold: float) -> bool:
    """prefill_tokens > threshold * max_num_batched_tokens."""
    batch_tokens = candidate.instance.max_num_batched_tokens or BATCH_TOKENS_UNKNOWN
    return load.prefill_tokens > threshold * batch_tokens


def busy_worker_ids(
    candidates: Sequence[Candidate],
    load_of: Callable[[Placement], LoadTotals],
    limits: BusyLimits,
    leg: Leg,
) -> frozenset[int]:
    """Ids of the workers of which every rank is busy."""
    if limits.is_disabled:
        return frozenset()
    not_busy = {
        c.placement.worker_id
        for c in candidates
        if not limits.is_exceeded(c, load_of(c.placement), leg)
    }
    return frozenset(c.placement.worker_id for c in candidates) - not_busy
