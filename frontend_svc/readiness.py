"""Whether a frontend can serve requests, with the reasons if it cannot."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

from common.registry.adapters import AdapterState
from common.registry.instances import PREFILL_BYPASS_META_KEY, Instance, Snapshot
from common.service.routable.peers import Routable
from frontend_svc.canaries.monitor import CanaryMonitor, CanaryResult
from frontend_svc.models.catalog import NOT_REGISTERED, ModelCatalog
from frontend_svc.models.routable import missing_pair_role, missing_role
from frontend_svc.routers.client import RouterClient
from frontend_svc.workers.client import EngineClient
from frontend_svc.workers.hit_monitor import HitMonitor


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the frontend can serve requests now."""

    is_ready: bool

    reasons: tuple[str, ...]
    """Why it is not ready."""

    degraded: tuple[str, ...]
    """What is served, but impaired."""

    models_not_ready: Mapping[str, str]
    """Reason by model."""

    instances: tuple[Mapping[str, object], ...]

    canaries: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Of this process: by model, the newest result."""


def assess_readiness(
    snapshot: Snapshot,
    models: ModelCatalog,
    router: RouterClient,
    engines: EngineClient,
    hit_monitor: HitMonitor,
    canaries: CanaryMonitor,
    routable: Routable,
    *,
    is_draining: bool,
) -> Readiness:
    """Returns the readiness: ready if the frontend does not drain, is routable and one model has
    all the workers that it needs. A canary that fails is degraded service (ADR 0049): all
    frontends may observe it, and a load balancer would remove all of them."""
    reasons = ["draining"] if is_draining else []
    if not models.names():
        reasons.append(f"no model is served: {NOT_REGISTERED}")
    missing = {
        name: reason for name in models.names() if (reason := missing_role(models.workers(name)))
    }
    absent = models.absent
    reasons += [f"model {name}: {reason}" for name, reason in {**absent, **missing}.items()]
    reasons += map(str, routable.missing)
    if not (routable.is_routable or routable.is_leaving or routable.missing):
        reasons.append("not registered yet")
    is_serving = bool(models.names() - missing.keys())
    degraded = _degraded_reasons(models, router, engines, hit_monitor)
    return Readiness(
        is_ready=is_serving and routable.is_routable and not is_draining,
        reasons=tuple(reasons),
        degraded=(
            *degraded,
            *_canary_reasons(canaries, missing),
            *(f"not waited for: {peer}" for peer in routable.given_up),
            *_adapter_failures(snapshot),
        ),
        models_not_ready={
            **absent,
            **dict.fromkeys(models.loading, "the card is loading"),
            **models.not_ready,
            **missing,
        },
        instances=tuple(map(_instance_summary, snapshot.instances.values())),
        canaries={name: _canary_summary(canaries, r) for name, r in canaries.results.items()},
    )


def _degraded_reasons(
    models: ModelCatalog, router: RouterClient, engines: EngineClient, hit_monitor: HitMonitor
) -> Iterator[str]:
    if not router.is_connected:
        yield "no router answers: requests wait, then the frontend balances by its own load"
    for name in models.names():
        if reason := missing_pair_role(models.workers(name)):
            yield f"model {name}: requests are not split: {reason}"
    for worker_id, reason in engines.exclusion_reasons().items():
        yield f"worker {worker_id} is excluded: {reason}"
    yield from hit_monitor.degraded()
    for (name, model), reason in models.hidden.items():
        yield f"adapter {name!r} of {model} is not available: {reason}"


def _adapter_failures(snapshot: Snapshot) -> Iterator[str]:
    """Yields what workers shall load and cannot."""
    for worker in snapshot.of("worker"):
        state = AdapterState.of(worker)
        for name, reason in () if state is None else state.failed.items():
            place = worker.stable_name or worker.id
            yield f"adapter {name!r} of {worker.model}: {place} cannot load it: {reason}"


def _canary_reasons(canaries: CanaryMonitor, missing: Container[str]) -> Iterator[str]:
    """Yields the failures of canaries, except for models without the workers that they need."""
    for name, result in canaries.results.items():
        if result.failure is not None and name not in missing:
            stage, reason = result.failure.stage, result.failure.reason
            yield f"model {name}: its canary fails at stage {stage}: {reason}"


def _canary_summary(canaries: CanaryMonitor, result: CanaryResult) -> dict[str, object]:
    failure, age_s = result.failure, canaries.age_s(result)
    return {
        "status": "ok" if failure is None else "failing",
        "stage": "" if failure is None else failure.stage,
        "reason": "" if failure is None else failure.reason,
        "age_s": None if age_s is None else round(age_s, 1),
    }


def _instance_summary(instance: Instance) -> dict[str, object]:
    summary: dict[str, object] = {
        "id": str(instance.id),  # Many JSON readers round integers of this size.
        "service": instance.service,
        "name": instance.stable_name,
        "address": instance.address,
    }
    if instance.model:
        summary |= {"model": instance.model, "role": instance.role}
    if policy := instance.meta.get(PREFILL_BYPASS_META_KEY):
        summary[PREFILL_BYPASS_META_KEY] = policy
    return summary
