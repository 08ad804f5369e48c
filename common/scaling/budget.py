"""A budget of workers for all pools together (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from common.scaling.pool import Advice, Reason

K = TypeVar("K")


def within_budget(advice: Mapping[K, Advice], budget: int | None) -> dict[K, Advice]:
    """Returns the advice with at most `budget` workers in all; None: unchanged.

    Each worker goes to the pool that has the smallest share of what it needs, the first one in
    order if several have: every pool that is awake gets one worker before another gets two.
    """
    if budget is None or sum(one.replicas for one in advice.values()) <= budget:
        return dict(advice)
    granted = dict.fromkeys(advice, 0)
    for _ in range(budget):
        neediest = min(
            (key for key, one in advice.items() if granted[key] < one.replicas),
            key=lambda key: granted[key] / advice[key].replicas,
        )
        granted[neediest] += 1
    return {
        key: one
        if granted[key] == one.replicas
        else replace(one, replicas=granted[key], reason=Reason.BUDGET)
        for key, one in advice.items()
    }
