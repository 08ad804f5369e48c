"""On whom a request runs: filters, the pairing of legs and the selector put together (pure).

Which workers a request runs on, in this order:

1. a pair, where the model has prefill and decode workers: prefill by the cost of a prompt (its
   cache counts there), decode in the same transfer group and domain by its load alone; unless
   `Bypass` has a reason to serve it as in 2 or 3 although it could be split;
2. an aggregated worker;
3. a decode worker that can prefill by itself (`local_prefill`), where no prefill worker can serve;
4. nobody: Unavailable names the role that is missing, Overloaded says that whoever could serve it
   is busy.

A way whose workers are all above a busy threshold is closed. One where all who may compute the
prompt are prefill-busy is *full*: the next that is not comes before it, and where all that are open
are full, the first of them is picked, and `Picks.waits_for` says who has to get room. Wishes (a
soft session, a preferred adapter) make no way full: they are put aside for whoever has room.

A request that pins an aggregated worker, or whose session is bound to one, goes there first; one
that pins its prefill is served by a pair or not at all. What is not a pair although the model has
halves of pairs is a *fallback*: counted, and named in the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
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
from common.registry.instances import Instance
from router_svc.core.adapters import Adapters
from router_svc.core.admission import Lane, lane_of
from router_svc.core.busy import busy_workers, prefill_busy
from router_svc.core.cost import CostKnobs
from router_svc.core.eligibility import (
    RETRY_AFTER_S,
    Excluded,
    Leg,
    Tie,
    all_busy,
    eligible,
    pinned_worker,
)
from router_svc.core.explain import Pick
from router_svc.core.fleet import Candidate, Fleet, Placement
from router_svc.core.load_tracker import LoadBook
from router_svc.core.pairing import TransferDomain, mates, partners
from router_svc.core.policy import Rules
from router_svc.core.query import Query, block_size_of, decode_charge, predicted_cached_tokens
from router_svc.core.recent_prefill import RecentMisses
from router_svc.core.selectors import Matches, View, WorkerSelector
from router_svc.core.sessions import Stay

# Why a model with halves of pairs served a request in one piece.
FALLBACKS = (
    "no_prefill_worker",
    "no_decode_worker",
    "no_transfer_group",
    "no_transfer_domain",
    "prefill_busy",
    "decode_busy",
)
# The reason of the error where the selector itself fails.
SELECTOR_FAILED = "SELECTOR_FAILED"
_BUSY = "busy: above a configured threshold"
_GATED = "its KV blocks leave no room by the gate of the bypass"

# Of one leg: those who can serve it, and the others with the reason.
_Side = tuple[Sequence[Candidate], list[Excluded]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One query on its way to a decision. stay: what its session asks, None if it names none.

    has_room: of those who compute prompts; if given, who has is wished for, and nothing else is.
    """

    query: Query
    knobs: CostKnobs
    matches: Matches
    now: float
    rng: Random
    stay: Stay | None = None
    has_room: Callable[[Candidate], bool] | None = None

    def tie(self, leg: Leg) -> Tie | None:
        """Where its session is bound for the leg; a soft one only if that is wished for."""
        tie = None if self.stay is None else self.stay.tie(leg)
        return tie if tie is None or tie.is_hard or self.wishes(leg) else None

    def wishes(self, leg: Leg) -> bool:
        """Whether its own wishes count for the leg."""
        return self.has_room is None or leg == "decode"

    @property
    def lane(self) -> Lane:
        """Where it waits, if it must."""
        return lane_of(self.query, () if self.stay is None else self.stay.must)


@dataclass(frozen=True, slots=True)
class Picks:
    """Who was chosen: `prefill` is None where the request is not split.

    waits_for: all who may compute the prompt, if each of them is prefill-busy; else nobody.
    """

    worker: Pick
    prefill: Pick | None = None
    fallback: str = ""
    bypass: str = ""
    waits_for: Sequence[Candidate] = ()

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
        """The first way, in the order of the module's docstring, that is open and not full.

        If none is open, raises why: that all are busy, where they are, else the first reason.
        """
        refused: MeshError | None = None
        full: list[Picks] = []
        for way in self._ways(ask):
            if isinstance(way, MeshError):
                is_graver = isinstance(way, Overloaded) and not isinstance(refused, Overloaded)
                refused = way if refused is None or is_graver else refused
            elif self.are_full(way.prefilling.kept, ask.now):
                full.append(way)
            else:
                return way
        if full:
            return replace(full[0], waits_for=_together(way.prefilling.kept for way in full))
        assert refused is not None, "a way is open or there is a reason why not"
        raise refused

    def are_full(self, candidates: Sequence[Candidate], now: float) -> bool:
        """Whether each of them is prefill-busy, so that who needs one waits in the queue."""
        threshold, book = self._rules.queue.threshold, self._book
        if threshold is None:
            return False
        return all(prefill_busy(c, book.load(c.placement, now), threshold) for c in candidates)

    def passes_gate(self, query: Query, at: Candidate, now: float) -> bool:
        """Whether the bypass's gate at decode lets the request in there."""
        held = self._book.load(at.placement, now).decode_blocks
        own = decode_charge(query, block_size_of(query, at.instance.block_size))
        return self._rules.bypass.has_room(held, own, at.instance.total_kv_blocks)

    def can_split(self, ask: Ask) -> bool:
        """Whether a pair may serve the request, busy or not."""
        of = partial(self._fleet.candidates, ask.query.model)
        try:
            self._matched(ask, of("prefill"), of("decode"))
        except (Unavailable, InvalidRequest):
            return False
        return True

    def _ways(self, ask: Ask) -> Iterator[Picks | MeshError]:
        """The ways to serve a request, in order, each picked for when it is asked for; for one that
        is closed, why.
        """
        query, fleet = ask.query, self._fleet
        prefill = fleet.candidates(query.model, "prefill")
        decode = fleet.candidates(query.model, "decode")
        whole = fleet.candidates(query.model, "aggregated")
        if not (prefill or decode or whole):
            raise self.nobody(query.model, ask.now)
        if self._rules.lora_residency == "required":
            self._adapters.check(query, ask.now)
        pins_prefill, stays_whole = _pinned_prefill(query), self._stays_whole(ask, whole)
        local = [c for c in decode if c.instance.local_prefill]
        fallback, needs_local = "", False
        if prefill and decode and (pins_prefill or not stays_whole):
            pair = self._roomiest(ask, lambda ask: self._pick_pair(ask, prefill, decode))
            if not pins_prefill:
                bypassing = self._bypassed(ask, pair, (*local, *whole))
                if bypassing is not None:
                    yield bypassing
            yield pair
            if isinstance(pair, MeshError):
                fallback = _fallback_of(pair)
                needs_local = fallback != "no_decode_worker"
            else:
                fallback = "prefill_busy"
        elif (prefill or decode) and not stays_whole:
            fallback = f"no_{'decode' if prefill else 'prefill'}_worker"
            needs_local = not prefill
        if pins_prefill:
            if not (prefill and decode):
                yield self._no_pair(ask, pins_prefill, fallback)
            return
        if whole:
            yield self._pick_whole(ask, whole, fallback)
        if local and needs_local:
            is_urged = fallback in ("prefill_busy", "decode_busy")
            yield self._pick_whole(ask, local, fallback, is_gated=is_urged)
        yield self.nobody(query.model, ask.now, fallback.removeprefix("no_"))

    def _pick_whole(
        self, ask: Ask, candidates: Sequence[Candidate], fallback: str, *, is_gated: bool = False
    ) -> Picks | MeshError:
        """is_gated: the gate of the bypass closes workers like a busy threshold."""
        some = self._let_through(ask, candidates) if is_gated else candidates
        if not some:
            return all_busy(ask.query.model, "whole")

        def pick(ask: Ask) -> Picks:
            kept, excluded = self._eligible(ask, some, "whole")
            excluded += _without(candidates, some, _GATED)
            return Picks(self._select(ask, "whole", kept, excluded), fallback=fallback)

        return self._roomiest(ask, pick)

    def _roomiest(self, ask: Ask, pick: Callable[[Ask], Picks]) -> Picks | MeshError:
        """As its wishes have it; but where that is full, with whoever has room."""
        now = ask.now
        picks = _tried(lambda: pick(ask))
        if isinstance(picks, MeshError) or not self._wishes(ask):
            return picks
        if not self.are_full(picks.prefilling.kept, now):
            return picks
        freely = replace(ask, has_room=lambda at: not self.are_full((at,), now))
        other = _tried(lambda: pick(freely))
        return picks if isinstance(other, MeshError) else other

    def _wishes(self, ask: Ask) -> bool:
        """Whether it wishes for some of those who may serve it."""
        stay, routing = ask.stay, ask.query.routing
        if stay is not None and stay.binding is not None and not stay.is_hard:
            return True
        is_preferred = self._rules.lora_residency == "preferred"
        return is_preferred and routing is not None and bool(routing.lora_name)

    def _stays_whole(self, ask: Ask, whole: Sequence[Candidate]) -> bool:
        """Whether a pin or the session wants the request in one piece, on one of these."""
        pin = pinned_worker(ask.query.routing)
        if pin is not None:
            return any(c.placement.worker_id == pin for c in whole)
        tie = ask.tie("whole")
        if tie is None:
            return False
        mine = [c for c in whole if c.placement == tie.placement]
        if not mine or tie.is_hard:
            return bool(mine)
        return self._may_serve(ask, mine) and not self.are_full(mine, ask.now)

    def _may_serve(self, ask: Ask, candidates: Sequence[Candidate]) -> bool:
        try:
            return bool(self._eligible(ask, candidates, "whole")[0])
        except (Unavailable, InvalidRequest, Overloaded):
            return False

    def _pick_pair(
        self, ask: Ask, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> Picks:
        """Prefill first; then decode in its transfer group and domain."""
        domain = self._rules.domain
        first_leg, (can_decode, left_decode) = self._mates(ask, prefill, decode)
        first = self._select(ask, "prefill", *first_leg)
        takers = partners(first.chosen, can_decode, domain)
        left_decode += _without(can_decode, takers, _elsewhere(domain))
        drawn = replace(ask, query=domain.drawn_to(first.chosen, ask.query))
        return Picks(self._select(drawn, "decode", takers, left_decode), first)

    def _mates(
        self, ask: Ask, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> tuple[_Side, _Side]:
        """Of each side those who are free and have a free partner, with those left out and why.

        Raises Overloaded where there are mates, but not among the free.
        """
        free_prefill = self._free(ask, prefill, "prefill")
        free_decode = self._free(ask, decode, "decode")
        try:
            first, second = self._matched(ask, free_prefill, free_decode)
        except (Unavailable, InvalidRequest):
            if free_prefill is prefill and free_decode is decode:
                raise
            self._matched(ask, prefill, decode)  # Raises where it is not for being busy.
            try:
                self._matched(ask, prefill, free_decode)
            except (Unavailable, InvalidRequest):
                raise all_busy(ask.query.model, "decode") from None
            raise all_busy(ask.query.model, "prefill") from None
        return (
            (first[0], first[1] + _without(prefill, free_prefill, _BUSY)),
            (second[0], second[1] + _without(decode, free_decode, _BUSY)),
        )

    def _matched(
        self, ask: Ask, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> tuple[_Side, _Side]:
        """Of each side those who may serve and have a partner, with those left out and why."""
        domain = self._rules.domain
        may_prefill, left_prefill = self._allowed(ask, prefill, "prefill")
        may_decode, left_decode = self._allowed(ask, decode, "decode")
        can_prefill, can_decode = mates(may_prefill, may_decode, domain)
        if not can_prefill:
            borders = domain.name if mates(may_prefill, may_decode)[0] else ""
            raise _no_mates(ask.query.model, borders)
        left_prefill += _without(may_prefill, can_prefill, "has no partner to send its cache to")
        left_decode += _without(may_decode, can_decode, _elsewhere(domain))
        return (can_prefill, left_prefill), (can_decode, left_decode)

    def _bypassed(
        self, ask: Ask, pair: Picks | MeshError, alone: Sequence[Candidate]
    ) -> Picks | None:
        """One of `alone` instead of the pair, where `Bypass` has a reason; else None.

        Prefill workers that take no more requests, or let them wait, are busy whatever the
        threshold of the bypass.
        """
        query, rules = ask.query, self._rules.bypass
        if rules.policy == "off" or not alone or not query.total_tokens:
            return None
        if isinstance(pair, MeshError):
            if _fallback_of(pair) != "prefill_busy":
                return None
            is_busy = True
        else:
            at, view = pair.prefilling.chosen, pair.prefilling.view
            waiting = view.load(at.placement).prefill_tokens
            is_busy = rules.is_busy(waiting, at.instance.max_num_batched_tokens)
            is_busy = is_busy or self.are_full(pair.prefilling.kept, ask.now)
        in_order = sorted(alone, key=attrgetter("placement"))
        way = self._pick_whole(ask, in_order, "", is_gated=True)
        if isinstance(way, MeshError):
            return None
        why = rules.why(query.total_tokens, cached_tokens(query, way.worker), is_busy)
        return replace(way, bypass=why) if why else None

    def _let_through(self, ask: Ask, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those where the bypass's gate at decode lets the request in."""
        if self._rules.bypass.decode_busy_threshold is None:
            return candidates
        return [c for c in candidates if self.passes_gate(ask.query, c, ask.now)]

    def _eligible(self, ask: Ask, candidates: Sequence[Candidate], leg: Leg) -> _Side:
        """Those who may serve the leg and are not busy, with the others and why.

        Raises Overloaded where those who may serve it are all busy.
        """
        side = self._allowed(ask, candidates, leg)
        free = self._free(ask, candidates, leg)
        if free is candidates:
            return side
        if not free:
            raise all_busy(ask.query.model, leg)
        try:
            kept, excluded = self._allowed(ask, free, leg)
        except (Unavailable, InvalidRequest) as error:
            raise all_busy(ask.query.model, leg) from error
        return kept, excluded + _without(candidates, free, _BUSY)

    def _allowed(self, ask: Ask, candidates: Sequence[Candidate], leg: Leg) -> _Side:
        """Those whom the filters leave, with the others and why."""
        residency = self._rules.lora_residency
        has_room = None if ask.wishes(leg) else ask.has_room
        tie = ask.tie(leg)
        return eligible(ask.query, candidates, leg, tie=tie, residency=residency, has_room=has_room)

    def _free(self, ask: Ask, candidates: Sequence[Candidate], leg: Leg) -> Sequence[Candidate]:
        """Those that are not above a busy threshold; the very same sequence if all are not."""
        limits, book = self._rules.busy, self._book
        busy = busy_workers(candidates, lambda at: book.load(at, ask.now), limits, leg)
        if not busy:
            return candidates
        return [c for c in candidates if c.placement.worker_id not in busy]

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
        try:
            choice = self._selector.select(ask.query, kept, view, ask.rng)
            chosen = choice.candidate
        except MeshError:
            raise
        except Exception as error:
            # What it says is for the log: it may be anything.
            why = f"it raised {type(error).__name__}"
            raise _selector_failed(self._selector.name, ask.query.model, why) from error
        for one in kept:
            if one is chosen:
                return Pick(choice, view, kept, excluded, len(kept) + len(excluded))
        raise _selector_failed(self._selector.name, ask.query.model, "it chose no candidate")

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


def _tried(pick: Callable[[], Picks]) -> Picks | MeshError:
    try:
        return pick()
    except (Unavailable, InvalidRequest, Overloaded) as error:
        return error


def _together(parts: Iterable[Sequence[Candidate]]) -> Sequence[Candidate]:
    """All of them once; one part alone stays the object that it is."""
    every = list(parts)
    if len(every) == 1:
        return every[0]
    return list({c.placement: c for part in every for c in part}.values())


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


def _elsewhere(domain: TransferDomain) -> str:
    bounds = "transfer group or domain" if domain.is_required else "transfer group"
    return f"in another {bounds} than prefill"


def _pinned_prefill(query: Query) -> str:
    """The field by which the request pins its prefill; empty if by none."""
    if query.routing is not None:
        for name in ("prefill_worker_id", "prefill_dp_rank"):
            if getattr(query.routing, name) is not None:
                return name
    return ""


def _selector_failed(selector: str, model: str, why: str) -> Bug:
    """Whatever is wrong with a selector, which may be somebody else's code: nothing is booked, and
    another router, or this one in another state, may well choose.
    """
    metadata = {"selector": selector, "model": model}
    bug = Bug(f"the selector {selector!r} failed: {why}", reason=SELECTOR_FAILED, metadata=metadata)
    bug.retryable = True
    return bug


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
    if isinstance(error, Overloaded):
        return "prefill_busy" if error.metadata.get("leg") == "prefill" else "decode_busy"
    return "no_prefill_worker" if error.metadata.get("leg") == "prefill" else "no_decode_worker"
