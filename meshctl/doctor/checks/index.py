"""Checks of the index: indexers, the replicas of routers, and block hashes (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from common.registry.instances import HASH_KEY_META_KEY, Instance
from meshctl.doctor.facts import Facts, MemberFacts
from meshctl.doctor.findings import Finding, Subject, member_subject
from meshctl.doctor.rules import finding

EXACT, DEGRADED = "exact", "degraded"
# States of a rank whose copy does not count, or not any more.
_INEXACT = ("gapped", "stale")
# Share of its budget above which an indexer is full.
BUDGET_SHARE_MAX = 0.95


def check_replicas(facts: Facts) -> Iterator[Finding]:
    """Compares the index that routers have with the workers that publish events."""
    publishers = _publishers(facts)
    if not publishers:
        return
    if facts.of("indexer"):
        for router in facts.of("router"):
            yield from _replica_problems(router, publishers)
        return
    lost = {
        state.reason
        for router in facts.of("router")
        for state in router.ranks or ()
        if state.worker_id in publishers and _was_followed(state.state, state.reason)
    }
    mesh = Subject("mesh", facts.namespace)
    if lost:
        text = f"{len(publishers)} workers publish KV events; routers report: {min(lost)}"
        yield finding("indexer_lost", mesh, text)
    else:
        text = f"{len(publishers)} workers publish KV events to no indexer"
        yield finding("indexer_missing", mesh, text)


def _was_followed(state: str, reason: str) -> bool:
    """Returns whether a router had an index of a rank once."""
    # A router that never reached an indexer has another reason; one that uses no index too.
    return state in _INEXACT or (state == "none" and reason == "not in the index")


def _replica_problems(router: MemberFacts, publishers: Mapping[int, Instance]) -> Iterator[Finding]:
    for state in router.ranks or ():
        worker = publishers.get(state.worker_id)
        if worker is None or state.state in (EXACT, DEGRADED, "approx"):
            continue
        if state.state == "none" and state.reason.startswith("no index: "):
            continue  # By its settings.
        text = (
            f"its index of worker {_name(worker)} is {state.state}:"
            f" {state.reason or 'no reason given'}"
        )
        yield finding("index_not_followed", member_subject(router.instance), text)


def check_indexers(facts: Facts) -> Iterator[Finding]:
    publishers = _publishers(facts)
    for member in facts.of("indexer"):
        if member.indexer is None:
            continue
        subject = member_subject(member.instance)
        indexed = {state.worker_id for state in member.indexer.ranks}
        for worker_id in publishers.keys() - indexed:
            name = _name(publishers[worker_id])
            yield finding("index_source_missing", subject, f"worker {name}", name=name)
        for state in member.indexer.ranks:
            if state.worker_id not in publishers or state.state == EXACT:
                continue
            name = _name(publishers[state.worker_id])
            rule = "index_degraded" if state.state == DEGRADED else "index_source_inexact"
            text = f"rank {state.rank} of worker {name} is {state.state}: {state.reason}"
            yield finding(rule, subject, text, name=name)
        used, budget = member.indexer.used_bytes, member.indexer.budget_bytes
        if budget and used > BUDGET_SHARE_MAX * budget:
            text = f"it uses {used >> 20}/{budget >> 20} MB"
            yield finding("index_full", subject, text)


def check_verified(facts: Facts) -> Iterator[Finding]:
    workers = {member.instance.id: member.instance for member in facts.of("worker")}
    for member in facts.of("indexer"):
        for row in member.indexer.verified if member.indexer else ():
            worker = workers.get(row.worker_id)
            name = _name(worker) if worker else str(row.worker_id)
            subject = member_subject(member.instance)
            rank = f"rank {row.rank} of worker {name}"
            if row.error:
                yield finding("index_unverified", subject, f"{rank}: {row.error}")
            elif row.extra or row.missing:
                text = f"{rank}: {row.extra} blocks only in the index, {row.missing} only there"
                yield finding("index_drift", subject, text, name=name)


def check_hashes(facts: Facts) -> Iterator[Finding]:
    """Compares what the block hashes of members depend on: the mesh key, and of one model the block
    size and the version of the hashes."""
    keys: dict[object, set[str]] = {}
    for member in facts.members:
        if (key := member.instance.meta.get(HASH_KEY_META_KEY)) is not None:
            keys.setdefault(key, set()).add(_name(member.instance))
    if len(keys) > 1:
        text = f"their mesh keys differ: {_groups(keys)}"
        yield finding("hashes_differ", Subject("mesh", facts.namespace), text)
    workers = {member.instance.id: member.instance for member in facts.of("worker")}
    partitions: dict[str, dict[object, set[str]]] = {}
    for indexer in facts.of("indexer"):
        for state in indexer.indexer.ranks if indexer.indexer else ():
            worker = workers.get(state.worker_id)
            # Scheme 0: the worker publishes no hashes.
            if worker is not None and state.partition is not None and state.partition[1]:
                of_model = partitions.setdefault(worker.model, {})
                of_model.setdefault(state.partition, set()).add(_name(worker))
    for model, found in partitions.items():
        if len(found) > 1:
            text = f"block size, hash scheme and version of the adapter differ: {_groups(found)}"
            yield finding("hashes_differ", Subject("model", model), text)


def _groups(members: Mapping[object, set[str]]) -> str:
    """Returns the names of members by what they have, the smallest group first: it is likely the
    wrong one."""
    groups = sorted(members.items(), key=lambda item: (len(item[1]), str(item[0])))
    return "; ".join(f"{value} of {', '.join(sorted(names))}" for value, names in groups)


def _name(instance: Instance) -> str:
    return instance.stable_name or instance.address


def _publishers(facts: Facts) -> dict[int, Instance]:
    """Returns the workers that publish KV events, by id."""
    return {
        member.instance.id: member.instance
        for member in facts.of("worker")
        if member.instance.kv_index == "events"
    }
