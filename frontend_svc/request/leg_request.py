"""Builds the requests that legs send to workers (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from common.request.preprocessed import PreprocessedRequest, RoutingHints
from frontend_svc.models.engine_options import LOCAL_FIELDS
from frontend_svc.request.types import RequestPlan


def continued_request(
    request: PreprocessedRequest, generated: Sequence[int]
) -> PreprocessedRequest:
    """The request with the generated tokens in its prompt, and smaller limits."""
    if not generated:
        return request
    sampling = request.sampling_options
    if (guided := sampling.guided_decoding) is not None:
        guided = replace(guided, prefix_tokens=len(generated))
        sampling = replace(sampling, guided_decoding=guided)
    stop = request.stop_conditions
    reduced = replace(
        stop,
        max_tokens=remaining_tokens(request, len(generated)),
        min_tokens=None if stop.min_tokens is None else max(0, stop.min_tokens - len(generated)),
    )
    return replace(
        request,
        token_ids=request.token_ids.extended(generated),
        stop_conditions=reduced,
        sampling_options=sampling,
        prefill_result=None,
        bootstrap_info=None,
    )


def remaining_tokens(request: PreprocessedRequest, generated: int) -> int | None:
    """Output tokens left after `generated` ones; None without a limit."""
    limit = request.stop_conditions.max_tokens
    return None if limit is None else max(0, limit - generated)


def prefill_request(request: PreprocessedRequest) -> PreprocessedRequest:
    """The request for a prefill leg: one token, which may be EOS exactly if decode may end so."""
    stop = request.stop_conditions
    min_tokens = None if stop.min_tokens is None else min(1, stop.min_tokens)
    return replace(request, stop_conditions=replace(stop, max_tokens=1, min_tokens=min_tokens))


def worker_request(request: PreprocessedRequest, dp_rank: int) -> PreprocessedRequest:
    """The request without the fields for frontends and routers, for the rank of its leg."""
    # Any: the types of the fields.
    unset: dict[str, Any] = {
        name: None for name in LOCAL_FIELDS if getattr(request, name) is not None
    }
    routing = None
    if request.routing is not None or dp_rank:
        routing = worker_hints(request.routing, dp_rank)
    if routing == request.routing and not unset:  # a copy is slow
        return request
    return replace(request, routing=routing, **unset)


def worker_hints(routing: RoutingHints | None, dp_rank: int) -> RoutingHints | None:
    """The hints that a worker reads, for the rank of its leg; None if there are none.

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


def migration_blockers(plan: RequestPlan) -> str:
    """Why a started response cannot continue on another worker, "" if it can. It cannot if prompt
    and generated tokens are not the whole state: several choices or beams, penalties (they count
    output apart from the prompt; no engine takes an output prefix for them yet), custom logits
    processors (their state), and prompt_embeds (a prompt that ids cannot extend). min_tokens is no
    obstacle: it is reduced by the tokens generated. Nor is guided decoding: an engine that cannot
    continue a constraint refuses its `prefix_tokens`."""
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
        "presence_penalty": bool(sampling.presence_penalty),
        "frequency_penalty": bool(sampling.frequency_penalty),
        "repetition_penalty": sampling.repetition_penalty not in (None, 1.0),
        "a custom logits processor": isinstance(extra, dict)
        and any("processor" in key for key in extra),
        "prompt_embeds": request.prompt_embeds is not None,
    }
    return ", ".join(name for name, is_blocking in blockers.items() if is_blocking)
