"""Which workers hold a desired adapter (pure).

All workers of a model and role compute the same from the registry, so that they agree without
messages: rendezvous hashing of the adapter with each worker orders the workers, and the first
`copies` hold it. The loss of a worker therefore moves only what it held, to the next in order.

A worker counts while it is registered, does not leave, and has not failed to load the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from common.registry.adapters import AdapterState, DesiredAdapter
from common.registry.instances import Instance


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can hold adapters. key: the same across restarts, if it has a stable name."""

    id: int
    key: str
    loras: frozenset[str]
    state: AdapterState


def candidates(workers: Iterable[Instance], role: str) -> tuple[Candidate, ...]:
    """Returns the workers of a role that place adapters and do not leave."""
    found = []
    for worker in workers:
        state = AdapterState.of(worker)
        if worker.role == role and state is not None and not state.is_leaving:
            key = worker.stable_name or str(worker.id)
            found.append(Candidate(worker.id, key, worker.loras, state))
    return tuple(found)


def holders(adapter: DesiredAdapter, workers: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Returns the workers of one role that shall hold an adapter, first ones first: `copies` of
    them, and one more up to `copies_max` as long as all of those have many requests for it."""
    able = [worker for worker in workers if adapter.name not in worker.state.failed]
    ranked = sorted(able, key=lambda worker: (_score(adapter.name, worker.key), worker.id))
    if adapter.copies is None:
        return tuple(ranked)
    count, limit = adapter.copies, max(adapter.copies, adapter.copies_max or 0)
    while count < limit and all(adapter.name in one.state.busy for one in ranked[:count]):
        count += 1
    return tuple(ranked[:count])


def _score(name: str, key: str) -> bytes:
    return sha256(f"{name}\0{key}".encode()).digest()


@dataclass(frozen=True, slots=True)
class Plan:
    """What one worker has to do."""

    load: tuple[DesiredAdapter, ...] = ()
    unload: tuple[str, ...] = ()


def plan(
    adapters: Iterable[DesiredAdapter],
    workers: Sequence[Candidate],
    own: Candidate,
    placed: Mapping[str, str],
) -> Plan:
    """Returns what a worker has to load and to unload.

    - adapters: those desired of its model.
    - workers: the candidates of its role, itself included.
    - own: itself, with what it holds.
    - placed: the adapters that it loaded by a plan, with their locations. Others, which an operator
      or its configuration loaded, stay.

    It loads again what it has failed to load. It unloads what is not desired any more, and what
    others shall hold once all of them do. An adapter whose location changed is unloaded first.
    """
    desired = {adapter.name: adapter for adapter in adapters}
    load: list[DesiredAdapter] = []
    unload = [name for name in sorted(placed) if name not in desired]
    retrying = Candidate(own.id, own.key, own.loras, AdapterState(busy=own.state.busy))
    members = [retrying if worker.id == own.id else worker for worker in workers]
    for name, adapter in desired.items():
        chosen = holders(adapter, members)
        is_own = any(worker.id == own.id for worker in chosen)
        if name not in own.loras:
            if is_own:
                load.append(adapter)
        elif name in placed and (
            placed[name] != adapter.uri
            or (not is_own and chosen and all(name in worker.loras for worker in chosen))
        ):
            unload.append(name)
    return Plan(tuple(load), tuple(unload))


def not_taken_over(
    adapters: Iterable[DesiredAdapter], others: Sequence[Candidate], held: Iterable[str]
) -> list[str]:
    """Returns what a worker that leaves holds and others do not hold yet that shall."""
    names = set(held)
    return [
        adapter.name
        for adapter in adapters
        if adapter.name in names
        and any(adapter.name not in worker.loras for worker in holders(adapter, others))
    ]
