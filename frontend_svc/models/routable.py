"""Whether a model's workers can serve a whole request, by their roles (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.registry.instances import Instance


def missing_role(workers: Sequence[Instance]) -> str:
    """Returns the missing role as text, "" if some worker or pair can serve. An aggregated
    worker serves alone, and so does a decode worker with local_prefill. Otherwise a prefill and
    a decode worker of one transfer group are needed."""
    for worker in workers:
        if worker.role == "aggregated" or (worker.role == "decode" and worker.local_prefill):
            return ""
    return _missing_in_pair(workers)


def missing_pair_role(workers: Sequence[Instance]) -> str:
    """Returns why a model with prefill or decode workers is served by aggregated requests only.
    "" if pairs can serve, if it has no such workers, or if it is not served at all."""
    if missing_role(workers) or all(worker.role == "aggregated" for worker in workers):
        return ""
    return _missing_in_pair(workers)


def has_pair(workers: Iterable[Instance]) -> bool:
    """Returns whether a prefill and a decode worker can serve a request together."""
    return not _missing_in_pair(workers)


def _missing_in_pair(workers: Iterable[Instance]) -> str:
    """Returns why no pair exists, "" if one does."""
    groups_by_role: dict[str, set[str]] = {"prefill": set(), "decode": set(), "aggregated": set()}
    for worker in workers:
        groups_by_role[worker.role].add(worker.transfer_group)
    if not groups_by_role["prefill"]:
        return "no prefill worker"
    if not groups_by_role["decode"]:
        return "no decode worker"
    if not groups_by_role["prefill"] & groups_by_role["decode"]:
        return "no prefill and decode workers of one transfer group"
    return ""
