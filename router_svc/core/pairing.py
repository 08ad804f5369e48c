"""Pairs of a prefill and a decode worker, and when a request is served without a pair (pure).

Topology. The taints of a worker define its domains: `zone=a` is the value `a` of the domain `zone`.
KV that must stay inside a domain goes from a prefill worker to decode workers with the same taint.

Conditional disaggregation. If most of a prompt is cached where it could be decoded, prefill there
costs less than a handoff; a busy prefill worker costs more than it saves. `Bypass` has the
formulas, as NVIDIA Dynamo documents them, and one condition more (ADR 0031): prompt tokens that
wait at the worker count like those of the request. Else each of many prompts is short, and together
they block all decoding. The booking of a request that bypasses prefill counts at once, so that
concurrent requests do not all pass the same threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from common.registry.instances import Instance
from common.request.placement import Query
from common.request.preprocessed import BootstrapInfo, RoutingConstraints, RoutingHints
from router_svc.core.candidate import Candidate, Candidates

BOOTSTRAP_ROOM_MAX = 2**63 - 1

BypassPolicy = Literal["off", "isl_bounding", "prefill_load", "isl_or_load"]
# Policies that depend on the prompt length, and on the load of prefill workers.
ISL_POLICIES: tuple[BypassPolicy, ...] = ("isl_bounding", "isl_or_load")
LOAD_POLICIES: tuple[BypassPolicy, ...] = ("prefill_load", "isl_or_load")
# Why a request that could be split is not.
BYPASS_REASONS = ("short_prompt", "prefill_busy")


@dataclass(frozen=True, slots=True)
class TransferDomain:
    """Where KV travels. name: "": anywhere. weight: None: it must stay inside the domain; else the
    weight, 0..1, of the preference for workers inside, as of a taint.
    """

    name: str = ""
    weight: float | None = None

    @property
    def is_required(self) -> bool:
        """Whether a pair must be inside one value of the domain."""
        return bool(self.name) and self.weight is None

    def taints_of(self, worker: Instance) -> frozenset[str]:
        """Returns the worker's taints of this domain. Several are allowed; without one it is
        outside."""
        taint_prefix = f"{self.name}="
        return frozenset(taint for taint in worker.taints if taint.startswith(taint_prefix))

    def prefer_domain_of(self, prefill: Candidate, query: Query) -> Query:
        """Returns the query of the decode leg: it prefers the domain of the selected prefill
        worker."""
        domain_taints = self.taints_of(prefill.instance)
        if not (self.name and self.weight and domain_taints):
            return query
        routing = RoutingHints() if query.routing is None else query.routing
        base_constraints = routing.routing_constraints or RoutingConstraints()
        weights = dict(base_constraints.preferred_taints)
        for taint in domain_taints:
            weights[taint] = weights.get(taint, 0.0) + self.weight
        constraints = replace(base_constraints, preferred_taints=weights)
        return replace(query, routing=replace(routing, routing_constraints=constraints))


ANY_DOMAIN = TransferDomain()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bypass:
    """When a request that could be split is served by one worker. isl_bounding: if prefill there is
    short, in tokens (eff_isl_threshold, with those that wait there) and as a share of the prompt
    (eff_isl_ratio_threshold). prefill_load: if more tokens wait at the prefill worker of the pair
    than prefill_busy_threshold times its batch, and with the request it has at least as many to
    compute as this worker; or if no prefill worker accepts the request now, by the queue's
    threshold or a busy limit. isl_or_load: either. decode_busy_threshold: only if the worker, with
    the request, holds at most this share of its KV blocks; None: no limit.
    """

    policy: BypassPolicy = "off"
    eff_isl_threshold: int = 2048
    eff_isl_ratio_threshold: float = 0.7
    prefill_busy_threshold: float | None = None
    decode_busy_threshold: float | None = None

    def cause(
        self,
        total_tokens: int,
        cached_tokens: int,
        prefill_is_busy: bool,
        waiting_tokens: int = 0,
        prefill_tokens: int | None = None,
    ) -> str:
        """Returns one of BYPASS_REASONS, or empty. cached_tokens, waiting_tokens: on its only
        worker.
        prefill_tokens: that the prefill worker of the pair would have to compute, with the request;
        None: no prefill worker accepts it.
        """
        work = waiting_tokens + max(0, total_tokens - cached_tokens)
        is_short = self.is_short(total_tokens, cached_tokens) and work < self.eff_isl_threshold
        if self.policy in ISL_POLICIES and is_short:
            return "short_prompt"
        is_sooner = prefill_tokens is None or work <= prefill_tokens
        is_relieved = self.policy in LOAD_POLICIES and prefill_is_busy and is_sooner
        return "prefill_busy" if is_relieved else ""

    def is_short(self, total_tokens: int, cached_tokens: int) -> bool:
        """Returns whether eff_isl < eff_isl_threshold and eff_isl / total_tokens <
        eff_isl_ratio_threshold, with eff_isl = max(0, total_tokens - cached_tokens).
        """
        eff_isl = max(0, total_tokens - cached_tokens)
        ratio = eff_isl / max(1, total_tokens)
        return eff_isl < self.eff_isl_threshold and ratio < self.eff_isl_ratio_threshold

    def is_busy(self, waiting_tokens: int, batch_tokens: int | None) -> bool:
        """Returns whether waiting_tokens > prefill_busy_threshold * batch_tokens; False if one
        is unknown."""
        if self.prefill_busy_threshold is None or batch_tokens is None:
            return False
        return waiting_tokens > self.prefill_busy_threshold * batch_tokens

    def has_capacity(
        self, booked_blocks: int, request_blocks: int, total_blocks: int | None
    ) -> bool:
        """Returns whether booked + request <= decode_busy_threshold * total; False if total is
        unknown."""
        if self.decode_busy_threshold is None:
            return True
        if total_blocks is None:
            return False
        return booked_blocks + request_blocks <= self.decode_busy_threshold * total_blocks


NO_BYPASS = Bypass()


def make_bootstrap_info(prefill: Candidate, rng: Random) -> BootstrapInfo | None:
    """Returns a fresh bootstrap room on the prefill worker; None if it advertises no bootstrap
    address: prefill then completes first, and its result travels to decode with the request.
    """
    worker = prefill.instance
    if worker.bootstrap_host is None or worker.bootstrap_port is None:
        return None
    rank = prefill.placement.dp_rank - worker.dp_rank_start
    room = bootstrap_room(rng, worker.dp_size, rank)
    return BootstrapInfo(worker.bootstrap_host, worker.bootstrap_port, room)


def bootstrap_room(rng: Random, dp_size: int, dp_rank: int) -> int:
    """Returns a random room in 0..2^63-1 with room mod dp_size == dp_rank, counted from the
    worker's first
    rank: SGLang derives the rank from the room so.
    """
    assert 0 <= dp_rank < dp_size, "a rank is one of the worker's"
    quotients = (BOOTSTRAP_ROOM_MAX - dp_rank) // dp_size + 1
    return rng.randrange(BOOTSTRAP_ROOM_MAX + 1) % quotients * dp_size + dp_rank


def pairable(
    prefill: Candidates, decode: Candidates, domain: TransferDomain = ANY_DOMAIN
) -> tuple[Candidates, Candidates]:
    """Returns the candidates of each side that have a partner on the other; both may be empty. KV
    pages travel only inside a transfer group (equal page size, dtype, layout and model) and, if the
    domain is required, inside one value of it.
    """
    if not domain.is_required:
        decode_groups = {c.instance.transfer_group for c in decode}
        shared_groups = decode_groups & {c.instance.transfer_group for c in prefill}
        return (
            [c for c in prefill if c.instance.transfer_group in shared_groups],
            [c for c in decode if c.instance.transfer_group in shared_groups],
        )
    prefill_points = [(c, _transfer_points(c, domain)) for c in prefill]
    decode_points = [(c, _transfer_points(c, domain)) for c in decode]
    shared_points = {p for _, at in decode_points for p in at}
    shared_points &= {p for _, at in prefill_points for p in at}
    return (
        [c for c, at in prefill_points if not shared_points.isdisjoint(at)],
        [c for c, at in decode_points if not shared_points.isdisjoint(at)],
    )


def decode_partners(
    prefill: Candidate, decode: Candidates, domain: TransferDomain = ANY_DOMAIN
) -> list[Candidate]:
    """Returns the decode candidates that can receive the KV of the prefill worker."""
    group = prefill.instance.transfer_group
    same_group = [c for c in decode if c.instance.transfer_group == group]
    if not domain.is_required:
        return same_group
    domain_taints = domain.taints_of(prefill.instance)
    return [c for c in same_group if domain_taints & domain.taints_of(c.instance)]


def _transfer_points(candidate: Candidate, domain: TransferDomain) -> frozenset[tuple[str, str]]:
    group = candidate.instance.transfer_group
    return frozenset((group, value) for value in domain.taints_of(candidate.instance))
