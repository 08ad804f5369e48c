"""Whether a model's workers can serve a whole request, by their roles (pure)."""

from __future__ import annotations

from collections.abc import Iterable

from common.instances import Instance


def missing_role(workers: Iterable[Instance]) -> str:
    """ "" when some worker, or some pair, can serve; else what is missing, for people.

    An aggregated worker serves alone, and so does a decode worker with local_prefill; else it takes
    a prefill and a decode worker of one transfer group.
    """
    groups: dict[str, set[str]] = {"prefill": set(), "decode": set()}
    for worker in workers:
        if worker.role == "aggregated" or (worker.role == "decode" and worker.local_prefill):
            return ""
        groups[worker.role].add(worker.transfer_group)
    if not groups["prefill"]:
        return "no prefill worker"
    if not groups["decode"]:
        return "no decode worker"
    if not groups["prefill"] & groups["decode"]:
        return "no prefill and decode workers of one transfer group"
    return ""
