"""On whom a request runs: filters, the pairing of legs and the selector put together (pure).

Which workers a request runs on, in this order:

1. a pair, where the model has prefill and decode workers: prefill by the cost of a prompt (its
   cache counts there), decode in the same transfer group and domain by its load alone; unless
   `Bypass` has a reason to serve it as in 2 or 3 although it could be split;
2. an aggregated worker;
3. a decode worker that can prefill by itself (`local_prefill`), where no prefill worker can serve;
4. nobody: Unavailable names the role that is missing.

A request that pins an aggregated worker, or whose session is bound to one, goes there first; one
that pins its prefill is served by a pair or not at all. What is not a pair although the model has
halves of pairs is a *fallback*: counted, and named in the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from common.errors import (
    Bug,
    InvalidRequest,
    MeshError,
    Overloaded,
    Unavailable,
    UnknownModel,
    Unsupported,
)
from common.instances import Instance
from router_svc.core.adapters import Adapters
from router_svc.core.affinity import Stay
from router_svc.core.busy import busy_workers
from router_svc.core.cost import CostKnobs
from router_svc.core.disagg import mates, partners
from router_svc.core.explain import Pick
from router_svc.core.filters import (
    RETRY_AFTER_S,
    Excluded,
    Leg,
    Tie,
    all_busy,
    eligible,
    pinned_worker,
)
from router_svc.core.fleet import Candidate, Fleet, Placement
from router_svc.core.load import LoadBook
from router_svc.core.misses import RecentMisses
from router_svc.core.query import Query, block_size_of, decode_charge, predicted_cached_tokens
from router_svc.core.rules import Rules
from router_svc.core.select import Matches, View, WorkerSelector

# Why a model with halves of pairs served a request in one piece.
FALLBACKS = ("no_prefill_worker", "no_decode_worker", "no_transfer_group", "no_transfer_domain")


@dataclass(frozen=True, slots=True)
class Ask:
    """One query on its way to a decision. stay: what its session asks, None if it names none."""

    query: Query
    knobs: CostKnobs
    matches: Matches
    now: float
    rng: Random
    stay: Stay | None = None

    def tie(self, leg: Leg) -> Tie | None:
        return None if self.stay is None else self.stay.tie(leg)


@dataclass(frozen=True, slots=True)
class Picks:
    """Who was chosen: `prefill` is None where the request is not split."""

    worker: Pick
    prefill: Pick | None = None
    fallback: str = ""
    bypass: str = ""

    @property
    def prefilling(self) -> Pick:
        """The leg that computes the prompt."""
        return self.worker if self.prefill is None else self.prefill


class Picker:
    """Picks by what fleet, book and misses say at the moment; books nothing."""

    def __init__(
        self,
        fleet: Fleet,
        book: LoadBook,
        selector: WorkerSelector,
        rules: Rules,
        misses: RecentMisses,
    ) -> None:
        self._fleet = fleet
        self._book = book
        self._selector = selector
        self._rules = rules
        self._misses = misses
        self._adapters = Adapters()
        # The last choice by model and leg, for selectors that go round.
        self._last: dict[tuple[str, Leg], Placement] = {}

    def follow(self, workers: Iterable[Instance], now: float) -> None:
        """The fleet has changed; these are its workers now."""
        self._last = {key: at for key, at in self._last.items() if key[0] in self._fleet.models}
        self._adapters.update(workers, now)

    def went(self, model: str, picks: Picks) -> None:
        """The picks became a decision, which selectors that go round go on from."""
        for pick in (picks.worker, picks.prefill):
            if pick is not None:
                self._last[model, pick.view.leg] = pick.chosen.placement

    def pick(self, ask: Ask) -> Picks:
        """Whom the order in the module's docstring gives; its first error if that is nobody."""
        query, fleet = ask.query, self._fleet
        prefill = fleet.candidates(query.model, "prefill")
        decode = fleet.candidates(query.model, "decode")
        whole = fleet.candidates(query.model, "aggregated")
        if not (prefill or decode or whole):
            raise self.nobody(query.model, ask.now)
        if self._rules.lora_residency == "required":
            self._adapters.check(query, ask.now)
        pins_prefill, stays_whole = _pinned_prefill(query), self._stays_whole(ask, whole)
        refused: MeshError | None = None
        fallback = ""
        local = [c for c in decode if c.instance.local_prefill]
        if prefill and decode and (pins_prefill or not stays_whole):
            try:
                pair = self._pick_pair(ask, prefill, decode)
                return pair if pins_prefill else self._bypassed(ask, pair, [*local, *whole]) or pair
            except (Unavailable, InvalidRequest) as error:
                refused, fallback = error, _fallback_of(error)
        elif prefill or decode:
            missing = "decode" if prefill else "prefill"
            fallback = "" if stays_whole else f"no_{missing}_worker"
        if pins_prefill:
            raise refused or self._no_pair(ask, pins_prefill, fallback)
        if whole:
            try:
                return Picks(self._pick_leg(ask, "whole", whole), fallback=fallback)
            except (Unavailable, InvalidRequest) as error:
                refused = refused or error
        if local and fallback not in ("", "no_decode_worker"):
            try:
                return Picks(self._pick_leg(ask, "whole", local), fallback=fallback)
            except (Unavailable, InvalidRequest) as error:
                refused = refused or error
        raise refused or self.nobody(query.model, ask.now, fallback.removeprefix("no_"))

    def _stays_whole(self, ask: Ask, whole: Sequence[Candidate]) -> bool:
        """Whether a pin or the session wants the request in one piece, on one of these."""
        pin = pinned_worker(ask.query.routing)
        if pin is not None:
            return any(c.placement.worker_id == pin for c in whole)
        tie = ask.tie("whole")
        if tie is None:
            return False
        mine = [c for c in whole if c.placement == tie.placement]
        return bool(mine) and (tie.is_hard or self._may_serve(ask, mine))

    def _may_serve(self, ask: Ask, candidates: Sequence[Candidate]) -> bool:
        try:
            return bool(self._eligible(ask, candidates, "whole")[0])
        except (Unavailable, InvalidRequest, Overloaded):
            return False

    def _pick_pair(
        self, ask: Ask, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Picks:
        """Prefill first; then decode in its transfer group and domain."""
        query, domain = ask.query, self._rules.domain
        may_prefill, left_prefill = self._eligible(ask, prefill, "prefill")
        may_decode, left_decode = self._eligible(ask, decode, "decode")
        can_prefill, can_decode = mates(may_prefill, may_decode, domain)
        if not can_prefill:
            raise _no_mates(query.model, domain.name if mates(may_prefill, may_decode)[0] else "")
        left_prefill += _without(may_prefill, can_prefill, "has no partner to send its cache to")
        first = self._select(ask, "prefill", can_prefill, left_prefill)
        takers = partners(first.chosen, can_decode, domain)
        bounds = "transfer group or domain" if domain.is_required else "transfer group"
        left_decode += _without(may_decode, takers, f"in another {bounds} than prefill")
        drawn = replace(ask, query=domain.drawn_to(first.chosen, query))
        return Picks(self._select(drawn, "decode", takers, left_decode), first)

    def _bypassed(self, ask: Ask, pair: Picks, alone: Sequence[Candidate]) -> Picks | None:
        """One of `alone` instead of the pair, where `Bypass` has a reason; else None."""
        query, rules = ask.query, self._rules.bypass
        if rules.policy == "off" or pair.prefill is None or not alone or not query.total_tokens:
            return None
        try:
            pick = self._pick_leg(ask, "whole", alone)
        except (Unavailable, InvalidRequest, Overloaded):
            return None
        at, prefill = pick.chosen, pair.prefill.chosen
        why = rules.why(
            query.total_tokens,
            cached_tokens(query, pick),
            prefill.instance,
            pair.prefill.view.load(prefill.placement),
        )
        held = pick.view.load(at.placement).decode_blocks
        own = decode_charge(query, block_size_of(query, at.instance.block_size))
        if not why or not rules.has_room(held, own, at.instance.total_kv_blocks):
            return None
        return Picks(pick, bypass=why)

    def _eligible(
        self, ask: Ask, candidates: Sequence[Candidate], leg: Leg
    ) -> tuple[Sequence[Candidate], list[Excluded]]:
        residency, tie, query = self._rules.lora_residency, ask.tie(leg), ask.query
        kept, excluded = eligible(query, candidates, leg, tie=tie, residency=residency)
        limits, book = self._rules.busy, self._book
        busy = busy_workers(candidates, lambda at: book.load(at, ask.now), limits, leg)
        if not busy:
            return kept, excluded
        free = [c for c in candidates if c.placement.worker_id not in busy]
        if not free:
            raise all_busy(query.model, leg)
        try:
            kept, excluded = eligible(query, free, leg, tie=tie, residency=residency)
        except (Unavailable, InvalidRequest) as error:
            raise all_busy(query.model, leg) from error
        return kept, excluded + _without(candidates, free, "busy: above a configured threshold")

    def _pick_leg(self, ask: Ask, leg: Leg, candidates: Sequence[Candidate]) -> Pick:
        kept, excluded = self._eligible(ask, candidates, leg)
        return self._select(ask, leg, kept, excluded)

    def _select(
        self, ask: Ask, leg: Leg, kept: Sequence[Candidate], excluded: Sequence[Excluded]
    ) -> Pick:
        view = View(
            self._book,
            ask.now,
            self._last.get((ask.query.model, leg)),
            ask.matches,
            leg,
            ask.knobs.for_decode_leg() if leg == "decode" else ask.knobs,
            self._misses,
        )
        choice = self._selector.select(ask.query, kept, view, ask.rng)
        chosen = choice.candidate
        if not any(chosen is one for one in kept):
            raise Bug(f"selector {self._selector.name} chose {chosen.placement}, no candidate")
        return Pick(choice, view, kept, excluded, len(kept) + len(excluded))

    def _no_pair(self, ask: Ask, pin_field: str, fallback: str) -> MeshError:
        """Why a request that pins its prefill cannot be served where there are no pairs."""
        if not fallback:
            return Unsupported(f"query.routing.{pin_field}", "requests are not split here")
        return self.nobody(ask.query.model, ask.now, fallback.removeprefix("no_"))

    def nobody(self, model: str, now: float, missing: str = "worker") -> UnknownModel | Unavailable:
        """Why there is none. missing: prefill_worker, decode_worker, or worker."""
        roles = self._fleet.roles(model)
        if not roles and self._fleet.was_seen and not self._fleet.knows(model, now):
            return UnknownModel(model)
        if not self._fleet.was_seen:
            reason, why = "FLEET_UNKNOWN", "the router has not seen the fleet yet"
        elif not roles:
            reason, why = "NO_WORKER", "its last worker left"
        else:
            reason = f"NO_{missing.upper()}"
            why = f"it has {' and '.join(sorted(roles))} workers only"
        return Unavailable(
            f"nobody can serve {model!r}: {why}",
            RETRY_AFTER_S,
            reason=reason,
            metadata={"model": model},
        )


def cached_tokens(query: Query, pick: Pick) -> int:
    """Prompt tokens that the chosen one has in its cache."""
    at = pick.chosen
    block_size = block_size_of(query, at.instance.block_size)
    return predicted_cached_tokens(query, pick.view.overlap(at.placement), block_size)


def _without(
    candidates: Sequence[Candidate], kept: Sequence[Candidate], why: str
) -> list[Excluded]:
    if len(kept) == len(candidates):
        return []
    stay = {c.placement for c in kept}
    return [Excluded(c, why) for c in candidates if c.placement not in stay]


def _pinned_prefill(query: Query) -> str:
    """The field by which the request pins its prefill; empty if by none."""
    if query.routing is not None:
        for name in ("prefill_worker_id", "prefill_dp_rank"):
            if getattr(query.routing, name) is not None:
                return name
    return ""


def _no_mates(model: str, domain: str) -> Unavailable:
    """Nobody can pair: across the borders of `domain`, or of a transfer group if that is empty."""
    what = f"place of the domain {domain!r}" if domain else "transfer group"
    return Unavailable(
        f"nobody can serve {model!r}: its prefill and decode workers share no {what}",
        RETRY_AFTER_S,
        reason="NO_TRANSFER_DOMAIN" if domain else "NO_TRANSFER_GROUP",
        metadata={"model": model},
    )


def _fallback_of(error: MeshError) -> str:
    """Which of FALLBACKS the failure to find a pair is."""
    if error.reason in ("NO_TRANSFER_GROUP", "NO_TRANSFER_DOMAIN"):
        return error.reason.lower()
    return "no_prefill_worker" if error.metadata.get("leg") == "prefill" else "no_decode_worker"
