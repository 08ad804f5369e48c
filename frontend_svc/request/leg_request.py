"""What one leg changes of a request, and whether a later leg can continue it (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from common.request.placement import Decision
from common.request.preprocessed import (
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from common.request.token_stream import LegChanges
from frontend_svc.models.engine_options import LOCAL_FIELDS
from frontend_svc.request.types import RequestPlan


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
    has_penalties = any(_penalties(sampling).values())
    if guided is None and not has_penalties:
        return None
    return replace(
        sampling,
        guided_decoding=None if guided is None else replace(guided, prefix_tokens=generated),
        prefix_tokens=generated if has_penalties else None,
    )


def _penalties(sampling: SamplingOptions) -> dict[str, bool]:
    """Returns by the name of each penalty whether it is in force."""
    return {
        "presence_penalty": bool(sampling.presence_penalty),
        "frequency_penalty": bool(sampling.frequency_penalty),
        "repetition_penalty": sampling.repetition_penalty not in (None, 1.0),
    }


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


def placement_blockers(plan: RequestPlan, placed: Decision, engine: str | None) -> str:
    """Returns why a started response cannot continue on the workers that a router chose, "" if it
    can: they may have joined after the router was asked.

    engine: of the worker that began it, see `engine_of`.
    """
    chosen = [one.worker_id for one in (placed.prefill, placed.worker) if one is not None]
    blockers = [_penalty_blockers(plan, worker_id) for worker_id in chosen]
    penalties = _names(dict(part for found in blockers for part in found.items()))
    return ", ".join(filter(None, (penalties, *other_engines(plan, engine, chosen).values())))


def engine_of(plan: RequestPlan, worker_id: int) -> str | None:
    """Returns the engine of a worker; "" if it does not matter, None if it cannot be determined."""
    return "" if plan.engine_name is None else plan.engine_name(worker_id)


def other_engines(plan: RequestPlan, engine: str | None, workers: Iterable[int]) -> dict[int, str]:
    """Returns those of the workers on which a response that `engine` began cannot continue, with
    the reason: two engines compute different tokens from the same ones."""
    if engine == "":
        return {}
    found = {}
    for worker_id in workers:
        other = engine_of(plan, worker_id)
        if other != "" and (other is None or other != engine):
            names = f"{other or 'unknown'}, not {engine or 'unknown'}"
            found[worker_id] = f"its engine ({names}, which began the response)"
    return found


def migration_blockers(plan: RequestPlan) -> str:
    """Returns why a started response cannot continue on another worker, "" if it can.

    It cannot if prompt and generated tokens are not the whole state:

    - several choices or beams;
    - penalties, which count output apart from the prompt, unless every worker of the model takes
      output of another one as such;
    - custom logits processors, for their state;
    - prompt_embeds, a prompt that ids cannot extend;
    - log probabilities of the prompt, which the next worker would send again.

    min_tokens is no obstacle: it is reduced by the tokens generated. Nor is guided decoding: an
    engine that cannot continue a constraint refuses its `prefix_tokens`.
    """
    if plan.body is not None:
        return "its pass-through body"
    if not plan.migratable:
        return "its settings"
    request = plan.request
    sampling, extra = request.sampling_options, request.extra_args
    blockers = {
        "n": sampling.n not in (None, 1),
        "best_of": sampling.best_of not in (None, 1),
        "use_beam_search": bool(sampling.use_beam_search),
        **_penalty_blockers(plan, None),
        "a custom logits processor": isinstance(extra, dict)
        and any("processor" in key for key in extra),
        "prompt_embeds": request.prompt_embeds is not None,
        "prompt_logprobs": request.output_options.prompt_logprobs is not None,
    }
    return _names(blockers)


def _penalty_blockers(plan: RequestPlan, worker_id: int | None) -> dict[str, bool]:
    """Returns by the name of each penalty whether it keeps a started response from a worker. None:
    from any worker of the model. Workers come and go, so an earlier result may be wrong."""
    penalties, continues = _penalties(plan.request.sampling_options), plan.continues_penalties
    if continues is not None and any(penalties.values()) and continues(worker_id):
        return {}
    return penalties


def _names(blockers: Mapping[str, bool]) -> str:
    return ", ".join(name for name, is_blocking in blockers.items() if is_blocking)
