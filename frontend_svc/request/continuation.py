"""Whether a started response can continue on another worker, and on which (pure).

Two things decide: the request, whose state may not be in its tokens (`migration_blockers`), and the
worker, which may lack what the response needs (`lacking_traits`). Workers come and go, so the
second is asked at each loss, and again for the workers that a router has chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import WorkerLost
from common.request.placement import Decision
from common.request.preprocessed import SamplingOptions
from frontend_svc.errors import NOT_MIGRATABLE
from frontend_svc.models.engine_options import EngineTraits
from frontend_svc.request.types import RequestPlan

_SAME_ENGINE = EngineTraits()


def traits_of(plan: RequestPlan, worker_id: int) -> EngineTraits:
    """Returns the traits of a worker of the request's model, at present."""
    return _SAME_ENGINE if plan.engine_traits is None else plan.engine_traits(worker_id)


def lacking_traits(plan: RequestPlan, begun_on: EngineTraits, worker: EngineTraits) -> str:
    """Returns what a worker lacks to continue a started response, "" if it can.

    - The engine that began it: two engines compute different tokens from the same ones. A worker
      that does not state its engine counts as any.
    - For penalties, which count output apart from the prompt: that it takes output of another
      worker as such.
    - For a constraint: that it continues there after the output of another worker.

    begun_on: of the worker that began the response.
    """
    sampling = plan.request.sampling_options
    lacking = [] if worker.counts_output else penalties_in_force(sampling)
    guided = sampling.guided_decoding
    if not (guided is None or guided.best_effort or worker.continues_constraints):
        lacking.append("guided_decoding")
    own, other = begun_on.name, worker.name
    if "" not in (own, other) and (other is None or other != own):
        names = f"{other or 'unknown'}, not {own or 'unknown'}"
        lacking.append(f"its engine ({names}, which began the response)")
    return ", ".join(lacking)


def unsuitable_workers(
    plan: RequestPlan, begun_on: EngineTraits, workers: Iterable[int]
) -> dict[int, str]:
    """Returns those of the workers that cannot continue a started response, with the reason."""
    found = {}
    for worker_id in workers:
        if lacking := lacking_traits(plan, begun_on, traits_of(plan, worker_id)):
            found[worker_id] = lacking
    return found


def placement_blockers(plan: RequestPlan, begun_on: EngineTraits, placed: Decision) -> str:
    """Returns why a started response cannot continue on the workers that a router chose, "" if it
    can: they may have joined after the router was asked."""
    chosen = [one.worker_id for one in (placed.prefill, placed.worker) if one is not None]
    return ", ".join(dict.fromkeys(unsuitable_workers(plan, begun_on, chosen).values()))


def migration_blockers(plan: RequestPlan) -> str:
    """Returns why a started response cannot continue on any other worker, "" if it can.

    It cannot if prompt and generated tokens are not the whole state:

    - several choices or beams;
    - custom logits processors, for their state;
    - prompt_embeds, a prompt that ids cannot extend;
    - log probabilities of the prompt, which the next worker would send again.

    min_tokens is no obstacle: it is reduced by the tokens generated.
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
        "a custom logits processor": isinstance(extra, dict)
        and any("processor" in key for key in extra),
        "prompt_embeds": request.prompt_embeds is not None,
        "prompt_logprobs": request.output_options.prompt_logprobs is not None,
    }
    return ", ".join(name for name, blocks in blockers.items() if blocks)


def penalties_in_force(sampling: SamplingOptions) -> list[str]:
    """Returns the names of the penalties that have an effect."""
    has_effect = {
        "presence_penalty": bool(sampling.presence_penalty),
        "frequency_penalty": bool(sampling.frequency_penalty),
        "repetition_penalty": sampling.repetition_penalty not in (None, 1.0),
    }
    return [name for name, is_set in has_effect.items() if is_set]


def not_migratable(loss: str, blockers: str) -> WorkerLost:
    """Returns the error of a started response that cannot continue. loss: how its last worker was
    lost."""
    text = "the response had started and cannot continue on another worker"
    message = f"{loss}; {text} because of {blockers}"
    return WorkerLost(message, retryable=True, reason=NOT_MIGRATABLE)
