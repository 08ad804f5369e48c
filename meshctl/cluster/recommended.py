"""Which groups follow the number of workers that the routers recommend (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshctl.mesh_file.schema import WorkerGroup


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What the routers recommend for a model and role."""

    model: str
    role: str
    workers: int


def follow(
    groups: Sequence[WorkerGroup],
    recommendations: Iterable[Recommendation],
    present: Mapping[str, int],
) -> dict[str, int]:
    """Returns the new numbers of the groups that follow the routers and whose number changes.

    - recommendations: of each router; the greatest counts. A pool without one keeps its number.
    - present: the desired numbers by group.
    """
    greatest: dict[tuple[str, str], int] = {}
    for one in recommendations:
        key = one.model, one.role
        greatest[key] = max(one.workers, greatest.get(key, 0))
    found = {}
    for group in groups:
        workers = greatest.get((group.model, group.role))
        if group.scaling == "recommended" and workers is not None:
            name = group.member_name
            if workers != present[name]:
                found[name] = workers
    return found
