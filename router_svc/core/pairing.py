"""Prefill and decode of one request on two workers, or not on two: who can pair, where they meet,
when a pair is not worth it (pure).

Topology. A worker is in a domain by its taints: `zone=a` puts it at `a` of the domain `zone`. KV
that is to stay inside a domain goes from a prefill worker to decode workers with the same taint.

Conditional disaggregation. A prompt that is nearly cached where it could be decoded costs less
there than a handoff does, and a busy prefill worker more than it saves. `Bypass` says when; the
formulas are NVIDIA Dynamo's, as documented. With its own booking the bypassing request weighs on
the worker at once, so that requests side by side do not all pass the same threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from common.registry.instances import Instance
from common.request.preprocessed import BootstrapInfo, RoutingConstraints, RoutingHints
from router_svc.core.query import Query
from router_svc.core.types import Candidate

BOOTSTRAP_ROOM_MAX = 2**63 - 1

BypassPolicy = Literal["off", "isl_bounding", "prefill_load", "isl_or_load"]
# Those that ask how short a prompt is, and those that ask how busy prefill is.
ISL_POLICIES: tuple[BypassPolicy, ...] = ("isl_bounding", "isl_or_load")
LOAD_POLICIES: tuple[BypassPolicy, ...] = ("prefill_load", "isl_or_load")
# Why a request that could be split was not.
BYPASS_REASONS = ("short_prompt", "prefill_busy")


@dataclass(frozen=True, slots=True)
class TransferDomain:
    """Inside which domain KV travels. name: "" = anywhere. weight: None = it must stay inside;
    else how much workers inside are preferred, 0..1, as the weight of a preferred taint.
    """

    name: str = ""
    weight: float | None = None

    @property
    def is_required(self) -> bool:
        """Whether a pair across the domain's borders is none."""
        return bool(self.name) and self.weight is None

    def taints_of(self, worker: Instance) -> frozenset[str]:
        """The worker's taints of this domain; several are allowed, none puts it outside."""
        taint_prefix = f"{self.name}="
        return frozenset(taint for taint in worker.taints if taint.startswith(taint_prefix))

    def prefer_domain_of(self, prefill: Candidate, query: Query) -> Query:
        """The query of the decode leg, once prefill is chosen: it prefers the same domain."""
        if not (self.name and self.weight) or not (
            domain_taints := self.taints_of(prefill.instance)
        ):
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
    """When a request that could be split is served in one piece.

    isl_bounding: where prefill there is short, in tokens (eff_isl_threshold) and as a share of the
    prompt (eff_isl_ratio_threshold). prefill_load: where the prefill worker of the pair is busy,
    with more waiting than prefill_busy_threshold times what it computes in a step, or where none
    takes the request now, by the queue's threshold or a limit. isl_or_load: where either is so.
    decode_busy_threshold: only if with the request the worker holds no more than this share of its
    KV blocks; None: whatever it holds.
    """

    policy: BypassPolicy = "off"
    eff_isl_threshold: int = 2048
    eff_isl_ratio_threshold: float = 0.7
    prefill_busy_threshold: float | None = None
    decode_busy_threshold: float | None = None

    def cause(self, total_tokens: int, cached_tokens: int, prefill_is_busy: bool) -> str:
        """One of BYPASSES, or empty. cached_tokens: where it would run in one piece.
        prefill_is_busy: see `is_busy`; also so where no prefill worker takes the request now.
        """
        if self.policy in ISL_POLICIES and self.is_short(total_tokens, cached_tokens):
            return "short_prompt"
        return "prefill_busy" if self.policy in LOAD_POLICIES and prefill_is_busy else ""

    def is_short(self, total_tokens: int, cached_tokens: int) -> bool:
        """eff_isl < eff_isl_threshold and eff_isl / total_tokens < eff_isl_ratio_threshold, where
        eff_isl = max(0, total_tokens - cached_tokens).
        """
        eff_isl = max(0, total_tokens - cached_tokens)
        ratio = eff_isl / max(1, total_tokens)
        return eff_isl < self.eff_isl_threshold and ratio < self.eff_isl_ratio_threshold

    def is_busy(self, waiting_tokens: int, batch_tokens: int | None) -> bool:
        """waiting_tokens > prefill_busy_threshold * batch_tokens; what is not known is calm."""
        if self.prefill_busy_threshold is None or batch_tokens is None:
            return False
        return waiting_tokens > self.prefill_busy_threshold * batch_tokens

    def has_capacity(
        self, booked_blocks: int, request_blocks: int, total_blocks: int | None
    ) -> bool:
        """held + own <= decode_busy_threshold * total; what is not known has none."""
        if self.decode_busy_threshold is None:
            return True
        if total_blocks is None:
            return False
        return booked_blocks + request_blocks <= self.decode_busy_threshold * total_blocks


NO_BYPASS = Bypass()


def make_bootstrap_info(prefill: Candidate, rng: Random) -> BootstrapInfo | None:
    """A fresh meeting place on the prefill worker; None if it advertises none.

    Without one prefill completes first, and what it left travels to decode with the request.
    """
    worker = prefill.instance
    if worker.bootstrap_host is None or worker.bootstrap_port is None:
        return None
    rank = prefill.placement.dp_rank - worker.dp_rank_start
    room = bootstrap_room(rng, worker.dp_size, rank)
    return BootstrapInfo(worker.bootstrap_host, worker.bootstrap_port, room)


def bootstrap_room(rng: Random, dp_size: int, dp_rank: int) -> int:
    """A random room in 0..2^63-1 with room mod dp_size == dp_rank: engines read the rank from it.

    dp_rank: counted from the worker's first rank. Formula: SGLang takes the rank from the room.
    """
    assert 0 <= dp_rank < dp_size, "a rank is one of the worker's"
    quotient = rng.randrange(BOOTSTRAP_ROOM_MAX + 1) % (
        (BOOTSTRAP_ROOM_MAX - dp_rank) // dp_size + 1
    )
    return quotient * dp_size + dp_rank


def pairable(
    prefill: Sequence[Candidate], decode: Sequence[Candidate], domain: TransferDomain = ANY_DOMAIN
) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
    """Those of each side with somebody on the other to move KV to or from; both may be empty.

    KV pages can travel inside a transfer group only (equal page size, dtype, layout and model),
    and inside one value of the domain, if that is required.
    """
    if not domain.is_required:
        shared_groups = {c.instance.transfer_group for c in prefill} & {
            c.instance.transfer_group for c in decode
        }
        return (
            [c for c in prefill if c.instance.transfer_group in shared_groups],
            [c for c in decode if c.instance.transfer_group in shared_groups],
        )
    prefill_points, decode_points = (
        [(c, _transfer_points(c, domain)) for c in prefill],
        [(c, _transfer_points(c, domain)) for c in decode],
    )
    shared_points = {p for _, at in prefill_points for p in at} & {
        p for _, at in decode_points for p in at
    }
    return (
        [c for c, at in prefill_points if not shared_points.isdisjoint(at)],
        [c for c, at in decode_points if not shared_points.isdisjoint(at)],
    )


def decode_partners(
    prefill: Candidate, decode: Sequence[Candidate], domain: TransferDomain = ANY_DOMAIN
) -> list[Candidate]:
    """Those that can take over what the prefill worker has computed."""
    group = prefill.instance.transfer_group
    same_group = [c for c in decode if c.instance.transfer_group == group]
    if not domain.is_required:
        return same_group
    domain_taints = domain.taints_of(prefill.instance)
    return [c for c in same_group if domain_taints & domain.taints_of(c.instance)]


def _transfer_points(candidate: Candidate, domain: TransferDomain) -> frozenset[tuple[str, str]]:
    group = candidate.instance.transfer_group
    return frozenset((group, value) for value in domain.taints_of(candidate.instance))
