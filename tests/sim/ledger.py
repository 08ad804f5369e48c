"""What routers decided, kept by somebody else than they: rules about each decision.

Rules by name: `session` (a live session's requests go where it is bound); `queue` (who waits is
served in order, and in time); `busy` (who has too much to do gets no more); `guess` (what a router
believes of a cache is what the index says, and what it sent there lately); `departed` (a model
whose last worker left is missed for a while, then forgotten).

All that is needed for them is written down here anew, from the questions and the answers. Times are
virtual seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from common.errors import MeshError, Unavailable, UnknownModel
from common.kv.hashing import hashes_from_bytes
from common.registry.instances import Changes, Instance
from common.request.preprocessed import RoutingHints, SessionAction
from router_svc.app import TICK_S
from router_svc.core.admission import Lane, Parked
from router_svc.core.busy import BusyLimits
from router_svc.core.fleet import MODEL_MEMORY_S, Placement
from router_svc.core.load_tracker import BookingKey
from router_svc.core.overlap import IndexChoice
from router_svc.core.policy import Rules
from router_svc.core.query import Query
from router_svc.core.router import Decision, Router

# Guesses are judged by the time of the latest tick, and leave with one of the next.
GUESS_SLACK_S = TICK_S + 0.01
# A router's clock shows the same time in one turn of the loop, whatever it does.
_NOW = 1e-9
# In a calm mesh all routers know what one of them has decided after this time.
TOLD_S = 1.5
# Idle sessions are looked for each second, when the router ticks.
FORGETS_S = 1.0 + 2 * TICK_S

Breach = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class _Bound:
    """Where a session went at some time, and by which ledger's router."""

    at: float
    by: Ledger
    worker: Placement
    prefill: Placement | None

    @property
    def places(self) -> tuple[Placement, ...]:
        return (self.worker,) if self.prefill is None else (self.worker, self.prefill)


@dataclass(frozen=True, slots=True)
class _Waiter:
    """One who was parked. group: whoever shares it waits for the same workers; key: by the queue's
    policy, the larger first; None where that depends on caches."""

    query: Query
    at: float
    group: object
    key: float | None


class Sessions:
    """Where the sessions of all routers of a mesh went, the latest last.

    is_calm: nothing has befallen the routers so far, and what they tell each other. used_at: when
    any request of any router lived last.
    """

    def __init__(self) -> None:
        self._bound: dict[tuple[str, str], list[_Bound]] = {}
        self._closed: dict[tuple[str, str], tuple[Ledger, float]] = {}
        self.is_calm = True
        self.used_at = float("-inf")

    def of(self, name: tuple[str, str]) -> list[_Bound]:
        """All of one session since it was last closed."""
        return self._bound.setdefault(name, [])

    def bound(self, name: tuple[str, str], ledger: Ledger, now: float) -> _Bound | None:
        """Where a session is for a router beyond doubt; None if that cannot be told.

        Routers tell each other. Of bonds that were made at about the same time either may hold, and
        where routers are disturbed nobody knows who has heard of what.
        """
        all_bound = self.of(name)
        if not all_bound:
            return None
        last = all_bound[-1]
        others = [one for one in all_bound if one.by is not last.by and last.at - one.at < TOLD_S]
        by, at = self._closed.get(name, (last.by, 0.0))
        is_doubtful = bool(others) or (by is not last.by and last.at - at < TOLD_S)
        if is_doubtful or not (last.by is ledger or (self.is_calm and now - last.at > TOLD_S)):
            return None
        return last

    def close(self, name: tuple[str, str], by: Ledger, now: float) -> None:
        """It ended, by a router's word."""
        self._bound.pop(name, None)
        self._closed[name] = by, now


class Ledger:
    """The decisions of one router. breach: takes a rule and what broke it. counts: what happened.

    sessions: those of all routers. rules, choice: the router's.
    """

    def __init__(
        self,
        breach: Breach,
        counts: Counter[str],
        sessions: Sessions,
        rules: Rules,
        choice: IndexChoice,
    ) -> None:
        self._breach = breach
        self._counts = counts
        self._sessions = sessions
        self._rules = rules
        self._choice = choice
        self._waiting: dict[BookingKey, _Waiter] = {}
        self._touched: dict[Placement, dict[tuple[str, int], float]] = {}
        self._last_guess = float("-inf")
        # Models that workers served, and when the last one was gone.
        self._models: dict[str, float | None] = {}

    # -- what routers tell ----------------------------------------------------------------------

    def updated(self, router: Router, changes: Changes, now: float) -> None:
        """The fleet changed."""
        for instance in changes.left:
            if instance.service == "worker":
                for place in [p for p in self._touched if p.worker_id == instance.id]:
                    del self._touched[place]
        served = router.fleet.models
        for model in served:
            self._models[model] = None
        for model, gone_at in self._models.items():
            if gone_at is None and model not in served:
                self._models[model] = now

    def parked(self, query: Query, key: BookingKey, now: float) -> None:
        """A question is to wait."""
        waiter = _Waiter(query, now, _group(query), self._queue_key(query, now))
        self._waiting[key] = waiter
        self._counts["requests parked"] += 1

    def placed(
        self, router: Router, query: Query, key: BookingKey, decision: Decision, now: float
    ) -> None:
        """A question was answered just now, at once or after a wait, and is booked."""
        mine = self._waiting.pop(key, None)
        if mine is None:
            ahead = list(self._still_waiting(router, _group(query)))
            # Those who wait for where their session was bound before are found at a tick, also if
            # it was bound to the same place again just now.
            if ahead and decision.affinity in ("", "kept"):
                self._breach("queue", f"{key.request_id} went past {len(ahead)} that wait")
        else:
            self._check_order(router, key, mine)
        self._decided(router, query, decision, now)

    def _check_order(self, router: Router, key: BookingKey, mine: _Waiter) -> None:
        parked = router.queue._parked.get(key)  # None: it was asked again.
        lane = None if parked is None else parked.lane
        for name, other in self._still_waiting(router, mine.group, lane):
            if other.query.strict_priority > mine.query.strict_priority:
                self._breach("queue", f"{key.request_id} came before {name}, of a higher level")
            elif other.query.strict_priority < mine.query.strict_priority:
                self._counts["levels passed"] += 1
            elif mine.key is not None and other.key is not None and other.key > mine.key + _NOW:
                self._breach("queue", f"{key.request_id} came before {name}, which was ahead of it")

    def refused(self, router: Router, query: Query, error: MeshError, now: float) -> None:
        """A question was answered with an error."""
        self._counts[f"refused: {error.reason}"] += 1
        if router.fleet.roles(query.model) or not router.fleet.was_seen:
            return
        gone_at = self._models.get(query.model)
        lately = gone_at is not None and now - gone_at < MODEL_MEMORY_S
        self._counts["models missed"] += lately
        self._counts["models forgotten"] += gone_at is not None and not lately
        if lately and not (isinstance(error, Unavailable) and error.retry_after_s):
            self._breach("departed", f"{query.model} left at {gone_at:.1f} s: {error!r}")
        if not lately and not isinstance(error, UnknownModel):
            self._breach("departed", f"{query.model} is not known, but it says {error!r}")

    # -- what others ask ------------------------------------------------------------------------

    def look(self, router: Router, now: float) -> None:
        """From time to time: nobody waits for too long."""
        if len(router.book):
            self._sessions.used_at = now
        waits_max = self._rules.queue.wait_max_s + TICK_S + 0.1
        for name, waiter in list(self._still_waiting(router, None)):
            if now - waiter.at > waits_max:
                self._breach("queue", f"{name} has waited for {now - waiter.at:.1f} s")

    def flaws(self, router: Router, now: float) -> Iterator[str]:
        """What the router should have forgotten by now, and has not."""
        age_s, overlaps, choice = now - self._last_guess, router.overlaps, self._choice
        for index, limits in (
            (overlaps.guesses, choice.guesses),
            (overlaps.predictions, choice.predictions),
        ):
            is_due = limits is not None and age_s > limits.ttl_s + 2 * TICK_S
            if is_due and index is not None and index.blocks:
                yield f"{index.blocks} guesses are left after {age_s:.1f} s"
        idle_s = now - self._sessions.used_at
        if len(router.affinity) and idle_s > self._rules.session_ttl_s + FORGETS_S:
            yield f"{len(router.affinity)} sessions are left after {idle_s:.1f} s"

    # -- decisions ------------------------------------------------------------------------------

    def _decided(self, router: Router, query: Query, decision: Decision, now: float) -> None:
        """One was made just now, and booked."""
        self._counts[f"session {decision.affinity}"] += bool(decision.affinity)
        self._check_busy(router, decision, now)
        self._check_belief(router, query, decision, now)
        routing = query.routing
        if routing is not None and routing.session_control is not None:
            self._check_session(router, query, decision, now)

    def _check_session(self, router: Router, query: Query, decision: Decision, now: float) -> None:
        assert query.routing is not None, "who names a session has hints"
        control = query.routing.session_control
        assert control is not None, "see above"
        name = (query.model, control.session_id)
        all_bound = self._sessions.of(name)
        mine = self._sessions.bound(name, self, now)
        went = _Bound(now, self, decision.worker, decision.prefill)
        if mine is not None and control.action is not SessionAction.OPEN:
            is_live = now - mine.at < self._rules.session_ttl_s
            is_there = all(router.fleet.has(place) for place in mine.places)
            is_free = any(at.worker_id in query.excluded_worker_ids for at in mine.places)
            is_bound = is_live and is_there and not is_free
            strays = is_bound and _strays(mine, went)
            if strays and not self._may_stray(router, mine, decision, now):
                what = f"{control.session_id} was at {_shown(mine)}, and went to {_shown(went)}"
                self._breach("session", what)
            if is_bound and went.prefill is None and mine.worker == went.worker:
                went = replace(went, prefill=mine.prefill)
            self._counts["sessions kept across"] += is_bound and mine.by is not self
        if control.action is SessionAction.CLOSE:
            self._sessions.close(name, self, now)
        else:
            all_bound.append(went)
            self._sessions.used_at = now

    def _may_stray(self, router: Router, bound: _Bound, decision: Decision, now: float) -> bool:
        """Whether a soft session's request need not wait for its own worker, which is busy."""
        rules = self._rules
        if rules.session_mode == "hard":
            return False
        if decision.fallback:
            return True  # Its own way of running was full, and the next one has other workers.
        load = _load_before(router, bound.prefill or bound.worker, decision, now)
        share, batch = rules.queue.threshold, load.worker.max_num_batched_tokens or 0
        is_full = share is not None and load.tokens > share * batch
        return is_full or not rules.busy.are_off

    def _check_busy(self, router: Router, decision: Decision, now: float) -> None:
        limits = self._rules.busy
        if limits.are_off:
            return
        worker = _load_before(router, decision.worker, decision, now)
        if decision.prefill is None:
            too_much = _too_many_tokens(worker, limits) or _too_many_blocks(worker, limits)
        else:
            prefill = _load_before(router, decision.prefill, decision, now)
            too_much = _too_many_tokens(prefill, limits) or _too_many_blocks(worker, limits)
        if too_much:
            self._breach("busy", f"{decision.worker.worker_id:x} was busy: {too_much}")

    def _check_belief(self, router: Router, query: Query, decision: Decision, now: float) -> None:
        """What was believed of the cache is what the index says, or was sent there lately."""
        place = decision.worker if decision.prefill is None else decision.prefill
        at = router.fleet.candidate(place)
        assert at is not None, "a decision is about somebody who is there"
        way, limits = self._way(at.instance), None
        if way == "approx":
            limits = self._choice.guesses
        elif way == "events":
            limits = self._choice.predictions
        told = 0
        if way == "events" and query.prefix_hashes:
            index = router.overlaps._index
            rows = {row.source: row.disk_blocks for row in index.match(query)}
            told = next((n for source, n in rows.items() if tuple(source) == tuple(place)), 0)
        least = most = told
        if limits is not None and query.prefix_hashes:
            hashes = hashes_from_bytes(query.prefix_hashes).tolist()
            touched = self._touched.setdefault(place, {})
            names = [(query.model, one) for one in hashes]
            most = max(told, _depth(names, touched, now - limits.ttl_s - GUESS_SLACK_S))
            if limits.blocks_max > 1 << 16:
                least = max(told, _depth(names, touched, now - limits.ttl_s + _NOW))
            touched.update(dict.fromkeys(names, now))
            self._last_guess = now
        believed = decision.overlap_blocks
        self._counts[f"blocks believed: {way}"] += believed > told
        if not least <= believed <= most:
            what = f"{least} to {most} blocks of {at.instance.stable_name}'s ({way})"
            self._breach("guess", f"a router believes in {believed}, it should be in {what}")

    def _way(self, worker: Instance) -> str:
        """How the router can know a worker's cache."""
        if self._choice.kind == "approx" and worker.kv_index == "events":
            return "approx"
        return worker.kv_index

    # -- the queue ------------------------------------------------------------------------------

    def _still_waiting(
        self, router: Router, group: object, lane: Lane | None = None
    ) -> Iterator[tuple[str, _Waiter]]:
        """Whom the router has not sent away meanwhile. None: of every group, of whatever lane."""
        parked = router.queue._parked
        for key in [key for key in self._waiting if key not in parked]:
            del self._waiting[key]
        for key, waiter in self._waiting.items():
            is_mate = group == waiter.group and _is_rightly_there(router, parked[key])
            if group is None or (is_mate and lane in (None, parked[key].lane)):
                yield key.request_id, waiter

    def _queue_key(self, query: Query, now: float) -> float | None:
        jump = max(0.0, (query.routing and query.routing.priority_jump) or 0.0)
        arrived_at = now - query.waited_s
        match self._rules.queue.policy:
            case "fcfs":
                return jump - arrived_at
            case "lcfs":
                return jump + arrived_at
        return None


def _strays(bound: _Bound, went: _Bound) -> bool:
    """Whether a request went elsewhere than its session."""
    splits = bound.prefill is not None and went.prefill is not None
    return bound.worker != went.worker or (splits and bound.prefill != went.prefill)


def _is_rightly_there(router: Router, parked: Parked) -> bool:
    """Whether its session is bound as it was when it was parked; else it is found at a tick."""
    stay = router.affinity.stay(parked.query, router.fleet.has)
    return parked.lane.places == (() if stay is None else stay.must)


def _group(query: Query) -> object:
    """Equal for those that may run on the same workers."""
    routing = replace(query.routing or RoutingHints(), priority_jump=None, priority=None)
    return (query.model, repr(routing), query.excluded_worker_ids)


def _depth(
    names: Sequence[tuple[str, int]], touched: dict[tuple[str, int], float], since: float
) -> int:
    """How many leading blocks were touched after some time."""
    for count, name in enumerate(names):
        if touched.get(name, float("-inf")) <= since:
            return count
    return len(names)


@dataclass(frozen=True, slots=True)
class _Load:
    worker: Instance
    tokens: int
    blocks: int


def _load_before(router: Router, place: Placement, decision: Decision, now: float) -> _Load:
    """What a rank had to do before a decision was booked on it."""
    at = router.fleet.candidate(place)
    assert at is not None, "a decision is about somebody who is there"
    load = router.book.load(place, now)
    prefills = place == (decision.prefill or decision.worker)
    return _Load(
        at.instance,
        load.prefill_tokens - (decision.prefill_tokens if prefills else 0),
        load.decode_blocks - (decision.decode_blocks if place == decision.worker else 0),
    )


def _too_many_tokens(load: _Load, limits: BusyLimits) -> str:
    tokens, batch = load.tokens, load.worker.max_num_batched_tokens or 0
    most, share = limits.active_prefill_tokens, limits.active_prefill_tokens_frac
    if (most is not None and tokens > most) or (share is not None and tokens > share * batch):
        return f"{tokens} tokens to compute"
    return ""


def _too_many_blocks(load: _Load, limits: BusyLimits) -> str:
    share = limits.active_decode_blocks
    if share is not None and load.blocks > share * (load.worker.total_kv_blocks or 0):
        return f"{load.blocks} blocks in use"
    return ""


def _shown(bound: _Bound) -> str:
    return " and ".join(f"{place.worker_id:x}" for place in bound.places)
