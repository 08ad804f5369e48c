"""Whether a model's workers can serve a whole request, by their roles (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.registry.instances import Instance


def missing_role(workers: Sequence[Instance]) -> str:
    """ "" when some worker, or some pair, can serve; else what is missing, for people.

    An aggregated worker serves alone, and so does a decode worker with local_prefill; else it takes
    a prefill and a decode worker of one transfer group.
    """
    return "" if any(map(_serves_alone, workers)) else _missing_half(workers)


def unsplit(workers: Sequence[Instance]) -> str:
    """Why the model is served, but by whole requests only although it has halves of pairs; "" when
    it has none, or pairs serve.
    """
    if missing_role(workers) or all(worker.role == "aggregated" for worker in workers):
        return ""
    return _missing_half(workers)


def _serves_alone(worker: Instance) -> bool:
    return worker.role == "aggregated" or (worker.role == "decode" and worker.local_prefill)


def _missing_half(workers: Iterable[Instance]) -> str:
    """What keeps all pairs from being; "" when there is one."""
    groups: dict[str, set[str]] = {"prefill": set(), "decode": set(), "aggregated": set()}
    for worker in workers:
        groups[worker.role].add(worker.transfer_group)
    if not groups["prefill"]:
        return "no prefill worker"
    if not groups["decode"]:
        return "no decode worker"
    if not groups["prefill"] & groups["decode"]:
        return "no prefill and decode workers of one transfer group"
    return ""
