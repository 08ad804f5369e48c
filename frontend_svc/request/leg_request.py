"""What one leg changes of a request (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.request.preprocessed import (
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from common.request.token_stream import LegChanges
from frontend_svc.models.engine_options import LOCAL_FIELDS
from frontend_svc.request.continuation import penalties_in_force


def leg_changes(
    request: PreprocessedRequest,
    generated: Sequence[int] = (),
    dp_rank: int = 0,
    *,
    is_prefill: bool = False,
) -> LegChanges:
    """Returns what one leg changes of a request.

    generated: tokens of earlier attempts. They become part of the prompt, with smaller limits.
    dp_rank: of the leg's worker.
    is_prefill: whether the leg only computes the prompt.
    """
    changes: LegChanges = {}
    for name in LOCAL_FIELDS:
        if getattr(request, name) is not None:
            changes[name] = None
    if request.routing is not None or dp_rank:
        routing = worker_hints(request.routing, dp_rank)
        if routing != request.routing:
            changes["routing"] = routing
    if generated:
        changes["token_ids"] = request.token_ids.extended(generated)
        if (sampling := _continued(request.sampling_options, len(generated))) is not None:
            changes["sampling_options"] = sampling
        changes["prefill_result"] = changes["bootstrap_info"] = None
    if generated or is_prefill:
        changes["stop_conditions"] = _stop_conditions_left(request, len(generated), is_prefill)
    return changes


def _continued(sampling: SamplingOptions, generated: int) -> SamplingOptions | None:
    """Returns the options of a leg that continues after `generated` tokens; None: unchanged."""
    guided = sampling.guided_decoding
    has_penalties = bool(penalties_in_force(sampling))
    if guided is None and not has_penalties:
        return None
    return replace(
        sampling,
        guided_decoding=None if guided is None else replace(guided, prefix_tokens=generated),
        prefix_tokens=generated if has_penalties else None,
    )


def _stop_conditions_left(
    request: PreprocessedRequest, generated: int, is_prefill: bool
) -> StopConditions:
    """Returns the stop conditions after `generated` tokens. A prefill leg has one token, which
    may be EOS exactly if decode may end so."""
    stop, max_tokens = request.stop_conditions, remaining_tokens(request, generated)
    min_tokens = None if stop.min_tokens is None else max(0, stop.min_tokens - generated)
    if is_prefill:
        max_tokens, min_tokens = 1, None if min_tokens is None else min(1, min_tokens)
    return replace(stop, max_tokens=max_tokens, min_tokens=min_tokens)


def remaining_tokens(request: PreprocessedRequest, generated: int) -> int | None:
    """Returns the output tokens left after `generated` ones; None without a limit."""
    limit = request.stop_conditions.max_tokens
    return None if limit is None else max(0, limit - generated)


def worker_hints(routing: RoutingHints | None, dp_rank: int) -> RoutingHints | None:
    """Returns the hints that a worker reads, for the rank of its leg; None if there are none.

    The other hints chose the worker, which refuses them.
    """
    routing = routing or RoutingHints()
    hints = RoutingHints(
        dp_rank=dp_rank or None,
        lora_name=routing.lora_name,
        priority=routing.priority,
        cache_salt=routing.cache_salt,
    )
    return None if hints == RoutingHints() else hints
