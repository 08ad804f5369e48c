"""Which aliases of models can be requested (pure).

A name has one meaning: the name of a model wins over an adapter, an adapter over an alias, and of
two models with one alias the model whose name sorts first gets it, so that all frontends agree.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from common.registry.card import ModelCard


def find_aliases(cards: Iterable[ModelCard], taken: Container[str]) -> Mapping[str, str]:
    """Alias -> name of its model. taken: names of models and adapters."""
    pairs = {(alias, card.name) for card in cards for alias in card.aliases}
    # In reverse order, so that the name that sorts first is written last.
    return {alias: name for alias, name in sorted(pairs, reverse=True) if alias not in taken}
