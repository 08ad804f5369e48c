"""Which adapters can be asked for, and of which model each is (pure).

Clients name an adapter where they would name a model, so a name has one meaning:

- A model's own name is the model's, whoever has an adapter of that name, also while the model is
  being loaded.
- Of several models that have an adapter of one name, it is that of the model whose name sorts
  first. So all frontends agree without asking each other, and neither restarts nor the order in
  which workers come change it.

Whoever loses is hidden: it cannot be asked for, and that is said. Models whose bodies are passed
through have no adapters here, for what their workers are sent is the client's.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from common.registry.instances import Instance


@dataclass(frozen=True, slots=True)
class Adapters:
    """models: adapter -> the model it is applied to. hidden: (adapter, model) -> why."""

    models: Mapping[str, str]
    hidden: Mapping[tuple[str, str], str]


def find_adapters(workers: Iterable[Instance], pass_through_models: Container[str]) -> Adapters:
    """The adapters that workers have. passed_through: models whose bodies are."""
    workers = tuple(workers)
    model_names = {worker.model for worker in workers}
    adapter_model_pairs = {(lora, w.model) for w in workers if w.model for lora in w.loras if lora}
    models: dict[str, str] = {}
    hidden: dict[tuple[str, str], str] = {}
    for adapter, model in sorted(adapter_model_pairs):
        if model in pass_through_models:
            hidden[adapter, model] = "requests for that model are passed through"
        elif adapter in model_names:
            hidden[adapter, model] = "a model has that name"
        elif adapter in models:
            hidden[adapter, model] = f"the model {models[adapter]!r} has one of that name"
        else:
            models[adapter] = model
    return Adapters(models, hidden)


def serving(workers: Iterable[Instance], adapter: str) -> tuple[Instance, ...]:
    """Those of a model's workers that serve requests for the adapter; "" is the model itself."""
    return tuple(worker for worker in workers if not adapter or adapter in worker.loras)
