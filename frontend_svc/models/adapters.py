"""Which adapters can be requested, and the model of each (pure).

Clients put an adapter's name into `model`, so a name has one meaning:

- The name of a model means the model, even if a worker has an adapter of that name, and also while
  the model is being loaded.
- If several models have an adapter of one name, the model whose name sorts first gets it. So all
  frontends agree, whatever the order in which workers join.

All other adapters of that name are hidden: they cannot be requested, and the reason is reported.
Pass-through models have no adapters here, since their workers receive the client's JSON.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from common.registry.instances import Instance


@dataclass(frozen=True, slots=True)
class Adapters:
    """models: adapter -> its model. hidden: (adapter, model) -> reason."""

    models: Mapping[str, str]
    hidden: Mapping[tuple[str, str], str]


def find_adapters(workers: Iterable[Instance], pass_through_models: Container[str]) -> Adapters:
    """Returns the adapters of `workers`. pass_through_models: models with pass-through workers."""
    workers = tuple(workers)
    model_names = {worker.model for worker in workers}
    adapter_model_pairs = {(lora, w.model) for w in workers if w.model for lora in w.loras if lora}
    models: dict[str, str] = {}
    hidden: dict[tuple[str, str], str] = {}
    for adapter, model in sorted(adapter_model_pairs):
        if model in pass_through_models:
            hidden[adapter, model] = "requests for the model pass through"
        elif adapter in model_names:
            hidden[adapter, model] = "a model has the same name"
        elif adapter in models:
            hidden[adapter, model] = f"model {models[adapter]!r} has an adapter of the same name"
        else:
            models[adapter] = model
    return Adapters(models, hidden)


def holders(workers: Iterable[Instance]) -> dict[str, frozenset[int]]:
    """Returns the ids of the workers that hold each adapter."""
    found: dict[str, set[int]] = {}
    for worker in workers:
        for adapter in worker.loras:
            found.setdefault(adapter, set()).add(worker.id)
    return {adapter: frozenset(ids) for adapter, ids in found.items()}


def serving(workers: tuple[Instance, ...], adapter: str) -> tuple[Instance, ...]:
    """Returns the workers of a model that serve `adapter`; "" is the model itself."""
    return tuple(worker for worker in workers if adapter in worker.loras) if adapter else workers
